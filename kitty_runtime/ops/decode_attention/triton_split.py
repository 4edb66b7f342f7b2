"""The split-KV kernel of decode attention: each program attends from its share of the pages to a partial softmax.

What makes it fast (measurements in docs/kernels.md):
- Codes are never converted: two bits of a uint16 word, masked, are an fp16 subnormal ``code * 4**i * 2**-24``, which
  tensor cores take as it is. Scales go into the query and the weights, zero points into a product with ones.
- Tokens lie on the MMA's M side, so that a GQA group is padded to 8 and not to 16.
- Weights go from the first product's result to the second one's operand by `movmatrix`, within a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kitty_runtime.ops.decode_attention.triton_shares import (
    PAGE,
    PAGE_UNITS,
    START_UNITS,
    TILE,
    all_units,
    contents_of,
    first_unit,
    page_units,
)
from kitty_runtime.ops.triton_pages import (
    CODE_UNIT,
    LOG2E,
    WORDS,
    add_rows,
    add_values,
    as_operand,
    capped,
    highest,
    lanes,
    page_logits,
    page_weights,
)


@triton.jit
def _ring_rows(offset, j, RING: tl.constexpr):
    """Slots of 16 tokens from `offset` past the sink on; a ring of whole tiles does not wrap within one."""
    if RING % TILE == 0:
        return offset % RING + j
    else:
        return (offset + j) % RING


@triton.jit
def _attend(
    seq,
    head,
    part,
    begin,
    end,
    max_parts,
    query,
    pages,
    page_table,
    seq_lens,
    slots,
    k_sink,
    v_sink,
    k_ring,
    v_ring,
    partial_out,
    partial_stats,
    table_stride,
    num_kv_heads,
    page_bytes,
    head_bytes,
    ids_at,
    ids_bytes,
    num_boosted,
    scale,
    softcap,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    K_HIGH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BOOSTED: tl.constexpr,
    DENSE: tl.constexpr,
    K4: tl.constexpr,
    V4: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK_LEN: tl.constexpr,
    K_RECENT: tl.constexpr,
    V_RECENT: tl.constexpr,
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Units begin..end-1 of one sequence and KV head to a partial softmax: sums, highest logit, denominator."""
    length = tl.load(seq_lens + seq)
    k_pages, v_pages, sink_tiles, tiles = contents_of(length, SINK_LEN, K_RECENT, V_RECENT)
    units = page_units(k_pages, v_pages, DENSE) + tiles + (k_pages * (PAGE // TILE) if DENSE else 0)

    g = tl.arange(0, GROUP)
    d = tl.arange(0, D)
    j = tl.arange(0, WORDS)
    channel = d < HEAD_DIM
    in_query = (d[:, None] < HEAD_DIM) & (g[None, :] < GROUP_SIZE)
    q_at = query + (seq * num_kv_heads + head) * GROUP_SIZE * HEAD_DIM
    q = tl.load(q_at + g[None, :] * HEAD_DIM + d[:, None], mask=in_query, other=0.0)
    # Logits in units of log2(e), so that exp2 serves; with a softcap in units that its tanh wants.
    q_scale = scale * (2.0 * LOG2E) / softcap if SOFTCAP else scale * LOG2E
    top = tl.full([GROUP], float("-inf"), tl.float32)

    table = page_table + seq * table_stride
    head_at = head.to(tl.int64) * head_bytes
    head_ids = ids_at + head * ids_bytes
    acc = tl.zeros([D, GROUP], tl.float32)
    denom = tl.zeros([WORDS, GROUP], tl.float32)
    if not DENSE:
        q16 = (q.to(tl.float32) * q_scale).to(tl.float16)
        zeros = tl.zeros([WORDS, GROUP], tl.float32)
        ones_d = tl.full([WORDS, D], 1.0, tl.float16)
        offsets = tl.zeros([WORDS, GROUP], tl.float32)
        one = tl.full([WORDS, WORDS], 1.0, tl.float16)
        t = tl.arange(0, PAGE)
        b = tl.arange(0, BOOSTED if BOOSTED > 0 else 16)
        first_page = tl.cdiv(tl.maximum(begin - START_UNITS, 0), PAGE_UNITS)
        end_page = tl.minimum(tl.cdiv(end - START_UNITS, PAGE_UNITS), v_pages)
        for page in tl.range(first_page, end_page, num_stages=STAGES):
            page_at = pages + tl.load(table + page).to(tl.int64) * page_bytes
            at = page_at + head_at
            s0, s1, s2, s3, s4, s5, s6, s7, z = page_logits(
                at, page_at + head_ids, q_at, q16, ones_d, zeros, j, d, g, b, channel, K_HIGH, K_SCALE, K_ZERO,
                num_boosted, q_scale, GROUP_SIZE, HEAD_DIM, BOOSTED, K4, SOFTCAP, softcap, ASM,
            )  # fmt: skip
            v_words = tl.load(
                (at + V_LOW).to(tl.pointer_type(tl.uint16)) + d[:, None] * WORDS + j[None, :],
                mask=channel[:, None],
                other=0,
            )
            v_scale = tl.load((at + V_SCALE).to(tl.pointer_type(tl.float16)) + t)
            v_zero = tl.load((at + V_ZERO).to(tl.pointer_type(tl.float16)) + t)
            new_top = tl.maximum(top, tl.max(highest(s0, s1, s2, s3, s4, s5, s6, s7, SOFTCAP) + z, 0))
            fade = tl.exp2(top - new_top)
            top = new_top
            acc = acc * fade[None, :]
            denom = denom * fade[None, :]
            offsets = offsets * fade[None, :]
            # 2**4 * 4**-i: the weights undo the codes' 4**i, and stay clear of fp16's subnormals and of its largest.
            w0, w1, w2, w3, w4, w5, w6, w7 = page_weights(
                s0, s1, s2, s3, s4, s5, s6, s7, z - top[None, :], True, GROUP, SOFTCAP, tl.float16, ASM
            )
            denom = add_rows(one, w0, w1, w2, w3, w4, w5, w6, w7, denom)
            y0, y1, y2, y3, y4, y5, y6, y7 = lanes(v_zero)
            offsets = add_rows(
                one, w0 * y0[:, None], w1 * y1[:, None], w2 * y2[:, None], w3 * y3[:, None], w4 * y4[:, None],
                w5 * y5[:, None], w6 * y6[:, None], w7 * y7[:, None], offsets,
            )  # fmt: skip
            y0, y1, y2, y3, y4, y5, y6, y7 = lanes(v_scale)
            w0, w1, w2, w3 = w0 * y0[:, None], w1 * y1[:, None], w2 * y2[:, None], w3 * y3[:, None]
            w4, w5, w6, w7 = w4 * y4[:, None], w5 * y5[:, None], w6 * y6[:, None], w7 * y7[:, None]
            acc = add_values(v_words, w0, w1, w2, w3, w4, w5, w6, w7, acc, ASM)
            if V4:
                v_words = tl.load(
                    (at + V_HIGH).to(tl.pointer_type(tl.uint16)) + d[:, None] * WORDS + j[None, :],
                    mask=channel[:, None],
                    other=0,
                )
                acc = add_values(v_words, w0 * 4, w1 * 4, w2 * 4, w3 * 4, w4 * 4, w5 * 4, w6 * 4, w7 * 4, acc, ASM)
        # The codes' unit and the weights' 2**4.
        acc = acc * (CODE_UNIT / 16) + tl.max(offsets, 0)[None, :] * 0.0625
        denom = denom * 0.0625
        if V_RECENT > K_RECENT:
            unit = START_UNITS + v_pages * PAGE_UNITS
            if (k_pages > v_pages) & (begin <= unit) & (unit < end):
                page_at = pages + tl.load(table + v_pages).to(tl.int64) * page_bytes
                at = page_at + head_at
                s0, s1, s2, s3, s4, s5, s6, s7, z = page_logits(
                    at, page_at + head_ids, q_at, q16, ones_d, zeros, j, d, g, b, channel, K_HIGH, K_SCALE, K_ZERO,
                    num_boosted, q_scale, GROUP_SIZE, HEAD_DIM, BOOSTED, K4, SOFTCAP, softcap, ASM,
                )  # fmt: skip
                new_top = tl.maximum(top, tl.max(highest(s0, s1, s2, s3, s4, s5, s6, s7, SOFTCAP) + z, 0))
                fade = tl.exp2(top - new_top)
                top = new_top
                acc = acc * fade[None, :]
                w0, w1, w2, w3, w4, w5, w6, w7 = page_weights(
                    s0, s1, s2, s3, s4, s5, s6, s7, z - top[None, :], False, GROUP, SOFTCAP, OPERAND, ASM
                )
                row_one = tl.full([WORDS, WORDS], 1.0, OPERAND)
                denom = denom * fade[None, :]
                slot_head = tl.load(slots + seq).to(tl.int64) * num_kv_heads + head
                ring = v_ring + slot_head * (V_RECENT + PAGE) * HEAD_DIM
                for i in tl.static_range(8):
                    w = (w0, w1, w2, w3, w4, w5, w6, w7)[i]
                    at_ring = _ring_rows(v_pages * PAGE + i * WORDS, j, V_RECENT + PAGE)
                    v = tl.load(ring + at_ring[None, :] * HEAD_DIM + d[:, None], mask=channel[:, None], other=0.0)
                    denom = tl.dot(row_one, w, denom)
                    acc = tl.dot(v.to(OPERAND), w, acc)

    # Unpacked tokens: 16-bit pages, then sink and ring.
    tiles_at = page_units(k_pages, v_pages, DENSE)
    first_tile = tl.maximum(begin - tiles_at, 0)
    end_tile = tl.minimum(end, units) - tiles_at
    if first_tile < end_tile:
        q_dense = q.to(OPERAND)
        tile_one = tl.full([TILE, TILE], 1.0, OPERAND)
        slot_head = tl.load(slots + seq).to(tl.int64) * num_kv_heads + head
        for tile in tl.range(first_tile, end_tile, num_stages=STAGES if DENSE else 3):
            tail = tile - k_pages * (PAGE // TILE) if DENSE else tile
            in_sink = tail < sink_tiles
            recent = k_pages * PAGE + (tail - sink_tiles) * TILE
            first = tl.where(in_sink, tail * TILE, SINK_LEN + recent)
            stop = tl.where(in_sink, tl.minimum(length, SINK_LEN), length)
            k_base = k_ring + slot_head * (K_RECENT + PAGE) * HEAD_DIM
            v_base = v_ring + slot_head * (V_RECENT + PAGE) * HEAD_DIM
            k_row = _ring_rows(recent, j, K_RECENT + PAGE)
            v_row = _ring_rows(recent, j, V_RECENT + PAGE)
            if SINK_LEN > 0:
                k_base = tl.where(in_sink, k_sink + slot_head * SINK_LEN * HEAD_DIM, k_base)
                v_base = tl.where(in_sink, v_sink + slot_head * SINK_LEN * HEAD_DIM, v_base)
                k_row = tl.where(in_sink, tail * TILE + j, k_row)
                v_row = tl.where(in_sink, tail * TILE + j, v_row)
            if DENSE:
                k_in_page = tail < 0
                v_in_page = tile < v_pages * (PAGE // TILE)
                page = tl.load(table + tile // (PAGE // TILE), mask=k_in_page, other=0).to(tl.int64)
                k_page = (pages + page * page_bytes + head_at).to(k_ring.dtype)
                in_page = (tile * TILE + j) % PAGE
                first, stop = tl.where(k_in_page, 0, first), tl.where(k_in_page, TILE, stop)
                k_base = tl.where(k_in_page, k_page, k_base)
                # Between the two: keys in a page, values still in the ring.
                v_ring_base = v_ring + slot_head * (V_RECENT + PAGE) * HEAD_DIM
                v_base = tl.where(v_in_page, k_page + PAGE * HEAD_DIM, tl.where(k_in_page, v_ring_base, v_base))
                k_row = tl.where(k_in_page, in_page, k_row)
                v_row = tl.where(
                    v_in_page,
                    in_page,
                    tl.where(k_in_page, _ring_rows(recent + sink_tiles * TILE, j, V_RECENT + PAGE), v_row),
                )
            stored = first + j < stop
            k = tl.load(
                k_base + k_row[:, None] * HEAD_DIM + d[None, :], mask=stored[:, None] & channel[None, :], other=0.0
            ).to(OPERAND)
            v = tl.load(
                v_base + v_row[None, :] * HEAD_DIM + d[:, None], mask=stored[None, :] & channel[:, None], other=0.0
            ).to(OPERAND)
            s = tl.dot(k, q_dense) * q_scale
            if SOFTCAP:
                s = capped(s, softcap)
            s = tl.where(stored[:, None], s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 0))
            fade = tl.exp2(top - new_top)
            top = new_top
            w = as_operand(tl.exp2(s - top[None, :]).to(OPERAND), GROUP, ASM)
            acc = tl.dot(v, w, acc * fade[None, :])
            denom = tl.dot(tile_one, w, denom * fade[None, :])

    kept = g < GROUP_SIZE
    at_part = (head.to(tl.int64) * max_parts + part) * GROUP_SIZE
    tl.store(partial_out + (at_part + g[None, :]) * HEAD_DIM + d[:, None], acc, mask=in_query)
    tl.store(partial_stats + (at_part + g) * 2, top, mask=kept)
    tl.store(partial_stats + (at_part + g) * 2 + 1, tl.max(denom, 0), mask=kept)
    return units


@triton.jit
def split_kernel(
    query,
    pages,
    page_table,
    seq_lens,
    slots,
    k_sink,
    v_sink,
    k_ring,
    v_ring,
    partial_out,
    partial_stats,
    num_seqs,
    table_stride,
    target,
    max_parts,
    num_kv_heads,
    page_bytes,
    head_bytes,
    ids_at,
    ids_bytes,
    num_boosted,
    scale,
    softcap,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    K_HIGH: tl.constexpr,
    SEQS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BOOSTED: tl.constexpr,
    DENSE: tl.constexpr,
    K4: tl.constexpr,
    V4: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK_LEN: tl.constexpr,
    K_RECENT: tl.constexpr,
    V_RECENT: tl.constexpr,
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per KV head and share of the work; see triton_shares."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, units = all_units(seq_lens, num_seqs, SEQS, SINK_LEN, K_RECENT, V_RECENT, DENSE)
    total = tl.sum(units, 0)
    programs = tl.minimum(target, total)
    if split >= programs:
        return
    lo, hi = first_unit(split, total, programs), first_unit(split + 1, total, programs)
    first, last, before = 0, 0, 0
    if SEQS > 1:
        stops = tl.cumsum(units, 0)
        first, last = tl.sum((stops <= lo).to(tl.int32), 0), tl.sum((stops < hi).to(tl.int32), 0)
        before = tl.sum(tl.where(stops <= lo, units, 0), 0)
    for seq in tl.range(first, last + 1, num_stages=1):
        before += _attend(
            seq, head, split + seq, tl.maximum(lo - before, 0), hi - before, max_parts, query, pages, page_table,
            seq_lens, slots, k_sink, v_sink, k_ring, v_ring, partial_out, partial_stats, table_stride, num_kv_heads,
            page_bytes, head_bytes, ids_at, ids_bytes, num_boosted, scale, softcap, V_LOW, V_HIGH, K_SCALE, K_ZERO,
            V_SCALE, V_ZERO, K_HIGH, GROUP_SIZE, GROUP, HEAD_DIM, D, BOOSTED, DENSE, K4, V4, SOFTCAP, SINK_LEN,
            K_RECENT, V_RECENT, OPERAND, ASM, STAGES,
        )  # fmt: skip
