"""What a cache costs in bytes, and how much context fits, from the model's config alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kitty_runtime.config import PAGE_SIZE, CacheConfig
from kitty_runtime.errors import ConfigError
from kitty_runtime.models.geometry import LayerGeometry, ModelGeometry
from kitty_runtime.profiles import BoostProfile, layer_boosts
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout

BYTES_16 = 2
"""An element of keys, values and weights of a 16-bit model."""

GIB = 2**30

RUNTIME_SHARE = 0.05
"""Share of the memory that stays free for activations, logits and the CUDA context; 1 GiB at the least."""


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence, all layers: packed pages; sink and ring buffers, which a sequence owns whole; running
    query statistics; layers kept as transformers caches them; and the same tokens at 16 bits."""

    pages: int
    sinks: int
    rings: int
    statistics: int
    kept_layers: int
    dense: int

    @property
    def total(self) -> int:
        return self.pages + self.sinks + self.rings + self.statistics + self.kept_layers

    @property
    def ratio(self) -> float:
        """How many times smaller than at 16 bits."""
        return self.dense / self.total


def sequence_bytes(
    layers: Sequence[LayerGeometry],
    config: CacheConfig,
    seq_len: int,
    profile: BoostProfile | None = None,
    dtype: torch.dtype = torch.float16,
) -> SequenceBytes:
    """Bytes of one sequence of `seq_len` tokens.

    Args:
        layers: the model's.
        config, profile: as `KittyCache` takes them.
        dtype: the model's; sinks, rings and kept layers hold it.
    """
    return _bytes_of(layers, layer_boosts(layers, config, profile), config, seq_len, dtype)


def _bytes_of(
    layers: Sequence[LayerGeometry],
    boosts: Sequence[LayerBoost | None],
    config: CacheConfig,
    seq_len: int,
    dtype: torch.dtype,
) -> SequenceBytes:
    pages = sinks = rings = statistics = kept = dense = 0
    windows, (k_pages, _) = config.windows, config.packed_pages(seq_len)
    for layer, boost in zip(layers, boosts, strict=True):
        visible = seq_len if layer.sliding_window is None else min(seq_len, layer.sliding_window)
        vector = layer.num_kv_heads * layer.head_dim
        dense += 2 * visible * vector * BYTES_16
        if boost is None:
            kept += 2 * visible * vector * dtype.itemsize
            continue
        pages += k_pages * layout_of(layer, config, boost, dtype).page_bytes
        sinks += 2 * windows.sink_len * vector * dtype.itemsize
        rings += (windows.k_ring_len + windows.v_ring_len) * vector * dtype.itemsize
        if boost.needs_running_energy and config.quantizes:
            statistics += vector * 4
    return SequenceBytes(pages, sinks, rings, statistics, kept, dense)


@dataclass(frozen=True)
class MeanCost:
    """What a cache costs at a length, averaged over one page of phases: a page is packed every 128 tokens, and just
    before a sequence costs most.

    Attributes:
        bytes_per_token: all bytes over the tokens; dense_bytes_per_token: the same at 16 bits.
    """

    bytes_per_token: float
    dense_bytes_per_token: float

    @property
    def effective_bits(self) -> float:
        """Bits per key or value number, whatever it is stored for."""
        return 16 * self.bytes_per_token / self.dense_bytes_per_token


