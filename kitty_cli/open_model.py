"""From a command's flags to a model that is ready for the engine, and the notes that say what runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kitty_cli import output
from kitty_cli.commands.env import backend
from kitty_cli.commands.info import describe
from kitty_runtime.models.preflight import Dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kitty_runtime.config import CacheConfig
    from kitty_runtime.models.geometry import ModelGeometry
    from kitty_runtime.profiles import BoostProfile


@dataclass(frozen=True)
class ModelFlags:
    """Which model, with which cache, where."""

    model: str | None
    config: CacheConfig
    profile_path: Path | None
    device: str
    dtype: Dtype
    trust_remote_code: bool


@dataclass(frozen=True)
class OpenedModel:
    """A model for the engine; the profile that its cache uses, if any."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    geometry: ModelGeometry
    profile: BoostProfile | None


def open_model(
    flags: ModelFlags, check_tokenizer: Callable[[PreTrainedTokenizerBase], None] = lambda tokenizer: None
) -> OpenedModel:
    """Load what the flags name, and say on stderr which model, cache, profile and backend run.

    Args:
        check_tokenizer: raises what is to be refused before weights load.
    """
    from kitty_runtime.engine.cache import ENGINE_ATTENTION
    from kitty_runtime.engine.layers import check_layers
    from kitty_runtime.models.geometry import geometry_of
    from kitty_runtime.models.loading import load_config, load_model, load_tokenizer, resolve_model
    from kitty_runtime.profiles import layer_boosts, load_profile

    config, trusted = flags.config, flags.trust_remote_code
    given = None if flags.profile_path is None else load_profile(flags.profile_path)
    source = resolve_model(flags.model, output.note)
    geometry = geometry_of(load_config(source, trusted))
    check_layers(geometry.layers)
    layer_boosts(geometry.layers, config, given)  # a profile that does not fit is refused before weights load
    tokenizer = load_tokenizer(source, trusted)
    check_tokenizer(tokenizer)
    model = load_model(
        source,
        dtype=flags.dtype,
        device=flags.device,
        trust_remote_code=trusted,
        attn_implementation=ENGINE_ATTENTION,
    )
    profile, name = None, "not used by this preset"
    if config.uses_profile:
        profile, name = profile_for(model, geometry, given, flags.profile_path)
    elif given is not None:
        output.warning(f"The {config.policy} policy does not use the profile; use --preset tuned.")
    note_what_runs(source.name, model, config, name)
    return OpenedModel(source.name, model, tokenizer, geometry, profile)


def note_what_runs(name: str, model: PreTrainedModel, config: CacheConfig, profile_name: str) -> None:
    """A line each for model and backend, cache, profile."""
    runs = backend(model.device.type, model.dtype)
    output.note(f"{name} on {model.device}, {str(model.dtype).removeprefix('torch.')}; backend: {runs}")
    output.note(f"cache: {describe(config)}")
    output.note(f"profile: {profile_name}")


def profile_for(
    model: PreTrainedModel, geometry: ModelGeometry, given: BoostProfile | None, given_path: Path | None
) -> tuple[BoostProfile | None, str]:
    """See `kitty_runtime.profile_store.profile_for`; the warning goes to stderr."""
    from kitty_runtime import profile_store

    return profile_store.profile_for(model, geometry, given, given_path, output.warning)
