"""`KittyCache`: the paged cache as a transformers `Cache`, for ``generate()`` and plain forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kitty_runtime.cache.paged_cache import CacheBytes, PagedCache
from kitty_runtime.cache.step import Step
from kitty_runtime.config import DEFAULT_PRESET, CacheConfig, preset
from kitty_runtime.errors import ConfigError, UnsupportedOperationError
from kitty_runtime.models.attention import ATTENTION, with_layer
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.profiles import BoostProfile, layer_boosts
from kitty_runtime.quant.boost import LayerBoost

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class KittyCache(Cache):  # type: ignore[misc]
    """Keys and values of a batch in 2-bit (or 4-, or 16-bit) pages; sliding-window layers stay native.

    Args:
        model_config: the model's config; the model must use ``attn_implementation="kitty"``.
        cache_config: settings; the default is the preset `tuned`.
        profile: query energies and layer budgets; None uses running energies and the same budget in every layer.
        boosts: per layer, overrides what config and profile give; None keeps a layer as transformers caches it.
    Raises:
        UnsupportedModelError: the architecture cannot be paged.
        ProfileError: the profile's shapes are not the model's.

    Example:
        >>> model.set_attn_implementation("kitty")
        >>> cache = KittyCache(model.config, preset("kitty"))
        >>> model.generate(**inputs, past_key_values=cache)  # "cache=" from transformers 5.24 on
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        cache_config: CacheConfig | None = None,
        profile: BoostProfile | None = None,
        *,
        boosts: Sequence[LayerBoost | None] | None = None,
    ) -> None:
        if not isinstance(cache_config, CacheConfig | None):
            raise ConfigError(f"cache_config is {cache_config!r}.", 'Pass a CacheConfig, such as preset("kitty").')
        if not isinstance(profile, BoostProfile | None):
            raise ConfigError(f"profile is {profile!r}.", "Pass a BoostProfile: load_profile(path).")
        self.config = cache_config or preset(DEFAULT_PRESET)
        self.model_config = model_config.get_text_config(decoder=True)
        if boosts is None:
            boosts = layer_boosts(layers_of(model_config), self.config, profile)
        self._boosts = boosts
        self._paged: PagedCache | None = None
        self._step: Step | None = None
        self._num_passes = 0
        layers = DynamicCache(config=model_config).layers
        for index, boost in enumerate(boosts):
            if boost is not None:
                layers[index] = KittyLayer(self, index)
        super().__init__(layers=layers)

    @property
    def paged(self) -> PagedCache:
        """The pages, lengths and bytes; exists from the first forward pass on."""
        if self._paged is None:
            raise UnsupportedOperationError("The cache is empty.", "Run a forward pass first.")
        return self._paged

    def begin_pass(self, layer: KittyLayer, keys: Tensor, attention_mask: Tensor | None) -> Step:
        """The step that `layer` is in; the first layer of a forward pass begins a new one.

        Args:
            keys: ``[num_seqs, num_kv_heads, n, head_dim]``, the pass's new keys.
            attention_mask: bool ``[num_seqs, 1, n, seq_len]``, whose last row is the padding mask; None = no padding.
        """
        if self._paged is None:
            self._paged = PagedCache(self.config, self._boosts, keys.shape[0])
        if keys.shape[0] != self._paged.num_seqs:
            raise UnsupportedOperationError(
                f"A batch of {keys.shape[0]} sequences for a cache of {self._paged.num_seqs}.",
                "Use one cache per batch.",
            )
        if self._step is None or layer.passes == self._num_passes:
            if attention_mask is not None and attention_mask.dtype != torch.bool:
                raise UnsupportedOperationError(
                    f"A custom attention mask of {attention_mask.dtype}: the cache reads causally, padding left out.",
                    "Pass the two-dimensional padding mask.",
                )
            n = keys.shape[2]
            if attention_mask is not None and n > 1 and bool(attention_mask[:, 0, 0, -1].any()):
                raise UnsupportedOperationError(
                    "A custom attention mask lets a token see later ones: the cache reads causally.",
                    "Pass the two-dimensional padding mask.",
                )
            real = None if attention_mask is None else attention_mask[:, 0, -1, -n:].cpu()
            self._step = self._paged.begin_step(n, real)
            self._num_passes += 1  # only now: a refused pass must not look like one that has begun
        return self._step

    # --- what transformers calls -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens."""
        self._paged = self._step = None
        self._num_passes = 0
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i continues as a copy of sequence ``beam_idx[i]`` (beam search)."""
        if self._paged is not None:
            self._paged.reorder(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at `indices`."""
        if self._paged is not None:
            self._paged.reorder(indices)
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        if self._paged is not None:
            self._paged.reorder(torch.arange(self._paged.num_seqs).repeat_interleave(repeats))
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def activate_past_recording(self) -> None:
        """Refused: transformers calls this before assisted decoding, which rolls the cache back."""
        raise UnsupportedOperationError(
            "Assisted decoding takes tokens back out of the cache; packed pages cannot give them back.",
            "Generate without assistant_model and prompt_lookup_num_tokens.",
        )

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: see `activate_past_recording`."""
        raise UnsupportedOperationError(
            "crop() on a KittyCache: packed pages cannot give tokens back.",
            "Start a new cache from the shorter prompt.",
        )

    # --- what users look at ------------------------------------------------------------------------------------

    def used_bytes(self) -> CacheBytes:
        """See `PagedCache.used_bytes`; native layers are not counted."""
        return self.paged.used_bytes()

    def allocated_bytes(self) -> CacheBytes:
        """See `PagedCache.allocated_bytes`; native layers are not counted."""
        return self.paged.allocated_bytes()


class AttendingLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that attends itself: keys and values arrive in `update`, queries in `attend`.

    Args:
        model_config: the decoder's config, which names the attention in use.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    attention_name = ATTENTION

    def __init__(self, model_config: PreTrainedConfig) -> None:
        super().__init__()
        self._model_config = model_config
        self._length = 0
        self._pending: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.batch_size = key_states.shape[0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the pass's keys and values; they are stored when the attention function brings the queries."""
        implementation = self._model_config._attn_implementation
        if implementation != self.attention_name or self._pending is not None:
            raise ConfigError(
                f"The model's attention is {implementation!r}, which cannot read this cache.",
                f'Call model.set_attn_implementation("{self.attention_name}") first.',
            )
        self.lazy_initialization(key_states, value_states)
        self._pending = key_states, value_states
        return with_layer(key_states, self), value_states

    def attend(self, query: Tensor, attention_mask: Tensor | None, softmax: SoftmaxSpec) -> Tensor:
        """See `kitty_runtime.models.attention.AttendsItself`."""
        if self._pending is None:
            raise ConfigError("A cache layer attends without new keys.", "Call the model with use_cache=True.")
        keys, values = self._pending
        self._pending = None
        out = self.attend_to(query, keys, values, attention_mask, softmax)
        self._length += keys.shape[-2]
        return out

    def attend_to(
        self, query: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, softmax: SoftmaxSpec
    ) -> Tensor:
        """Store a pass's keys and values and attend with its queries: ``[num_seqs, num_q_heads, n, head_dim]``."""
        raise NotImplementedError

    def reset(self) -> None:
        self._length = 0
        self._pending = None
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Columns seen, padding included: what positions in the attention mask count."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """Name of `get_max_length` in transformers 5.17."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Done for all layers at once by `KittyCache.reorder_cache`."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Done for all layers at once by `KittyCache.batch_select_indices`."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Done for all layers at once by `KittyCache.batch_repeat_interleave`."""


class KittyLayer(AttendingLayer):
    """One paged layer of a `KittyCache`."""

    def __init__(self, cache: KittyCache, index: int) -> None:
        super().__init__(cache.model_config)
        self.passes = 0
        self._cache = cache
        self._index = index

    @torch.inference_mode(False)  # the cache outlives the caller's mode: its tensors must stay writable in any other
    @torch.no_grad()
    def attend_to(
        self, query: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, softmax: SoftmaxSpec
    ) -> Tensor:
        step = self._cache.begin_pass(self, keys, attention_mask)
        self.passes += 1
        layer = self._cache.paged.layer(self._index, keys)
        return layer.attend(step, query, keys, values, softmax)

    def reset(self) -> None:
        super().reset()
        self.passes = 0
