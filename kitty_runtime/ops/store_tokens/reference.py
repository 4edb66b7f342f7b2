"""Store new tokens in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.quant.boost import group_mean_sq


def store_tokens(state: LayerState, batch: Batch, keys: Tensor, values: Tensor, query: Tensor | None) -> None:
    """See `kitty_runtime.ops.store_tokens.api.store_tokens`."""
    if query is not None and state.query_sq_sum is not None:
        state.query_sq_sum.index_add_(0, batch.slots, group_mean_sq(query, state.layout.num_kv_heads)[:, :, 0])
    if keys.shape[2] == 1:
        sink_len, past = state.windows.sink_len, batch.past_lens.long()
        added = batch.seq_lens > batch.past_lens
        for sink, ring, new in ((state.k_sink, state.k_ring, keys), (state.v_sink, state.v_ring, values)):
            for buffer, rows, index in (
                (sink, added & (past < sink_len), past),
                (ring, added & (past >= sink_len), (past - sink_len) % ring.shape[2]),
            ):
                buffer[batch.slots[rows], :, index[rows]] = new[rows, :, 0]
        return
    spans = zip(batch.slots.tolist(), batch.past_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    for row, (slot, past_len, seq_len) in enumerate(spans):
        n = seq_len - past_len
        _store(state.k_sink[slot], state.k_ring[slot], keys[row, :, :n], past_len)
        _store(state.v_sink[slot], state.v_ring[slot], values[row, :, :n], past_len)


def _store(sink: Tensor, ring: Tensor, new: Tensor, past_len: int) -> None:
    """Tokens ``[heads, n, head_dim]`` of one sequence."""
    sink_len, ring_len, total = sink.shape[1], ring.shape[1], past_len + new.shape[1]
    in_sink = slice(past_len, min(sink_len, total))
    if in_sink.start < in_sink.stop:
        sink[:, in_sink] = new[:, : in_sink.stop - past_len]
    first = min(total, max(sink_len, past_len, total - ring_len))  # total: nothing reaches past the sink
    positions = torch.arange(first, total, device=new.device)
    ring[:, (positions - sink_len) % ring_len] = new[:, positions - past_len]
