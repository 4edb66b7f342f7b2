"""Attention of many new tokens as one Triton launch: pages are dequantized tile by tile, never as a whole.

A program holds the queries of one KV head's group at some positions between two packing thresholds, so that all of them
read the same pages packed. It goes through those pages, then through the page whose keys alone are packed, then through
what is not packed: sink, ring and the new tokens, which are not stored yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec
from kitty_runtime.ops.triton_pages import LOG2E, WORDS, capped, rows_are_aligned

PAGE = tl.constexpr(128)
TILE = tl.constexpr(64)
"""Tokens of keys and values at a time: half a page."""


@triton.jit
def _codes(words, token):
    """Two-bit codes of tokens of a page, of the words that hold them; see `kitty_runtime.quant.packing`."""
    return (words.to(tl.int32) >> (token // WORDS * 2)) & 3


@triton.jit
def _packed_keys(
    at,
    ids_at,
    token,
    d,
    b,
    channel,
    num_boosted,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    K_HIGH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BOOSTED: tl.constexpr,
    DENSE: tl.constexpr,
    K4: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Keys of a page's tokens, [D, TILE]."""
    if DENSE:
        rows = at.to(tl.pointer_type(DTYPE)) + token[None, :] * HEAD_DIM
        return tl.load(rows + d[:, None], mask=channel[:, None], other=0.0).to(OPERAND)
    else:
        words = at.to(tl.pointer_type(tl.uint16))
        halves = at.to(tl.pointer_type(tl.float16))
        j = token % WORDS
        codes = _codes(
            tl.load(words + j[None, :] * HEAD_DIM + d[:, None], mask=channel[:, None], other=0), token[None, :]
        )
        if K4:
            high = words + K_HIGH // 2 + j[None, :] * HEAD_DIM + d[:, None]
            codes += _codes(tl.load(high, mask=channel[:, None], other=0), token[None, :]) * 4
        elif BOOSTED > 0:
            real = b < num_boosted
            ids = tl.where(real, tl.load(ids_at + b, mask=real, other=0).to(tl.int32), HEAD_DIM)[None, :]
            boosted = tl.max((ids == d[:, None]).to(tl.int32), 1) > 0
            # A channel's column in the compact plane: ids ascend.
            place = tl.sum((ids < d[:, None]).to(tl.int32), 1)
            high = words + K_HIGH // 2 + j[None, :] * num_boosted + place[:, None]
            codes += _codes(tl.load(high, mask=(boosted & channel)[:, None], other=0), token[None, :]) * 4
        scale = tl.load(halves + K_SCALE // 2 + d, mask=channel, other=0.0).to(tl.float32)
        zero = tl.load(halves + K_ZERO // 2 + d, mask=channel, other=0.0).to(tl.float32)
        return (codes.to(tl.float32) * scale[:, None] + zero[:, None]).to(OPERAND)


@triton.jit
def _packed_values(
    at,
    token,
    d,
    channel,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DENSE: tl.constexpr,
    V4: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Values of a page's tokens, [TILE, D]."""
    if DENSE:
        rows = at.to(tl.pointer_type(DTYPE)) + (PAGE + token[:, None]) * HEAD_DIM
        return tl.load(rows + d[None, :], mask=channel[None, :], other=0.0).to(OPERAND)
    else:
        words = at.to(tl.pointer_type(tl.uint16)) + d[None, :] * WORDS + (token % WORDS)[:, None]
        codes = _codes(tl.load(words + V_LOW // 2, mask=channel[None, :], other=0), token[:, None])
        if V4:
            codes += _codes(tl.load(words + V_HIGH // 2, mask=channel[None, :], other=0), token[:, None]) * 4
        halves = at.to(tl.pointer_type(tl.float16))
        scale = tl.load(halves + V_SCALE // 2 + token).to(tl.float32)
        zero = tl.load(halves + V_ZERO // 2 + token).to(tl.float32)
        return (codes.to(tl.float32) * scale[:, None] + zero[:, None]).to(OPERAND)


@triton.jit
def _rows_of(
    pos,
    past_len,
    sink,
    ring,
    new,
    token_stride,
    SINK_LEN: tl.constexpr,
    RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Where tokens lie that are not packed: in the sink, the ring, or among the new ones."""
    row = ring + (tl.maximum(pos - SINK_LEN, 0) % RING) * HEAD_DIM
    if SINK_LEN > 0:
        row = tl.where(pos < SINK_LEN, sink + pos * HEAD_DIM, row)
    row = tl.where(pos >= past_len, new + tl.maximum(pos - past_len, 0).to(tl.int64) * token_stride, row)
    return tl.multiple_of(row, 16) if ALIGNED else row


@triton.jit
def _softmax_step(s, top, denom, acc):
    """Weights of one tile's logits (in units of log2(e)), and the running sums brought to the new highest logit."""
    new_top = tl.maximum(top, tl.max(s, 1))
    fade = tl.exp2(top - new_top)
    weights = tl.exp2(s - new_top[:, None])
    return weights, new_top, denom * fade + tl.sum(weights, 1), acc * fade[:, None]


# Not compiled anew for each width of the page table.
@triton.jit(do_not_specialize=["table_stride"])
def _extend_kernel(
    query,
    new_keys,
    new_values,
    out,
    pages,
    page_table,
    slots,
    past_lens,
    seq_lens,
    k_sink,
    v_sink,
    k_ring,
    v_ring,
    sink_logits,
    table_stride,
    num_kv_heads,
    page_bytes,
    head_bytes,
    ids_at,
    ids_bytes,
    num_boosted,
    scale,
    softcap,
    q_row_stride,
    q_head_stride,
    q_token_stride,
    o_row_stride,
    o_head_stride,
    o_token_stride,
    k_row_stride,
    k_head_stride,
    k_token_stride,
    v_row_stride,
    v_head_stride,
    v_token_stride,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    K_HIGH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BOOSTED: tl.constexpr,
    DENSE: tl.constexpr,
    K4: tl.constexpr,
    V4: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    READ_PACKED: tl.constexpr,
    SINK_LEN: tl.constexpr,
    K_RECENT: tl.constexpr,
    V_RECENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """TOKENS queries of one sequence and KV head; program_id(0) counts them from threshold to threshold."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    past_len = tl.load(past_lens + row)
    seq_len = tl.load(seq_lens + row)
    # The first stretch ends at the first threshold after past_len, the others have a page's length.
    to_threshold = PAGE - ((past_len - SINK_LEN - K_RECENT) & (PAGE - 1))
    stretch = tl.program_id(0) // (PAGE // TOKENS)
    start = past_len + tl.where(stretch == 0, 0, to_threshold + (stretch - 1) * PAGE)
    stop = tl.minimum(past_len + to_threshold + stretch * PAGE, seq_len)
    first = start + tl.program_id(0) % (PAGE // TOKENS) * TOKENS
    if first >= stop:
        return
    end = tl.minimum(first + TOKENS, stop)
    k_pages = tl.maximum(first - SINK_LEN - K_RECENT, 0) // PAGE
    v_pages = tl.maximum(first - SINK_LEN - V_RECENT, 0) // PAGE
    if not READ_PACKED:
        packed = (past_len > 0).to(tl.int32)
        k_pages, v_pages = k_pages * packed, v_pages * packed

    m = tl.arange(0, TOKENS * GROUP)
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    b = tl.arange(0, BOOSTED if BOOSTED > 0 else 16)
    channel = d < HEAD_DIM
    pos = first + m // GROUP
    index = (pos - past_len).to(tl.int64)
    q_head = head * GROUP_SIZE + m % GROUP
    real = (m % GROUP < GROUP_SIZE) & (pos < end)
    in_query = real[:, None] & channel[None, :]
    q_at = query + row * q_row_stride + q_head * q_head_stride + index * q_token_stride
    q = tl.load(q_at[:, None] + d[None, :], mask=in_query, other=0.0)
    q_scale = scale * (2.0 * LOG2E) / softcap if SOFTCAP else scale * LOG2E
    top = tl.full([TOKENS * GROUP], float("-inf"), tl.float32)
    denom = tl.zeros([TOKENS * GROUP], tl.float32)
    if HAS_SINK_LOGITS:
        top = tl.load(sink_logits + q_head, mask=real, other=0.0).to(tl.float32) * LOG2E
        denom += 1.0
    acc = tl.zeros([TOKENS * GROUP, D], tl.float32)
    slot_head = tl.load(slots + row).to(tl.int64) * num_kv_heads + head
    table = page_table + row * table_stride
    head_at = head * head_bytes
    new_k = new_keys + row * k_row_stride + head * k_head_stride
    new_v = new_values + row * v_row_stride + head * v_head_stride
    v_sink_at = v_sink + slot_head * SINK_LEN * HEAD_DIM
    v_ring_at = v_ring + slot_head * (V_RECENT + PAGE) * HEAD_DIM

    q_packed = (q.to(tl.float32) * q_scale).to(PACKED)
    for step in tl.range(0, 2 * k_pages, num_stages=2):
        page_at = pages + tl.load(table + step // 2).to(tl.int64) * page_bytes
        token = step % 2 * TILE + t
        k = _packed_keys(
            page_at + head_at, page_at + ids_at + head * ids_bytes, token, d, b, channel, num_boosted, K_SCALE,
            K_ZERO, K_HIGH, HEAD_DIM, BOOSTED, DENSE, K4, k_ring.dtype.element_ty, PACKED,
        )  # fmt: skip
        s = tl.dot(q_packed, k)
        if SOFTCAP:
            s = capped(s, softcap)
        weights, top, denom, acc = _softmax_step(s, top, denom, acc)
        if step < 2 * v_pages:
            v_packed = _packed_values(
                page_at + head_at, token, d, channel, V_LOW, V_HIGH, V_SCALE, V_ZERO, HEAD_DIM, DENSE, V4,
                k_ring.dtype.element_ty, PACKED,
            )  # fmt: skip
            acc = tl.dot(weights.to(PACKED), v_packed, acc)
        else:
            at = SINK_LEN + step // 2 * PAGE + token
            v_row = _rows_of(
                at, past_len, v_sink_at, v_ring_at, new_v, v_token_stride, SINK_LEN, V_RECENT + PAGE, HEAD_DIM, ALIGNED
            )
            v = tl.load(v_row[:, None] + d[None, :], mask=channel[None, :], other=0.0).to(OPERAND)
            acc = tl.dot(weights.to(OPERAND), v, acc)

    q = q.to(OPERAND)
    sink_end = tl.minimum(end, SINK_LEN)
    recent = SINK_LEN + k_pages * PAGE
    sink_tiles = tl.cdiv(sink_end, TILE)
    for tile in tl.range(0, sink_tiles + tl.cdiv(tl.maximum(end - recent, 0), TILE), num_stages=2):
        in_sink = tile < sink_tiles
        at = tl.where(in_sink, tile * TILE, recent + (tile - sink_tiles) * TILE) + t
        stored = at < tl.where(in_sink, sink_end, end)
        k_row = _rows_of(
            at, past_len, k_sink + slot_head * SINK_LEN * HEAD_DIM, k_ring + slot_head * (K_RECENT + PAGE) * HEAD_DIM,
            new_k, k_token_stride, SINK_LEN, K_RECENT + PAGE, HEAD_DIM, ALIGNED,
        )  # fmt: skip
        k = tl.load(k_row[None, :] + d[:, None], mask=stored[None, :] & channel[:, None], other=0.0).to(OPERAND)
        s = tl.dot(q, k) * q_scale
        if SOFTCAP:
            s = capped(s, softcap)
        s = tl.where(stored[None, :] & (at[None, :] <= pos[:, None]), s, float("-inf"))
        weights, top, denom, acc = _softmax_step(s, top, denom, acc)
        v_row = _rows_of(
            at, past_len, v_sink_at, v_ring_at, new_v, v_token_stride, SINK_LEN, V_RECENT + PAGE, HEAD_DIM, ALIGNED
        )
        v = tl.load(v_row[:, None] + d[None, :], mask=stored[:, None] & channel[None, :], other=0.0).to(OPERAND)
        acc = tl.dot(weights.to(OPERAND), v, acc)

    out_at = out + row * o_row_stride + q_head * o_head_stride + index * o_token_stride
    tl.store(out_at[:, None] + d[None, :], (acc / denom[:, None]).to(out.dtype.element_ty), mask=in_query)


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
    layout, windows = state.layout, state.windows
    num_seqs, num_q_heads, n, head_dim = query.shape
    group_size = num_q_heads // layout.num_kv_heads
    group = triton.next_power_of_2(group_size)
    padded = max(16, triton.next_power_of_2(head_dim))
    tokens = max(1, (128 if padded <= 128 else 64) // group)
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    out = torch.zeros_like(query)
    if n == 0:
        return out

    def at(field: str) -> int:
        return 0 if layout.dense else layout.offset(field)

    boosted = layout.num_boosted if layout.has_ids else 0
    operand = OPERANDS[query.dtype]
    stretches = 1 + triton.cdiv(n, 128)
    _extend_kernel[(stretches * (128 // tokens), layout.num_kv_heads, num_seqs)](
        query, keys, values, out, state.pages, batch.page_table, batch.slots, batch.past_lens, batch.seq_lens,
        state.k_sink, state.v_sink, state.k_ring, state.v_ring, softmax.sink_logits,
        batch.page_table.stride(0), layout.num_kv_heads, layout.page_bytes, layout.head_bytes,
        layout.ids_offset, layout.ids_bytes, boosted, softmax.scale, softmax.softcap or 0.0,
        *query.stride()[:3], *out.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        V_LOW=at("v_low"), V_HIGH=at("v_high"), K_SCALE=at("k_scale"), K_ZERO=at("k_zero_point"),
        V_SCALE=at("v_scale"), V_ZERO=at("v_zero_point"), K_HIGH=at("k_high"),
        GROUP_SIZE=group_size,
        GROUP=group,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        D=padded,
        BOOSTED=0 if not boosted else max(16, triton.next_power_of_2(boosted)),
        DENSE=layout.dense,
        K4=layout.num_boosted == head_dim,
        V4=layout.v_bits == 4,
        SOFTCAP=softmax.softcap is not None,
        HAS_SINK_LOGITS=softmax.sink_logits is not None,
        READ_PACKED=read_packed,
        SINK_LEN=windows.sink_len,
        K_RECENT=windows.k_recent_len,
        V_RECENT=windows.v_recent_len,
        ALIGNED=all(rows_are_aligned(x) for x in (keys, values)),
        OPERAND=operand,
        PACKED=operand if layout.dense else tl.float16,
        num_warps=8 if padded >= 128 else 4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


INTERPRET = triton.knobs.runtime.interpret
# Arithmetic in bf16 is not to be had from the interpreter.
OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.float32 if INTERPRET else tl.bfloat16}
