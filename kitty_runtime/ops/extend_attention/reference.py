"""Attention of many new tokens of one sequence, in plain torch: one tile per packing threshold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE, Windows
from kitty_runtime.ops.operands import LayerState, SoftmaxSpec, gather_tokens
from kitty_runtime.ops.quantize_page.reference import dequantize_keys, dequantize_values


def extend_attention(
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
    """See `kitty_runtime.ops.extend_attention.api.extend_attention`."""
    windows = state.windows
    total = past_len + keys.shape[1]
    all_keys = gather_tokens(state.k_sink[slot], state.k_ring[slot], keys, past_len, windows.sink_len)
    all_values = gather_tokens(state.v_sink[slot], state.v_ring[slot], values, past_len, windows.sink_len)
    paged_keys, paged_values = _dequantized(state, page_ids, windows.packed_pages(total - 1)[1], query.dtype)

    out = torch.empty_like(query)
    k_done = v_done = windows.sink_len
    for start, stop in tiles(windows, past_len, total) if read_packed else [(past_len, total)]:
        if read_packed:
            # From this tile on, its queries read these pages packed.
            k_pages, v_pages = windows.packed_pages(start)
            k_end, v_end = (windows.sink_len + n * PAGE_SIZE for n in (k_pages, v_pages))
            all_keys[:, k_done:k_end] = paged_keys[:, k_done - windows.sink_len : k_end - windows.sink_len]
            all_values[:, v_done:v_end] = paged_values[:, v_done - windows.sink_len : v_end - windows.sink_len]
            k_done, v_done = k_end, v_end
        tile = slice(start - past_len, stop - past_len)
        out[:, tile] = causal_attention(query[:, tile], all_keys[:, :stop], all_values[:, :stop], softmax)
    return out


def tiles(windows: Windows, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split query positions so that within a tile every query reads the same pages packed."""
    while start < stop:
        to_threshold = PAGE_SIZE - (start - windows.sink_len - windows.k_recent_len) % PAGE_SIZE
        end = min(stop, start + to_threshold)
        yield start, end
        start = end


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, softmax: SoftmaxSpec) -> Tensor:
    """The last ``query.shape[1]`` positions attend to all keys at or before them.

    Args:
        query: ``[num_q_heads, n, head_dim]``; keys, values: ``[num_kv_heads, seq_len, head_dim]``.
    Returns:
        ``[num_q_heads, n, head_dim]``.
    """
    n, seq_len = query.shape[1], keys.shape[1]
    visible = torch.ones(n, seq_len, dtype=torch.bool, device=query.device).tril(seq_len - n)
    if softmax.softcap is None and softmax.sink_logits is None:
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=visible, scale=softmax.scale, enable_gqa=True
        )[0]
    compute = torch.promote_types(query.dtype, torch.float32)
    groups = query.view(keys.shape[0], -1, n, query.shape[2])
    dots = torch.einsum("hgqd,hkd->hgqk", groups, keys).to(compute)
    weights = softmax.weights(dots, visible).to(values.dtype)
    return torch.einsum("hgqk,hkd->hgqd", weights, values).flatten(0, 1)


def _dequantized(state: LayerState, page_ids: Tensor, v_pages: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sequence's pages dequantized, each ``[num_kv_heads, num_pages * 128, head_dim]``."""
    pages = state.pages[page_ids]
    valid = torch.arange(len(page_ids), device=pages.device) < v_pages
    keys = dequantize_keys(pages, state.layout, dtype)
    values = dequantize_values(pages, valid, state.layout, dtype)
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)
