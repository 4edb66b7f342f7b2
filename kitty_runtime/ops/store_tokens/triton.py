"""Store new tokens as one Triton launch: keys, values and the running energy of queries, all KV heads and sequences."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kitty_runtime.ops.operands import Batch, LayerState

BLOCK = tl.constexpr(16)
PAGE = tl.constexpr(128)


@triton.jit
def _store_kernel(
    slots,
    past_lens,
    seq_lens,
    k_sink,
    v_sink,
    k_ring,
    v_ring,
    keys,
    values,
    query,
    query_sq_sum,
    num_kv_heads,
    k_row_stride,
    k_head_stride,
    k_token_stride,
    v_row_stride,
    v_head_stride,
    v_token_stride,
    q_row_stride,
    q_head_stride,
    SINK_LEN: tl.constexpr,
    K_RECENT: tl.constexpr,
    V_RECENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    past_len = tl.load(past_lens + row)
    seq_len = tl.load(seq_lens + row)
    slot_head = tl.load(slots + row).to(tl.int64) * num_kv_heads + head
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = past_len + token
    d = tl.arange(0, D)
    real = (position < seq_len)[:, None] & (d < HEAD_DIM)[None, :]
    in_sink = (position < SINK_LEN)[:, None]
    from_k = keys + row * k_row_stride + head * k_head_stride + token[:, None].to(tl.int64) * k_token_stride
    from_v = values + row * v_row_stride + head * v_head_stride + token[:, None].to(tl.int64) * v_token_stride
    k = tl.load(from_k + d[None, :], mask=real, other=0.0)
    v = tl.load(from_v + d[None, :], mask=real, other=0.0)
    if SINK_LEN > 0:
        at_sink = (slot_head * SINK_LEN + position)[:, None] * HEAD_DIM + d[None, :]
        tl.store(k_sink + at_sink, k, mask=real & in_sink)
        tl.store(v_sink + at_sink, v, mask=real & in_sink)
    k_len: tl.constexpr = K_RECENT + PAGE
    v_len: tl.constexpr = V_RECENT + PAGE
    offset = tl.maximum(position - SINK_LEN, 0)
    at_k = (slot_head * k_len + offset % k_len)[:, None] * HEAD_DIM + d[None, :]
    at_v = (slot_head * v_len + offset % v_len)[:, None] * HEAD_DIM + d[None, :]
    # Of tokens that share a slot only the newest is written.
    tl.store(k_ring + at_k, k, mask=real & ~in_sink & (position >= seq_len - k_len)[:, None])
    tl.store(v_ring + at_v, v, mask=real & ~in_sink & (position >= seq_len - v_len)[:, None])
    if GROUP_SIZE > 0:
        g = tl.arange(0, GROUP)
        channel = d < HEAD_DIM
        from_q = query + row * q_row_stride + (head * GROUP_SIZE + g)[:, None] * q_head_stride + d[None, :]
        q = tl.load(from_q, mask=(g < GROUP_SIZE)[:, None] & channel[None, :], other=0.0).to(tl.float32)
        sums = query_sq_sum + slot_head * HEAD_DIM + d
        mean_sq = tl.sum(q * q, 0) / GROUP_SIZE
        tl.store(sums, tl.load(sums, mask=channel, other=0.0) + mean_sq, mask=channel)


def store_tokens(state: LayerState, batch: Batch, keys: Tensor, values: Tensor, query: Tensor | None) -> None:
    """See `kitty_runtime.ops.store_tokens.api.store_tokens`."""
    layout, windows = state.layout, state.windows
    group_size = 0 if query is None else query.shape[1] // layout.num_kv_heads
    query = keys if query is None else query
    _store_kernel[(triton.cdiv(keys.shape[2], 16), layout.num_kv_heads, len(batch.slots))](
        batch.slots, batch.past_lens, batch.seq_lens,
        state.k_sink, state.v_sink, state.k_ring, state.v_ring, keys, values, query, state.query_sq_sum,
        layout.num_kv_heads, *keys.stride()[:3], *values.stride()[:3], *query.stride()[:2],
        SINK_LEN=windows.sink_len,
        K_RECENT=windows.k_recent_len,
        V_RECENT=windows.v_recent_len,
        HEAD_DIM=layout.head_dim,
        D=triton.next_power_of_2(layout.head_dim),
        GROUP_SIZE=group_size,
        GROUP=triton.next_power_of_2(max(1, group_size)),
        num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
