"""The engine's cache: fixed pages, sinks and rings of all layers, as the transformers `Cache` that a model fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kitty_runtime.cache.hf import AttendingLayer
from kitty_runtime.cache.paged_cache import CacheBytes
from kitty_runtime.cache.paged_layer import PagedLayer
from kitty_runtime.cache.step import Step
from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.layers import layer_settings
from kitty_runtime.engine.pool_size import PoolSize
from kitty_runtime.models.attention import kitty_attention
from kitty_runtime.models.geometry import LayerGeometry
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec
from kitty_runtime.ops.sliding_attention.api import sliding_attention, sliding_windows
from kitty_runtime.ops.store_tokens.api import store_tokens
from kitty_runtime.profiles import BoostProfile
from kitty_runtime.quant.packing import PageLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ENGINE_ATTENTION = "kitty_engine"
"""Name of the attention implementation. No mask function is registered under it: positions are given, and building a
mask would stop the stream at every step."""

AttentionInterface.register(ENGINE_ATTENTION, kitty_attention)


class EngineCache(Cache):  # type: ignore[misc]
    """Pages, sinks and rings, allocated once.

    Args:
        model_config: the model's; it must use ``attn_implementation="kitty_engine"`` in a forward pass.
        layers: the model's.
        config, profile: settings; what is not quantized by them has 16-bit pages.
        size: pages of the pool, in every paged layer, and slots; one more slot belongs to no sequence.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        layers: Sequence[LayerGeometry],
        config: CacheConfig,
        profile: BoostProfile | None,
        size: PoolSize,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        text_config = model_config.get_text_config(decoder=True)
        self.config = config
        self.num_slots = num_slots = size.num_slots + 1
        self.step: Step | Batch | None = None
        made: list[AttendingLayer] = []
        for layer, settings in zip(layers, layer_settings(layers, config, profile), strict=True):
            sample = torch.empty((num_slots, layer.num_kv_heads, 0, layer.head_dim), dtype=dtype, device=device)
            if settings is None:
                assert layer.sliding_window is not None
                made.append(SlidingEngineLayer(self, text_config, sample, layer.sliding_window))
            else:
                paged = PagedLayer(layer.index, *settings, sample)
                paged.ensure_pages(size.num_pages)
                made.append(PagedEngineLayer(self, text_config, paged))
        super().__init__(layers=made)

    def current(self) -> Step | Batch:
        """What the forward pass under way appends: a `Step` of prompts, or a `Batch` that decodes one token each."""
        assert self.step is not None, "a forward pass outside the engine"
        return self.step

    @property
    def paged_layers(self) -> list[PagedLayer]:
        return [layer.paged for layer in self.layers if isinstance(layer, PagedEngineLayer)]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of the cache."""
        return [tensor for state in self._states for tensor in state.tensors]

    @property
    def _states(self) -> list[LayerState]:
        return [layer.paged.state if isinstance(layer, PagedEngineLayer) else layer.state for layer in self.layers]

    def bytes_of(self, num_pages: int, num_slots: int) -> CacheBytes:
        """Bytes of so many pages and slots, all layers; sliding layers count as rings."""

        def per_slot(*tensors: Tensor) -> int:
            return sum(tensor.nbytes for tensor in tensors) // self.num_slots

        states = self._states
        return CacheBytes(
            pages=num_pages * sum(layer.state.layout.page_bytes for layer in self.paged_layers),
            sinks=num_slots * sum(per_slot(s.k_sink, s.v_sink) for s in states),
            rings=num_slots * sum(per_slot(s.k_ring, s.v_ring) for s in states),
            statistics=num_slots * sum(per_slot(s.query_sq_sum) for s in states if s.query_sq_sum is not None),
        )


class _EngineLayer(AttendingLayer):
    """A layer whose positions and lengths the engine knows: transformers is told of none."""

    attention_name = ENGINE_ATTENTION

    def __init__(self, cache: EngineCache, text_config: PreTrainedConfig) -> None:
        super().__init__(text_config)
        self._cache = cache

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class PagedEngineLayer(_EngineLayer):
    """A full-attention layer."""

    def __init__(self, cache: EngineCache, text_config: PreTrainedConfig, paged: PagedLayer) -> None:
        super().__init__(cache, text_config)
        self.paged = paged

    def attend_to(
        self, query: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, softmax: SoftmaxSpec
    ) -> Tensor:
        step = self._cache.current()
        if isinstance(step, Batch):
            return self.paged.decode(step, query, keys, values, softmax)
        return self.paged.attend(step, query, keys, values, softmax)


class SlidingEngineLayer(_EngineLayer):
    """A sliding-window layer: a ring per slot, no sink, no pages."""

    def __init__(self, cache: EngineCache, text_config: PreTrainedConfig, sample: Tensor, sliding_window: int) -> None:
        super().__init__(cache, text_config)
        num_slots, num_kv_heads, _, head_dim = sample.shape
        layout = PageLayout(num_kv_heads, head_dim, 16, 16, 0, sample.dtype)
        windows = sliding_windows(sliding_window)
        self.state = LayerState.allocate(layout, windows, num_slots, sample.dtype, sample.device)
        self._sliding_window = sliding_window

    def attend_to(
        self, query: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, softmax: SoftmaxSpec
    ) -> Tensor:
        step = self._cache.current()
        batch = step if isinstance(step, Batch) else step.batch(keys.device)
        if isinstance(step, Step):
            query, keys, values = (step.compact(tokens) for tokens in (query, keys, values))
        out = sliding_attention(query, keys, values, self.state, batch, softmax, self._sliding_window)
        store_tokens(self.state, batch, keys, values)
        return step.expand(out) if isinstance(step, Step) else out
