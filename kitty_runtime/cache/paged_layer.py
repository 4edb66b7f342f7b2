"""One layer of the paged cache: append tokens, attend, pack pages."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from kitty_runtime.cache.step import PackedStep, Step
from kitty_runtime.config import CacheConfig
from kitty_runtime.errors import NumericsError, ShapeError
from kitty_runtime.ops.decode_attention.api import decode_attention
from kitty_runtime.ops.extend_attention.api import extend_attention
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec
from kitty_runtime.ops.quantize_page.api import quantize_pages
from kitty_runtime.ops.rotate_values.api import rotate_values
from kitty_runtime.ops.store_tokens.api import store_tokens
from kitty_runtime.quant.affine import FP16_MAX
from kitty_runtime.quant.boost import LayerBoost, group_mean_sq
from kitty_runtime.quant.packing import PageLayout

logger = logging.getLogger(__name__)


class PagedLayer:
    """Keys and values of one attention layer, for all sequences of a `PagedCache`.

    Args:
        index: the layer's number in the model, for messages.
        config: settings of the cache.
        boost: how this layer chooses boosted channels.
        keys: ``[num_seqs, num_kv_heads, n, head_dim]``, a sample that gives head counts, dtype and device: under
            tensor parallelism the model's config does not.
    """

    def __init__(self, index: int, config: CacheConfig, boost: LayerBoost, keys: Tensor) -> None:
        num_seqs, num_kv_heads, _, head_dim = keys.shape
        self.index = index
        self.config = config
        self.boost = replace(
            boost,
            query_energy=None if boost.query_energy is None else boost.query_energy.to(keys.device),
            channels=None if boost.channels is None else boost.channels.to(keys.device),
        )
        layout = PageLayout(
            num_kv_heads,
            head_dim,
            config.k_bits,
            config.v_bits,
            boost.num_boosted,
            keys.dtype,
        )
        running_energy = boost.needs_running_energy and config.quantizes
        self.state = LayerState.allocate(layout, config.windows, num_seqs, keys.dtype, keys.device, running_energy)
        self._warned_saturation = False

    def ensure_pages(self, num_pages: int) -> None:
        """Grow the pages tensor to `num_pages`, contents kept."""
        pages = self.state.pages
        if pages.shape[0] < num_pages:
            grown = pages.new_zeros((num_pages, pages.shape[1]))
            grown[: pages.shape[0]] = pages
            self.state.pages = grown

    @torch.inference_mode(False)
    def reorder(self, rows: Tensor) -> None:
        """Sequence i becomes a copy of sequence ``rows[i]``; pages are shared, not copied."""
        for name in ("k_sink", "v_sink", "k_ring", "v_ring", "query_sq_sum"):
            tensor = getattr(self.state, name)
            if tensor is not None:
                setattr(self.state, name, tensor.index_select(0, rows.to(tensor.device)))

    def attend(
        self,
        step: Step,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: SoftmaxSpec,
    ) -> Tensor:
        """Append the step's tokens, attend with them, and pack the pages that are complete.

        Args:
            query: ``[num_seqs, num_q_heads, n, head_dim]``, after RoPE.
            keys, values: ``[num_seqs, num_kv_heads, n, head_dim]``; columns that are padding are ignored.
        Returns:
            ``[num_seqs, num_q_heads, n, head_dim]``, zero at padding.
        Raises:
            NumericsError: a key or value is NaN or infinite.
            ShapeError: the tensors do not fit the layer.
        """
        layout = self.state.layout
        if values.shape != keys.shape or keys.shape[1::2] != (layout.num_kv_heads, layout.head_dim):
            raise ShapeError(
                f"layer {self.index}: keys {tuple(keys.shape)}, values {tuple(values.shape)}, expected "
                f"{layout.num_kv_heads} heads of {layout.head_dim}"
            )
        if step.is_decode:
            return self.decode(step.batch(keys.device), query, keys, values, softmax)
        if isinstance(step, PackedStep):  # without padding: all are tokens
            self._check_unless_costly(keys, values)
        query, keys, values = (step.compact(tokens) for tokens in (query, keys, values))
        if not isinstance(step, PackedStep):
            self._check(*(t[row, :, :n] for row, n in enumerate(step.new_lens) if n for t in (keys, values)))
        return step.expand(self._extend(step, query, keys, values, softmax))

    def decode(self, batch: Batch, query: Tensor, keys: Tensor, values: Tensor, softmax: SoftmaxSpec) -> Tensor:
        """`attend` for one new token per sequence: on a GPU no stop of the stream, and no launch that depends on
        lengths.

        Args:
            batch: the sequences; all its tensors may change between calls, as those of a captured graph do. A slot
                that was another sequence's has to be taken by `attend` first.
        """
        state = self.state
        self._check_unless_costly(keys, values)
        values = self._rotated(values)
        store_tokens(state, batch, keys, values, None if state.query_sq_sum is None else query)
        out = decode_attention(query[:, :, 0], state, batch, softmax)
        if batch.max_new_pages:
            quantize_pages(state, batch, None, None, self.boost, clip_search=self.config.clip_search)
        return self._rotated(out)[:, :, None]

    def _extend(
        self,
        step: Step,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: SoftmaxSpec,
    ) -> Tensor:
        """Many new tokens, ``[num_seqs, heads, n, head_dim]``: pack what becomes complete, attend, store."""
        state, batch = self.state, step.batch(keys.device)
        energy = self._extend_energy(step, query)
        values = self._rotated(values)
        if batch.max_new_pages:
            quantize_pages(state, batch, keys, values, self.boost, energy, self.config.clip_search)
        read_packed = self.config.prefill == "paged"
        out = extend_attention(query, keys, values, state, batch, softmax, read_packed)
        store_tokens(state, batch, keys, values)
        return self._rotated(out)

    def _extend_energy(self, step: Step, query: Tensor) -> Tensor | None:
        """Add these queries to the running sums; the energy at each packing threshold they cross, one per page."""
        totals = self.state.query_sq_sum
        if totals is None:
            return None
        windows, batch = step.windows, step.batch(query.device)
        begins = (batch.past_lens == 0)[:, None, None]  # a slot that a new sequence takes starts anew
        before = totals[batch.slots].masked_fill(begins, 0)[:, None]
        new = group_mean_sq(query, self.state.layout.num_kv_heads).transpose(1, 2)
        sums = before + new.cumsum(1)  # [num_seqs, n, num_kv_heads, head_dim]
        row, past_lens = torch.arange(len(sums), device=sums.device), batch.past_lens.long()
        new_lens = batch.seq_lens - past_lens
        after = torch.where(new_lens[:, None, None] > 0, sums[row, new_lens - 1], before[:, 0])
        totals.index_copy_(0, batch.slots, after)
        page = windows.packed_pages(past_lens)[0][:, None] + torch.arange(batch.max_new_pages, device=sums.device)
        seen = windows.longest(page) + 1  # tokens when the page is packed; beyond this pass for pages that it lacks
        column = (seen - past_lens[:, None] - 1).clamp_max(sums.shape[1] - 1)
        return (sums[row[:, None], column] / seen[..., None, None]).sqrt()

    def _rotated(self, values: Tensor) -> Tensor:
        """Values before they are stored, or what attention made of stored ones, where the settings ask for it."""
        return rotate_values(values) if self.config.v_hadamard else values

    def _check_unless_costly(self, *tensors: Tensor) -> None:
        """On a GPU a look at the numbers would stop the stream, at every layer."""
        if tensors[0].device.type == "cpu":
            self._check(*tensors)

    def _check(self, *tensors: Tensor) -> None:
        """Refuse what is not finite; say once that pages cannot hold what is too large for them."""
        highest = max((float(t.abs().max()) for t in tensors), key=lambda x: math.inf if math.isnan(x) else x)
        if not math.isfinite(highest):
            raise NumericsError(
                f"Layer {self.index} computed NaN or infinite keys or values.",
                "The model overflows in this dtype or its weights are damaged: try --dtype float32 or bfloat16.",
            )
        if self.config.quantizes and highest > FP16_MAX and not self._warned_saturation:
            self._warned_saturation = True
            logger.warning(
                "layer %d: keys or values beyond +-%d saturate; pages store fp16 scales", self.index, FP16_MAX
            )
