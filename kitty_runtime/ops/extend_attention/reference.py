"""Attention of many new tokens in plain torch: sequence by sequence, one tile per packing threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE
from kitty_runtime.ops.dense_attention import causal_mask, dense_attention
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec
from kitty_runtime.ops.quantize_page.reference import dequantize_keys, dequantize_values


def extend_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: LayerState,
    batch: Batch,
    softmax: SoftmaxSpec,
    read_packed: bool,
) -> Tensor:
    """See `kitty_runtime.ops.extend_attention.api.extend_attention`."""
    out = torch.zeros_like(query)
    spans = zip(batch.slots.tolist(), batch.past_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    for row, (slot, past_len, seq_len) in enumerate(spans):
        n = seq_len - past_len
        if n:
            q, k, v = (tokens[row, :, :n] for tokens in (query, keys, values))
            page_ids = batch.page_table[row, : state.windows.packed_pages(seq_len)[0]].long()
            out[row, :, :n] = _extend(q, k, v, state, slot, page_ids, past_len, softmax, read_packed or past_len > 0)
    return out


def _extend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: LayerState,
    slot: int,
    page_ids: Tensor,
    past_len: int,
    softmax: SoftmaxSpec,
    read_packed: bool,
) -> Tensor:
    """One sequence: query ``[num_q_heads, n, head_dim]``, keys and values ``[num_kv_heads, n, head_dim]``."""
    windows = state.windows
    total = past_len + keys.shape[1]
    all_keys = _gather(state.k_sink[slot], state.k_ring[slot], keys, past_len, windows.sink_len)
    all_values = _gather(state.v_sink[slot], state.v_ring[slot], values, past_len, windows.sink_len)
    paged_keys, paged_values = _dequantized(state, page_ids, windows.packed_pages(total - 1)[1], query.dtype)

    out = torch.empty_like(query)
    k_done = v_done = windows.sink_len
    for start, stop in windows.tiles(past_len, total) if read_packed else [(past_len, total)]:
        if read_packed:
            # From this tile on, its queries read these pages packed.
            k_pages, v_pages = windows.packed_pages(start)
            k_end, v_end = (windows.sink_len + n * PAGE_SIZE for n in (k_pages, v_pages))
            all_keys[:, k_done:k_end] = paged_keys[:, k_done - windows.sink_len : k_end - windows.sink_len]
            all_values[:, v_done:v_end] = paged_values[:, v_done - windows.sink_len : v_end - windows.sink_len]
            k_done, v_done = k_end, v_end
        tile = slice(start - past_len, stop - past_len)
        visible = causal_mask(stop - start, stop, query.device)
        q, k, v = query[None, :, tile], all_keys[None, :, :stop], all_values[None, :, :stop]
        out[:, tile] = dense_attention(q, k, v, visible, softmax)[0]
    return out


def _dequantized(state: LayerState, page_ids: Tensor, v_pages: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sequence's pages dequantized, each ``[num_kv_heads, num_pages * 128, head_dim]``."""
    pages = state.pages[page_ids]
    valid = torch.arange(len(page_ids), device=pages.device) < v_pages
    keys = dequantize_keys(pages, state.layout, dtype)
    values = dequantize_values(pages, valid, state.layout, dtype)
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def _gather(sink: Tensor, ring: Tensor, new: Tensor, past_len: int, sink_len: int) -> Tensor:
    """The unpacked tokens of one sequence and its new ones, at their positions.

    Args:
        sink: ``[num_kv_heads, sink_len, head_dim]``; ring: ``[num_kv_heads, ring_len, head_dim]``.
        new: ``[num_kv_heads, n, head_dim]``, at positions past_len .. past_len + n - 1.
    Returns:
        ``[num_kv_heads, past_len + n, head_dim]``; zero at positions that have left the ring.
    """
    out = new.new_zeros((new.shape[0], past_len + new.shape[1], new.shape[2]))
    out[:, : min(past_len, sink_len)] = sink[:, : min(past_len, sink_len)]
    if past_len > sink_len:
        recent = torch.arange(max(sink_len, past_len - ring.shape[1]), past_len, device=new.device)
        out[:, recent] = ring[:, (recent - sink_len) % ring.shape[1]]
    out[:, past_len:] = new
    return out
