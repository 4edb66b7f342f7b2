"""One layer of the paged cache: append tokens, attend, pack pages."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kitty_runtime.cache.step import PagesToPack, Step
from kitty_runtime.config import PAGE_SIZE, CacheConfig
from kitty_runtime.errors import NumericsError, ShapeError
from kitty_runtime.ops.decode_attention.api import decode_attention
from kitty_runtime.ops.extend_attention.api import extend_attention
from kitty_runtime.ops.operands import LayerState, SoftmaxSpec, gather_tokens
from kitty_runtime.ops.quantize_page.api import quantize_keys, quantize_values
from kitty_runtime.quant.affine import FP16_MAX
from kitty_runtime.quant.boost import LayerBoost
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
        self.boost = boost
        layout = PageLayout(
            num_kv_heads,
            head_dim,
            config.k_bits,
            config.v_bits,
            boost.num_boosted,
            keys.dtype,
        )
        self.state = LayerState.allocate(layout, config.windows, num_seqs, keys.dtype, keys.device)
        self.query_sq_sum: Tensor | None = None
        """``[num_seqs, num_kv_heads, head_dim]``: sum over positions of the group's mean squared query."""
        if boost.needs_running_energy and config.quantizes:
            compute = torch.promote_types(keys.dtype, torch.float32)
            self.query_sq_sum = torch.zeros(num_seqs, num_kv_heads, head_dim, dtype=compute, device=keys.device)
        self._warned_saturation = False

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that lives with the layer."""
        return [*self.state.tensors, *([] if self.query_sq_sum is None else [self.query_sq_sum])]

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
        for name in ("k_sink", "v_sink", "k_ring", "v_ring"):
            tensor = getattr(self.state, name)
            setattr(self.state, name, tensor.index_select(0, rows.to(tensor.device)))
        if self.query_sq_sum is not None:
            self.query_sq_sum = self.query_sq_sum.index_select(0, rows.to(self.query_sq_sum.device))

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
            return self._decode(step, query, keys, values, softmax)
        out = torch.zeros_like(query)
        for row, count in enumerate(step.new_lens):
            if count:
                columns = step.columns(row)
                q, k, v = (t[row][:, columns] for t in (query, keys, values))
                out[row, :, columns] = self._extend(step, row, q, k, v, softmax)
        return out

    def _decode(
        self,
        step: Step,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: SoftmaxSpec,
    ) -> Tensor:
        state, at = self.state, step.decode_indices(keys.device)
        if keys.device.type == "cpu":  # on a GPU this would stop the stream at every step; pages are checked there
            self._check_finite(keys, values)
        k, v = keys[:, :, 0], values[:, :, 0]
        state.k_sink[at.sink_rows, :, at.sink_index] = k[at.sink_rows]
        state.v_sink[at.sink_rows, :, at.sink_index] = v[at.sink_rows]
        state.k_ring[at.ring_rows, :, at.k_ring_index] = k[at.ring_rows]
        state.v_ring[at.ring_rows, :, at.v_ring_index] = v[at.ring_rows]
        if self.query_sq_sum is not None:
            self.query_sq_sum += self._group_mean_sq(query)[:, :, 0]
        out = decode_attention(query[:, :, 0], state, at.slots, at.page_table, at.seq_lens, softmax)
        if at.keys_to_pack is not None:
            self._pack_keys(at.keys_to_pack, at.seq_lens)
        if at.values_to_pack is not None:
            pack = at.values_to_pack
            tokens = state.v_ring[pack.rows[:, None], :, pack.ring_index].transpose(1, 2)
            self._write_values(pack.page_ids, tokens)
        return out[:, :, None]

    def _pack_keys(self, pack: PagesToPack, seq_lens: Tensor) -> None:
        tokens = self.state.k_ring[pack.rows[:, None], :, pack.ring_index].transpose(1, 2)
        energy = None
        if self.query_sq_sum is not None:
            energy = (self.query_sq_sum[pack.rows] / seq_lens[pack.rows, None, None]).sqrt()
        self._write_keys(pack.page_ids, tokens, energy)

    def _extend(
        self,
        step: Step,
        row: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: SoftmaxSpec,
    ) -> Tensor:
        """Many new tokens of one sequence, ``[heads, n, head_dim]``: pack what becomes complete, attend, store."""
        state, windows, past_len = self.state, self.state.windows, step.past_lens[row]
        total = past_len + keys.shape[1]
        self._check_finite(keys, values)
        energy = self._extend_energy(row, query, past_len)
        page_ids = torch.tensor(step.tables[row], dtype=torch.int64, device=keys.device)
        k_before, v_before = windows.packed_pages(past_len)
        k_after, v_after = windows.packed_pages(total)
        if k_after > k_before:
            tokens = gather_tokens(state.k_sink[row], state.k_ring[row], keys, past_len, windows.sink_len)
            self._write_keys(page_ids[k_before:k_after], self._pages_of(tokens, k_before, k_after), energy)
        if v_after > v_before:
            tokens = gather_tokens(state.v_sink[row], state.v_ring[row], values, past_len, windows.sink_len)
            self._write_values(page_ids[v_before:v_after], self._pages_of(tokens, v_before, v_after))
        out = extend_attention(
            query,
            keys,
            values,
            state,
            row,
            page_ids,
            past_len,
            softmax,
            read_packed=self.config.prefill == "paged" or past_len > 0,
        )
        _store(state.k_sink[row], state.k_ring[row], keys, past_len)
        _store(state.v_sink[row], state.v_ring[row], values, past_len)
        return out

    def _pages_of(self, tokens: Tensor, first: int, stop: int) -> Tensor:
        """Tokens of pages first..stop-1 as ``[stop - first, num_kv_heads, 128, head_dim]``."""
        sink_len = self.state.windows.sink_len
        span = tokens[:, sink_len + first * PAGE_SIZE : sink_len + stop * PAGE_SIZE]
        pages = span.reshape(span.shape[0], stop - first, PAGE_SIZE, span.shape[2])
        return pages.transpose(0, 1)

    def _extend_energy(self, row: int, query: Tensor, past_len: int) -> Tensor | None:
        """Add these queries to the running sum; the energy at each packing threshold they cross, one per page."""
        if self.query_sq_sum is None:
            return None
        windows, total = self.state.windows, past_len + query.shape[1]
        squares = self._group_mean_sq(query[None])[0]
        energies = []
        for start, stop in windows.tiles(past_len, total):
            self.query_sq_sum[row] += squares[:, start - past_len : stop - past_len].sum(1)
            if windows.packed_pages(stop)[0] > windows.packed_pages(start)[0]:
                energies.append((self.query_sq_sum[row] / stop).sqrt())
        return torch.stack(energies) if energies else None

    def _group_mean_sq(self, query: Tensor) -> Tensor:
        """Mean squared query of each GQA group: ``[num_seqs, num_kv_heads, n, head_dim]``."""
        num_seqs, _, n, head_dim = query.shape
        groups = query.reshape(num_seqs, self.state.layout.num_kv_heads, -1, n, head_dim)
        return groups.to(torch.promote_types(query.dtype, torch.float32)).square().mean(2)

    def _write_keys(self, page_ids: Tensor, keys: Tensor, energy: Tensor | None) -> None:
        self._check_page(keys)
        channels = self.boost.choose(keys, energy)
        quantize_keys(self.state.pages, page_ids, keys, channels, self.state.layout)

    def _write_values(self, page_ids: Tensor, values: Tensor) -> None:
        self._check_page(values)
        quantize_values(self.state.pages, page_ids, values, self.state.layout)

    def _check_finite(self, *tensors: Tensor) -> None:
        if not all(bool(t.isfinite().all()) for t in tensors):
            raise NumericsError(
                f"Layer {self.index} computed NaN or infinite keys or values.",
                "The model overflows in this dtype or its weights are damaged: try --dtype float32 or bfloat16.",
            )

    def _check_page(self, tokens: Tensor) -> None:
        self._check_finite(tokens)
        if self.config.quantizes and not self._warned_saturation and bool((tokens.abs() > FP16_MAX).any()):
            self._warned_saturation = True
            logger.warning(
                "layer %d: keys or values beyond +-%d saturate; pages store fp16 scales", self.index, FP16_MAX
            )


def _store(sink: Tensor, ring: Tensor, new: Tensor, past_len: int) -> None:
    """Write new tokens ``[heads, n, head_dim]`` of one sequence to their sink or ring slots; newest win."""
    sink_len, ring_len, total = sink.shape[1], ring.shape[1], past_len + new.shape[1]
    in_sink = slice(past_len, min(sink_len, total))
    if in_sink.start < in_sink.stop:
        sink[:, in_sink] = new[:, : in_sink.stop - past_len]
    first = min(total, max(sink_len, past_len, total - ring_len))  # total: nothing reaches past the sink
    positions = torch.arange(first, total, device=new.device)
    ring[:, (positions - sink_len) % ring_len] = new[:, positions - past_len]
