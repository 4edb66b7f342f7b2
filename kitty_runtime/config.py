"""The cache settings: what is stored at how many bits, and which pages a query reads packed.

This is the one place that validates settings, and `Windows.packed_pages` is the one rule of position that
prefill, decode, chunks, later turns and the emulation obey. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from kitty_runtime.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Position = TypeVar("Position", int, "Tensor")

PAGE_SIZE = 128
"""Tokens in a page. A constant of the page format (PageLayout), not a setting."""

Policy = Literal["dynamic", "static", "weighted", "random"]
Prefill = Literal["paged", "full"]

Metric = Literal["query", "magnitude", "attention"]
"""How channels are scored. query: rms(q) over the GQA group times the mean range of a page. magnitude: mean |k| (the
paper's heuristic). attention: mean squared change of the attention probabilities when that channel alone is at 2 bits
(the paper's definition)."""


@dataclass(frozen=True)
class Windows:
    """The full-precision tokens around the pages: the first `sink_len` and the most recent ones, in tokens."""

    sink_len: int
    k_recent_len: int
    v_recent_len: int

    def packed_pages(self, query_pos: Position) -> tuple[Position, Position]:
        """How many pages of keys and of values are packed when the query at `query_pos` attends.

        Page p covers positions sink_len + 128 p .. sink_len + 128 p + 127 and its keys are read packed from
        position sink_len + 128 (p + 1) + k_recent_len on. A pure function of position, so chunk sizes, batch and
        arrival order cannot change an answer.

        Args:
            query_pos: position of the query in its sequence, from 0; an int or an integer tensor of any shape.
        Returns:
            ``(k_pages, v_pages)`` with ``k_pages - v_pages`` in {0, 1}.
        Source: Kitty, section 4.3 (decode). Differs: the paper's prefill attends to unquantized keys and values;
        that is ``CacheConfig.prefill == "full"``.
        """
        past_sink = query_pos - self.sink_len
        k_tokens, v_tokens = past_sink - self.k_recent_len, past_sink - self.v_recent_len
        # max(0, x) // 128, written so that it holds for ints and tensors alike
        return k_tokens * (k_tokens > 0) // PAGE_SIZE, v_tokens * (v_tokens > 0) // PAGE_SIZE

    def longest(self, num_pages: Position) -> Position:
        """The most tokens that a sequence stores with `num_pages` pages packed: the inverse of `packed_pages`."""
        return self.sink_len + self.k_recent_len + (num_pages + 1) * PAGE_SIZE - 1

    def tiles(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split query positions start..stop-1 so that within a tile every query reads the same pages packed."""
        while start < stop:
            to_threshold = PAGE_SIZE - (start - self.sink_len - self.k_recent_len) % PAGE_SIZE
            end = min(stop, start + to_threshold)
            yield start, end
            start = end

    @property
    def k_ring_len(self) -> int:
        """Slots of the ring of recent keys: the window plus one gathering page."""
        return self.k_recent_len + PAGE_SIZE

    @property
    def v_ring_len(self) -> int:
        """Slots of the ring of recent values."""
        return self.v_recent_len + PAGE_SIZE


@dataclass(frozen=True)
class CacheConfig:
    """Settings of a paged key-value cache.

    Attributes:
        k_bits, v_bits: 2 or 4 each, or 16 for both (stored as the model computes them).
        boost_ratio: share of key channels, in [0, 1], whose codes have 4 bits instead of 2.
        sink_len: first tokens kept unpacked.
        k_recent_len, v_recent_len: newest tokens kept unpacked, at the least; ``v - k`` is 0 or 128.
        policy: how boosted channels are chosen. ``dynamic``: per page, mean absolute key (the paper).
            ``weighted``: per page, range times query energy, from the profile or running. ``static``: the
            profile's channels. ``random``: fixed random channels (a baseline).
        prefill: ``paged``: a prompt reads what decode would read. ``full``: a prompt attends to itself
            unquantized (the paper), for one-pass ``generate()`` only.
        seed: of the ``random`` policy.
        clip_search: give each key channel of a page, of a few clipped ranges, the one that leaves the least squared
            error. Packing takes longer, reading does not.
        v_hadamard: values are stored rotated by a Hadamard matrix; what attention makes of them is rotated back.
    Raises:
        ConfigError: a value the page format or the windows cannot hold.
    """

    k_bits: int = 2
    v_bits: int = 2
    boost_ratio: float = 0.125
    sink_len: int = 32
    k_recent_len: int = 64
    v_recent_len: int = 64
    policy: Policy = "weighted"
    prefill: Prefill = "paged"
    seed: int = 0
    clip_search: bool = False
    v_hadamard: bool = False

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) not in (2, 4, 16):
                raise ConfigError(f"{name} is {getattr(self, name)!r}", "Use 2, 4 or 16.")
        if (self.k_bits == 16) != (self.v_bits == 16):
            raise ConfigError(
                f"k_bits {self.k_bits} with v_bits {self.v_bits}",
                "16 bits means keys and values both unpacked: set both to 16 or neither.",
            )
        is_number = isinstance(self.boost_ratio, int | float) and not isinstance(self.boost_ratio, bool)
        if not is_number or not 0.0 <= self.boost_ratio <= 1.0:
            raise ConfigError(f"boost_ratio is {self.boost_ratio!r}", "Use a share from 0 to 1, such as 0.125.")
        if self.boost_ratio and self.k_bits != 2:
            raise ConfigError(
                f"boost_ratio {self.boost_ratio} with k_bits {self.k_bits}",
                "Boost lifts 2-bit key channels to 4 bits: set k_bits to 2, or boost_ratio to 0.",
            )
        if self.v_hadamard and self.v_bits == 16:
            raise ConfigError("v_hadamard with v_bits 16", "Unpacked values are not rotated: leave it out.")
        for name in ("sink_len", "k_recent_len", "v_recent_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is {value!r}", "Use a number of tokens, 0 or more.")
        if self.v_recent_len - self.k_recent_len not in (0, PAGE_SIZE):
            raise ConfigError(
                f"v_recent_len {self.v_recent_len} - k_recent_len {self.k_recent_len} is "
                f"{self.v_recent_len - self.k_recent_len}",
                f"Values stay as long as keys or one page ({PAGE_SIZE} tokens) longer.",
            )
        if self.policy not in get_args(Policy):
            raise ConfigError(f"policy is {self.policy!r}", f"Use one of {', '.join(get_args(Policy))}.")
        if self.prefill not in get_args(Prefill):
            raise ConfigError(f"prefill is {self.prefill!r}", f"Use one of {', '.join(get_args(Prefill))}.")

    @property
    def windows(self) -> Windows:
        return Windows(self.sink_len, self.k_recent_len, self.v_recent_len)

    @property
    def quantizes(self) -> bool:
        return self.k_bits != 16

    @property
    def uses_profile(self) -> bool:
        """Whether the policy takes energies, channels and budgets from a boost profile."""
        return self.quantizes and self.policy in ("weighted", "static")

    def num_boosted(self, head_dim: int) -> int:
        """Channels at 4 bits in a layer without its own budget: ``int(boost_ratio * head_dim)`` as in the paper, all
        of them for 4-bit keys, none at 16 bits."""
        if self.k_bits != 2:
            return head_dim if self.k_bits == 4 else 0
        return int(self.boost_ratio * head_dim + 1e-9)

    def packed_pages(self, query_pos: Position) -> tuple[Position, Position]:
        """See `Windows.packed_pages`."""
        return self.windows.packed_pages(query_pos)


DEFAULT_PRESET = "tuned"

_PAPER = CacheConfig(policy="dynamic", k_recent_len=0, v_recent_len=PAGE_SIZE)

PRESETS: dict[str, CacheConfig] = {
    DEFAULT_PRESET: CacheConfig(clip_search=True, v_hadamard=True),
    "weighted": CacheConfig(),
    "kitty": _PAPER,
    "kitty-pro": replace(_PAPER, boost_ratio=0.25),
    "random": replace(_PAPER, policy="random"),
    "kivi-2-g128": replace(_PAPER, boost_ratio=0.0, sink_len=0),
    "kivi-2-g128-sink": replace(_PAPER, boost_ratio=0.0),
    "kv4": replace(_PAPER, boost_ratio=0.0, k_bits=4, v_bits=4),
    "16": CacheConfig(16, 16, boost_ratio=0.0, sink_len=0, k_recent_len=0, v_recent_len=0, policy="dynamic"),
}


def preset(name: str) -> CacheConfig:
    """The named settings.

    Raises:
        ConfigError: no preset has that name.
    Source: Kitty, section 5.1, names its baselines; their groups here are one page (128 tokens).
    """
    if name not in PRESETS:
        raise ConfigError(f"No preset is called {name!r}.", f"Use one of {', '.join(PRESETS)}.")
    return PRESETS[name]


def cache_config(
    preset_name: str | None = None,
    bits: int | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    boost: float | None = None,
) -> CacheConfig:
    """The settings that users ask for: a preset, changed by each value that was given.

    Raises:
        ConfigError: values that contradict each other or the page format.
    """
    config = preset(preset_name or DEFAULT_PRESET)
    if not config.quantizes and (bits or k_bits or v_bits or 16) != 16:
        raise ConfigError("The preset 16 packs nothing, the bits ask for packing.", "Leave one of them out.")
    k_bits, v_bits = (bits if k_bits is None else k_bits), (bits if v_bits is None else v_bits)
    if k_bits == v_bits == 16:
        config = preset("16")
    changes: dict[str, Any] = {}
    if k_bits is not None:
        changes["k_bits"] = k_bits
        if k_bits != 2:  # boost lifts 2-bit channels to 4 bits
            changes["boost_ratio"] = 0.0
    if v_bits is not None:
        changes["v_bits"] = v_bits
    if boost is not None:
        changes["boost_ratio"] = boost
    return replace(config, **changes)