def mean_cost(bytes_at: Callable[[int], SequenceBytes], seq_len: int) -> MeanCost:
    """Average over the 128 lengths around `seq_len`.

    Args:
        bytes_at: bytes of one sequence by length.
        seq_len: tokens, at least 64.
    """
    lengths = range(seq_len - PAGE_SIZE // 2, seq_len + PAGE_SIZE // 2)
    found = [bytes_at(length) for length in lengths]
    return MeanCost(sum(b.total for b in found) / sum(lengths), sum(b.dense for b in found) / sum(lengths))


def mean_sequence_cost(
    layers: Sequence[LayerGeometry], config: CacheConfig, seq_len: int, profile: BoostProfile | None = None
) -> MeanCost:
    """`mean_cost` of a paged cache whose unpacked tokens are at 16 bits. Arguments as `sequence_bytes`."""
    boosts = layer_boosts(layers, config, profile)
    return mean_cost(lambda length: _bytes_of(layers, boosts, config, length, torch.float16), seq_len)


def page_bits(layers: Sequence[LayerGeometry], config: CacheConfig, profile: BoostProfile | None = None) -> float:
    """Bits per key or value number in packed pages, scales and channel ids included; 16 where no layer is paged."""
    num_bytes = numbers = 0
    for layer, boost in zip(layers, layer_boosts(layers, config, profile), strict=True):
        if boost is not None:
            num_bytes += layout_of(layer, config, boost).page_bytes
            numbers += 2 * PAGE_SIZE * layer.num_kv_heads * layer.head_dim
    return 8 * num_bytes / numbers if numbers else 16.0


def layout_of(
    layer: LayerGeometry, config: CacheConfig, boost: LayerBoost, dtype: torch.dtype = torch.float16
) -> PageLayout:
    """The page format of a layer that is paged."""
    return PageLayout(layer.num_kv_heads, layer.head_dim, config.k_bits, config.v_bits, boost.num_boosted, dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """How a memory is shared out.

    Attributes:
        memory_bytes, weights_bytes, runtime_bytes: what there is, and what is taken before the cache.
        kv_bytes: what is left for keys and values; 0 if nothing is.
        num_tokens: tokens that fit in packed pages, beyond sinks and rings.
        longest_context: tokens of a single sequence, no longer than the model allows.
        batch_seq_len: length for the two numbers below.
        largest_batch: sequences of `batch_seq_len` at once; dense_batch: the same at 16 bits.
    """

    memory_bytes: int
    weights_bytes: int
    runtime_bytes: int
    kv_bytes: int
    num_tokens: int
    longest_context: int
    batch_seq_len: int
    largest_batch: int
    dense_batch: int


def plan_memory(
    geometry: ModelGeometry,
    config: CacheConfig,
    memory_bytes: int,
    profile: BoostProfile | None = None,
    seq_len: int = 8192,
) -> MemoryPlan:
    """Share out `memory_bytes` between 16-bit weights, the runtime and the cache."""
    weights = geometry.num_parameters * BYTES_16
    runtime = runtime_bytes(memory_bytes)
    kv = max(0, memory_bytes - weights - runtime)
    limit = geometry.max_position_embeddings or 2**24
    seq_len = min(seq_len, limit)

    def cost(tokens: int) -> SequenceBytes:
        return sequence_bytes(geometry.layers, config, tokens, profile)

    far = 2**20
    per_page = (cost(far + PAGE_SIZE).total - cost(far).total) or 1
    longest = _longest(limit, lambda tokens: cost(tokens).total <= kv)
    at_length = cost(seq_len)
    return MemoryPlan(
        memory_bytes=memory_bytes,
        weights_bytes=weights,
        runtime_bytes=runtime,
        kv_bytes=kv,
        num_tokens=kv // per_page * PAGE_SIZE,
        longest_context=longest,
        batch_seq_len=seq_len,
        largest_batch=kv // at_length.total,
        dense_batch=kv // at_length.dense,
    )


def runtime_bytes(memory_bytes: int) -> int:
    """What stays free of a memory beside weights and cache."""
    return max(GIB, int(RUNTIME_SHARE * memory_bytes))


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest length up to `limit` that fits, 0 if none does; `fits` holds up to some length and not beyond."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``80GB``, ``24GiB`` or ``1000000``.

    Raises:
        ConfigError: not a size.
    """
    number = text.strip().lower().rstrip("bikmgt")
    unit = text.strip().lower()[len(number) :].strip()
    unit = unit + "b" if unit in ("k", "m", "g", "t") else unit
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < 2**63:
        raise ConfigError(f"{text!r} is not a size of memory.", "Write it as 80GB or 24GiB.")
    return int(value)
