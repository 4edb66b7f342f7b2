"""Decode attention in plain torch: a fixed number of batched operations, whatever the lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec
from kitty_runtime.ops.quantize_page.reference import dequantize_keys, dequantize_values


def decode_attention(
    query: Tensor,
    state: LayerState,
    batch: Batch,
    softmax: SoftmaxSpec,
) -> Tensor:
    """See `kitty_runtime.ops.decode_attention.api.decode_attention`."""
    layout, windows = state.layout, state.windows
    num_seqs, num_q_heads, head_dim = query.shape
    num_pages, slots = batch.page_table.shape[1], batch.slots
    compute = torch.promote_types(query.dtype, torch.float32)
    q = query.view(num_seqs, layout.num_kv_heads, -1, head_dim).to(compute)

    pos = (batch.seq_lens.long() - 1)[:, None]
    k_pages, v_pages = windows.packed_pages(pos)
    page = torch.arange(num_pages, device=query.device)
    flat_pages = state.pages[batch.page_table.clamp_min(0).flatten().long()]

    def by_sequence(paged: Tensor) -> Tensor:
        """[num_seqs * num_pages, H, 128, D] to [num_seqs, H, num_pages * 128, D]."""
        return paged.view(num_seqs, num_pages, *paged.shape[1:]).transpose(1, 2).flatten(2, 3)

    # Keys: sink, pages, ring; what is not there yet gets no weight.
    k_ring_pos = _ring_positions(pos, windows.sink_len, windows.k_ring_len)
    visible = torch.cat(
        [
            torch.arange(windows.sink_len, device=query.device) <= pos,
            (page < k_pages).repeat_interleave(PAGE_SIZE, dim=1),
            k_ring_pos >= windows.sink_len + k_pages * PAGE_SIZE,
        ],
        dim=1,
    )
    paged_keys = by_sequence(dequantize_keys(flat_pages, layout, compute))
    keys = (state.k_sink[slots].to(compute), paged_keys, state.k_ring[slots].to(compute))
    dots = torch.cat([q @ k.transpose(-1, -2) for k in keys], dim=-1)
    probs = softmax.weights(dots[:, :, :, None], visible[:, None, None, None])[:, :, :, 0]
    p_sink, p_pages, p_ring = torch.split(probs, [k.shape[2] for k in keys], dim=-1)

    # Values: the newest packed keys may belong to values that are still in the ring.
    v_ring_pos = _ring_positions(pos, windows.sink_len, windows.v_ring_len)
    in_ring = v_ring_pos >= windows.sink_len + v_pages * PAGE_SIZE
    offset = (v_ring_pos - windows.sink_len).clamp_min(0)
    column = torch.where(offset < k_pages * PAGE_SIZE, offset, num_pages * PAGE_SIZE + offset % windows.k_ring_len)
    column = column[:, None, None].expand(*p_ring.shape[:-1], -1)
    p_v_ring = torch.cat([p_pages, p_ring], dim=-1).gather(-1, column) * in_ring[:, None, None]
    v_ring = state.v_ring[slots].masked_fill(~in_ring[:, None, :, None], 0)
    v_sink = state.v_sink[slots].masked_fill(~visible[:, None, : windows.sink_len, None], 0)
    paged_values = by_sequence(dequantize_values(flat_pages, (page < v_pages).flatten(), layout, compute))
    out = p_sink @ v_sink.to(compute) + p_pages @ paged_values + p_v_ring @ v_ring.to(compute)
    return out.view(num_seqs, num_q_heads, head_dim).to(query.dtype)


def _ring_positions(pos: Tensor, sink_len: int, ring_len: int) -> Tensor:
    """Position held by each ring slot, ``[num_seqs, ring_len]``: below sink_len if none."""
    slot = torch.arange(ring_len, device=pos.device)
    return pos - (pos - sink_len - slot) % ring_len
