"""Sliding-window attention in plain torch: the ring and the new tokens side by side, masked by position."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty_runtime.ops.dense_attention import dense_attention
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec

QUERY_TILE = 512
"""Query tokens at once, to bound the logits in memory."""


def sliding_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: LayerState,
    batch: Batch,
    softmax: SoftmaxSpec,
    sliding_window: int,
) -> Tensor:
    """See `kitty_runtime.ops.sliding_attention.api.sliding_attention`."""
    n, ring_len = query.shape[2], state.k_ring.shape[2]
    rows = [slice(None)] if n == 1 else [slice(row, row + 1) for row in range(query.shape[0])]
    out = torch.empty_like(query)
    slot = torch.arange(ring_len, device=query.device)
    for row in rows:
        past = batch.past_lens[row].long()[:, None]
        new_pos = past + torch.arange(n, device=query.device)
        # A ring slot holds the newest position below `past` that falls on it; below 0 = nothing yet.
        key_pos = torch.cat([past - 1 - (past - 1 - slot) % ring_len, new_pos], dim=1)[:, None, None, :]
        all_keys = torch.cat([state.k_ring[batch.slots[row]], keys[row]], dim=2)
        all_values = torch.cat([state.v_ring[batch.slots[row]], values[row]], dim=2)
        all_values = all_values.masked_fill((key_pos < 0).transpose(-1, -2), 0)
        for start in range(0, n, QUERY_TILE):
            tile = slice(start, start + QUERY_TILE)
            query_pos = new_pos[:, None, tile, None]
            visible = (key_pos >= 0) & (key_pos <= query_pos) & (key_pos > query_pos - sliding_window)
            out[row, :, tile] = dense_attention(query[row, :, tile], all_keys, all_values, visible, softmax)
    return out
