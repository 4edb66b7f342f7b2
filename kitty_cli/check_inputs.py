"""What a check measures, and what of it is refused before weights load: methods, windows, text, the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kitty_cli import output
from kitty_cli.method_specs import method_name, parse_methods
from kitty_runtime.config import DEFAULT_PRESET, CacheConfig, cache_config
from kitty_runtime.errors import ConfigError
from kitty_runtime.gate import check_packed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kitty_runtime.accuracy import Method
    from kitty_runtime.models.geometry import ModelGeometry
    from kitty_runtime.peers import Peer
    from kitty_runtime.profiles import BoostProfile
    from kitty_runtime.texts import Text

METHODS = "kivi-2-g128-sink,kitty,kitty-pro,tuned,kv4"
NUM_WINDOWS, SEQ_LEN = 4, 2048
FULL_WINDOWS, FULL_SEQ_LEN = 6, 4096


def chosen_methods(
    methods: str | None,
    preset: str | None,
    bits: int | None,
    k_bits: int | None,
    v_bits: int | None,
    boost: float | None,
) -> dict[str, CacheConfig | Peer]:
    """Methods by name: those of ``--methods`` and the one that the cache options describe; if none, `METHODS`.

    Raises:
        ConfigError: as `parse_methods` and `cache_config`.
    """
    explicit = any(flag is not None for flag in (preset, bits, k_bits, v_bits, boost))
    found: dict[str, CacheConfig | Peer] = {}
    if methods is not None or not explicit:
        found = parse_methods(METHODS if methods is None else methods)
    if explicit:
        config = cache_config(preset, bits, k_bits, v_bits, boost)
        found[method_name(config, preset or DEFAULT_PRESET)] = config
    return found


def window_shape(
    num_windows: int | None, seq_len: int | None, full: bool, model_name: str, limit: int | None
) -> tuple[int, int]:
    """How many windows of how many tokens.

    Args:
        num_windows, seq_len, full: as on the command line.
        limit: the longest text that the model reads, if it says so; a length that was not asked for is cut to it.
    Raises:
        ConfigError: windows too short to score or too long for the model, or two answers to one question.
    """
    from kitty_runtime.emulation import FIRST_SCORED

    if full and (num_windows is not None or seq_len is not None):
        raise ConfigError(f"--full is {FULL_WINDOWS} x {FULL_SEQ_LEN} tokens.", "Leave out --windows and --seq-len.")
    count = num_windows or (FULL_WINDOWS if full else NUM_WINDOWS)
    length = seq_len or (FULL_SEQ_LEN if full else SEQ_LEN)
    if limit is not None and length > limit:
        if seq_len is not None:
            raise ConfigError(f"--seq-len is {seq_len}, {model_name} reads {limit} tokens.", f"Use {limit} or fewer.")
        output.warning(f"{model_name} reads {limit} tokens; windows are cut to {limit}.")
        length = limit
    if length < FIRST_SCORED + 2:
        raise ConfigError(
            f"Windows of {length} tokens are too short: hardly anything is packed before token {FIRST_SCORED}.",
            f"Use {FIRST_SCORED + 2} tokens or more, and a model that reads as many.",
        )
    return count, length


def check_methods(
    geometry: ModelGeometry,
    methods: Mapping[str, CacheConfig | Peer],
    profile: BoostProfile | None,
    gated: bool,
    seq_len: int,
) -> None:
    """Verify that the model can store its cache so, and that a gate would mean something.

    Args:
        profile: the one given on the command line.
        gated: whether there is anything to pass or fail.
    Raises:
        ConfigError: a static policy without a profile, or a gate on a method that packs nothing.
        ProfileError: the profile does not fit the model.
        UnsupportedModelError: heads that a peer's groups do not divide.
    """
    from kitty_runtime.accuracy import packed_fraction
    from kitty_runtime.models.fingerprint import config_sha256
    from kitty_runtime.peers import check_peer
    from kitty_runtime.profile_store import find_profile
    from kitty_runtime.profiles import layer_boosts

    if profile is None:
        _, profile = find_profile(config_sha256(geometry), None) or (None, None)
    fractions = {}
    for name, method in methods.items():
        if isinstance(method, CacheConfig):
            layer_boosts(geometry.layers, method, profile)
            fractions[name] = packed_fraction(method, [seq_len])
        else:
            check_peer(method, geometry.layers)
    if gated:
        check_packed(fractions)


def text_windows(
    text: Text, tokenizer: PreTrainedTokenizerBase, num_windows: int, seq_len: int, seed: int
) -> list[Tensor]:
    """The stretches of text to measure on, int64 ``[seq_len]`` each.

    Raises:
        ConfigError: the text is too short.
    """
    from kitty_runtime.emulation import FIRST_SCORED
    from kitty_runtime.texts import tokenize, windows_of

    ids = tokenize(text, tokenizer)
    if len(ids) // seq_len < num_windows:
        hint = f"Use a longer text: hardly anything is packed before token {FIRST_SCORED}."
        if len(ids) >= FIRST_SCORED + 2:
            hint = f"Use a longer text, or less of it: --windows 1 --seq-len {min(len(ids), seq_len)}"
        raise ConfigError(f"{text.name} has {len(ids)} tokens, {num_windows} x {seq_len} are needed.", hint)
    return windows_of(text, ids, num_windows, seq_len, seed)


def with_profile(methods: Mapping[str, CacheConfig | Peer], profile: BoostProfile | None) -> dict[str, Method | Peer]:
    """The methods as they are measured: those whose policy uses a profile get it."""
    from kitty_runtime.accuracy import Method

    return {
        name: Method(method, profile if method.uses_profile else None) if isinstance(method, CacheConfig) else method
        for name, method in methods.items()
    }
