"""Joins the partial softmaxes that the split kernel of decode attention leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from kitty_runtime.ops.decode_attention.triton_shares import all_units, program_of
from kitty_runtime.ops.triton_pages import LOG2E


@triton.jit
def combine_kernel(
    partial_out,
    partial_stats,
    seq_lens,
    sink_logits,
    out,
    num_seqs,
    target,
    max_parts,
    num_kv_heads,
    SEQS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    DENSE: tl.constexpr,
    SINK_LEN: tl.constexpr,
    K_RECENT: tl.constexpr,
    V_RECENT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per sequence, query head and block of channels: joins the partial softmaxes of its splits."""
    seq = tl.program_id(0)
    q_head = tl.program_id(1)
    row, units = all_units(seq_lens, num_seqs, SEQS, SINK_LEN, K_RECENT, V_RECENT, DENSE)
    total = tl.sum(units, 0)
    programs = tl.minimum(target, total)
    before = tl.sum(tl.where(row < seq, units, 0), 0)
    after = tl.sum(tl.where(row <= seq, units, 0), 0)
    split = program_of(before, total, programs)
    parts = program_of(after - 1, total, programs) - split + 1
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CHUNK)
    first = (q_head // GROUP_SIZE * max_parts + split + seq).to(tl.int64) * GROUP_SIZE + q_head % GROUP_SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    top = -1e30  # finite: a share of the page whose values are not packed can be without tokens
    denom = 0.0
    if HAS_SINK_LOGITS:
        top = tl.load(sink_logits + q_head).to(tl.float32) * LOG2E
        denom = 1.0
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, parts, CHUNK):
        at = first + (start + c) * GROUP_SIZE
        real = start + c < parts
        tops = tl.load(partial_stats + at * 2, mask=real, other=float("-inf"))
        sums = tl.load(partial_stats + at * 2 + 1, mask=real, other=0.0)
        outs = tl.load(
            partial_out + at[:, None] * HEAD_DIM + d[None, :], mask=real[:, None] & (d[None, :] < HEAD_DIM), other=0.0
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - new_top)
        fade = tl.exp2(top - new_top)
        acc = acc * fade + tl.sum(outs * weight[:, None], 0)
        denom = denom * fade + tl.sum(sums * weight, 0)
        top = new_top
    result = acc / denom
    tl.store(
        out + (seq * num_kv_heads * GROUP_SIZE + q_head) * HEAD_DIM + d,
        result.to(out.dtype.element_ty),
        mask=d < HEAD_DIM,
    )
