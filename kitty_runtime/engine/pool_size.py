"""How many pages and slots a number of bytes holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.layers import layer_settings
from kitty_runtime.errors import MemoryLimitError
from kitty_runtime.memory import layout_of
from kitty_runtime.models.geometry import LayerGeometry
from kitty_runtime.ops.sliding_attention.api import sliding_windows
from kitty_runtime.profiles import BoostProfile

SLOT_SHARE = 0.5
"""Share of the cache's bytes that sinks and rings may take."""


@dataclass(frozen=True)
class CacheCost:
    """Bytes, all layers: of one page, and of one slot (a sequence's sink, ring and statistics)."""

    page_bytes: int
    slot_bytes: int


def cache_cost(
    layers: Sequence[LayerGeometry], config: CacheConfig, profile: BoostProfile | None, dtype: torch.dtype
) -> CacheCost:
    """What a page and a slot cost in a model of `dtype`."""
    page_bytes = slot_bytes = 0
    for layer, settings in zip(layers, layer_settings(layers, config, profile), strict=True):
        vector = layer.num_kv_heads * layer.head_dim
        if settings is None:
            assert layer.sliding_window is not None
            windows = sliding_windows(layer.sliding_window)
        else:
            windows = config.windows
            layer_config, boost = settings
            page_bytes += layout_of(layer, layer_config, boost, dtype).page_bytes
            if boost.needs_running_energy and layer_config.quantizes:
                slot_bytes += vector * torch.promote_types(dtype, torch.float32).itemsize
        unpacked = 2 * windows.sink_len + windows.k_ring_len + windows.v_ring_len
        slot_bytes += unpacked * vector * dtype.itemsize
    return CacheCost(page_bytes, slot_bytes)


@dataclass(frozen=True)
class PoolSize:
    """The engine's cache.

    Attributes:
        num_pages: of the pool.
        num_slots: sequences stored at once.
        longest_sequence: tokens of a sequence that has the pool for itself.
        total_bytes: of all tensors; one more slot fills batches up.
    """

    num_pages: int
    num_slots: int
    longest_sequence: int
    total_bytes: int

    @staticmethod
    def of(config: CacheConfig, cost: CacheCost, num_pages: int, num_slots: int, max_model_len: int) -> PoolSize:
        return PoolSize(
            num_pages=num_pages,
            num_slots=num_slots,
            longest_sequence=min(max_model_len, config.windows.longest(num_pages)),
            total_bytes=num_pages * cost.page_bytes + (num_slots + 1) * cost.slot_bytes,
        )


def size_pool(config: CacheConfig, cost: CacheCost, kv_bytes: int, max_num_seqs: int, max_model_len: int) -> PoolSize:
    """Share out `kv_bytes` between slots and pages.

    As many slots as asked for, but no more than half of the bytes hold; the rest becomes pages, no more than all
    slots can fill.

    Raises:
        MemoryLimitError: not one sequence fits.
    """
    num_slots = max(1, min(max_num_seqs, int(SLOT_SHARE * kv_bytes) // cost.slot_bytes - 1))
    left = kv_bytes - (num_slots + 1) * cost.slot_bytes
    if left < 0:
        raise MemoryLimitError(
            f"The cache may take {kv_bytes / 1e6:.0f} MB, one sequence needs {2 * cost.slot_bytes / 1e6:.0f} MB "
            "before its first page.",
            "Give it more memory, or use a smaller model.",
        )
    num_pages = min(left // cost.page_bytes, num_slots * config.packed_pages(max_model_len)[0])
    return PoolSize.of(config, cost, num_pages, num_slots, max_model_len)
