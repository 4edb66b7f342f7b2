"""Quantize pages as one Triton launch: keys and values, all KV heads, every page that a pass completes.

Which pages those are is computed on the device from the lengths, so the launch can sit inside a captured graph and do
nothing on most steps. Bytes are those of reference.py, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.quant.boost import LayerBoost

PAGE = tl.constexpr(128)
FP16_MAX = tl.constexpr(65504.0)
FP16_OVERFLOW = tl.constexpr(65520.0)
MIN_SCALE = tl.constexpr(1e-6)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: added and taken away again it rounds half to even."""


@triton.jit
def _qparams(low, high, levels):
    """fp16 scale and zero point; see `kitty_runtime.quant.affine.choose_qparams`."""
    scale = tl.maximum(tl.math.div_rn(high - low, levels), MIN_SCALE).to(tl.float16)
    zero = low.to(tl.float16)
    overflows = scale.to(tl.float32) * levels + zero.to(tl.float32) >= FP16_OVERFLOW
    scale = (scale.to(tl.int16, bitcast=True) - overflows.to(tl.int16)).to(tl.float16, bitcast=True)
    return scale, zero


@triton.jit
def _codes(x, scale, zero, levels):
    codes = tl.math.div_rn(x - zero.to(tl.float32), scale.to(tl.float32)) + ROUND - ROUND
    return tl.minimum(tl.maximum(codes, 0.0), levels).to(tl.int32)


@triton.jit
def _words(codes, D: tl.constexpr):
    """Two-bit codes [128, D] to words [16, D]: bits 2i, 2i+1 of word j are token 16 i + j."""
    shifts = 2 * tl.arange(0, 8)
    return tl.sum(tl.reshape(codes, (8, 16, D)) << shifts[:, None, None], 0).to(tl.int16)


@triton.jit
def _page_tokens(
    ring,
    new,
    slot,
    row,
    head,
    page,
    past_len,
    num_kv_heads,
    row_stride,
    head_stride,
    token_stride,
    SINK_LEN: tl.constexpr,
    RECENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """A page's tokens [128, D], from the ring and, past what is stored, from the pass."""
    t = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    channel = d[None, :] < HEAD_DIM
    offset = page * PAGE + t
    stored = SINK_LEN + offset < past_len
    in_ring = ring + (slot * num_kv_heads + head) * (RECENT + PAGE) * HEAD_DIM
    at_ring = in_ring + (offset % (RECENT + PAGE))[:, None] * HEAD_DIM + d[None, :]
    if HAS_NEW:
        x = tl.load(at_ring, mask=stored[:, None] & channel, other=0.0)
        at_new = new + row * row_stride + head * head_stride
        index = (SINK_LEN + offset - past_len).to(tl.int64)
        at_new = at_new + index[:, None] * token_stride + d[None, :]
        return tl.where(stored[:, None], x, tl.load(at_new, mask=(~stored)[:, None] & channel, other=0.0))
    else:
        return tl.load(at_ring, mask=channel, other=0.0)


@triton.jit
def _quantize_kernel(
    pages,
    page_table,
    slots,
    past_lens,
    seq_lens,
    k_ring,
    v_ring,
    new_keys,
    new_values,
    energy,
    table_stride,
    page_bytes,
    head_bytes,
    num_kv_heads,
    num_boosted,
    k_row_stride,
    k_head_stride,
    k_token_stride,
    v_row_stride,
    v_head_stride,
    v_token_stride,
    e_row_stride,
    e_page_stride,
    e_head_stride,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    K_HIGH: tl.constexpr,
    SINK_LEN: tl.constexpr,
    K_RECENT: tl.constexpr,
    V_RECENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    POLICY: tl.constexpr,
    DENSE: tl.constexpr,
    K4: tl.constexpr,
    V4: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(2) // 2).to(tl.int64)
    is_value = tl.program_id(2) % 2 == 1
    past_len = tl.load(past_lens + row)
    seq_len = tl.load(seq_lens + row)
    slot = tl.load(slots + row).to(tl.int64)
    recent = V_RECENT if is_value else K_RECENT
    page = tl.maximum(past_len - SINK_LEN - recent, 0) // PAGE + tl.program_id(0)
    if page >= tl.maximum(seq_len - SINK_LEN - recent, 0) // PAGE:
        return
    page_id = tl.load(page_table + row * table_stride + page).to(tl.int64)
    at = pages + page_id * page_bytes + head * head_bytes
    t = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    j = tl.arange(0, 16)
    channel = d < HEAD_DIM

    if is_value:
        x = _page_tokens(
            v_ring, new_values, slot, row, head, page, past_len, num_kv_heads, v_row_stride, v_head_stride,
            v_token_stride, SINK_LEN, V_RECENT, HAS_NEW, HEAD_DIM, D,
        )  # fmt: skip
        if DENSE:
            dense = at.to(tl.pointer_type(x.dtype)) + PAGE * HEAD_DIM
            tl.store(dense + t[:, None] * HEAD_DIM + d[None, :], x, mask=channel[None, :])
        else:
            levels = 15.0 if V4 else 3.0
            x = tl.minimum(tl.maximum(x.to(tl.float32), -FP16_MAX), FP16_MAX)
            low = tl.min(tl.where(channel[None, :], x, float("inf")), 1)
            high = tl.max(tl.where(channel[None, :], x, float("-inf")), 1)
            scale, zero = _qparams(low, high, levels)
            codes = _codes(x, scale[:, None], zero[:, None], levels)
            halves, words = at.to(tl.pointer_type(tl.float16)), at.to(tl.pointer_type(tl.int16))
            tl.store(halves + V_SCALE // 2 + t, scale)
            tl.store(halves + V_ZERO // 2 + t, zero)
            at_words = words + V_LOW // 2 + d[None, :] * 16 + j[:, None]
            tl.store(at_words, _words(codes & 3, D), mask=channel[None, :])
            if V4:
                tl.store(at_words + (V_HIGH - V_LOW) // 2, _words(codes >> 2, D), mask=channel[None, :])
    else:
        x = _page_tokens(
            k_ring, new_keys, slot, row, head, page, past_len, num_kv_heads, k_row_stride, k_head_stride,
            k_token_stride, SINK_LEN, K_RECENT, HAS_NEW, HEAD_DIM, D,
        )  # fmt: skip
        if DENSE:
            dense = at.to(tl.pointer_type(x.dtype))
            tl.store(dense + t[:, None] * HEAD_DIM + d[None, :], x, mask=channel[None, :])
        else:
            x = x.to(tl.float32)
            if K4:
                boosted = channel
            elif POLICY == "none":
                boosted = d < 0
            else:
                at_energy = energy + row * e_row_stride + tl.program_id(0) * e_page_stride + head * e_head_stride
                if POLICY == "magnitude":
                    score = tl.sum(tl.abs(x), 0)
                else:
                    score = tl.load(at_energy + d, mask=channel, other=0.0)
                    if POLICY == "range":
                        score = score * (tl.max(x, 0) - tl.min(x, 0))
                score = tl.where(channel, score, float("-inf"))
                # Of equals the lower channel wins.
                other = tl.reshape(score, (1, D))
                ahead = (other > score[:, None]) | ((other == score[:, None]) & (d[None, :] < d[:, None]))
                boosted = (tl.sum(ahead.to(tl.int32), 1) < num_boosted) & channel
            x = tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)
            levels = tl.where(boosted, 15.0, 3.0)
            scale, zero = _qparams(tl.min(x, 0), tl.max(x, 0), levels)
            codes = _codes(x, scale[None, :], zero[None, :], levels[None, :])
            halves, words = at.to(tl.pointer_type(tl.float16)), at.to(tl.pointer_type(tl.int16))
            tl.store(halves + K_SCALE // 2 + d, scale, mask=channel)
            tl.store(halves + K_ZERO // 2 + d, zero, mask=channel)
            tl.store(words + j[:, None] * HEAD_DIM + d[None, :], _words(codes & 3, D), mask=channel[None, :])
            if POLICY != "none" or K4:
                stride = HEAD_DIM if K4 else num_boosted
                place = tl.cumsum(boosted.to(tl.int32), 0) - 1
                at_words = words + K_HIGH // 2 + j[:, None] * stride + place[None, :]
                tl.store(at_words, _words(codes >> 2, D), mask=boosted[None, :])
                if not K4:
                    tl.store(at + K_HIGH + num_boosted * 32 + place, d.to(tl.uint8), mask=boosted)


def quantize_pages(
    state: LayerState,
    batch: Batch,
    keys: Tensor | None,
    values: Tensor | None,
    boost: LayerBoost,
    energy: Tensor | None,
) -> None:
    """See `kitty_runtime.ops.quantize_page.api.quantize_pages`."""
    layout, windows = state.layout, state.windows
    num_seqs = len(batch.slots)
    policy, scores, strides = _scores(boost, layout.head_dim, energy, state.pages.device)
    new = (keys, values) if keys is not None and values is not None else (state.k_ring, state.v_ring)
    offsets = {
        name: 0 if layout.dense else layout.offset(field)
        for name, field in (
            ("V_LOW", "v_low"),
            ("V_HIGH", "v_high"),
            ("K_SCALE", "k_scale"),
            ("K_ZERO", "k_zero_point"),
            ("V_SCALE", "v_scale"),
            ("V_ZERO", "v_zero_point"),
            ("K_HIGH", "k_high"),
        )
    }
    _quantize_kernel[(batch.max_new_pages, layout.num_kv_heads, 2 * num_seqs)](
        state.pages, batch.page_table, batch.slots, batch.past_lens, batch.seq_lens,
        state.k_ring, state.v_ring, *new, scores,
        batch.page_table.stride(0), layout.page_bytes, layout.head_bytes, layout.num_kv_heads, layout.num_boosted,
        *new[0].stride()[:3], *new[1].stride()[:3], *strides,
        **offsets,
        SINK_LEN=windows.sink_len,
        K_RECENT=windows.k_recent_len,
        V_RECENT=windows.v_recent_len,
        HAS_NEW=keys is not None,
        POLICY=policy,
        DENSE=layout.dense,
        K4=layout.num_boosted == layout.head_dim,
        V4=layout.v_bits == 4,
        HEAD_DIM=layout.head_dim,
        D=triton.next_power_of_2(layout.head_dim),
        num_warps=8 if layout.head_dim > 64 else 4,
    )  # fmt: skip


def _scores(
    boost: LayerBoost, head_dim: int, energy: Tensor | None, device: torch.device
) -> tuple[str, Tensor, tuple[int, int, int]]:
    """How the kernel ranks channels, from what, and that tensor's strides over rows, pages and heads."""
    nothing = torch.empty(1, dtype=torch.float32, device=device)
    if boost.num_boosted in (0, head_dim):
        return "none", nothing, (0, 0, 0)
    if boost.channels is not None:
        chosen = torch.zeros(boost.channels.shape[0], head_dim, device=device)
        chosen.scatter_(1, boost.channels, 1.0)
        return "fixed", chosen, (0, 0, head_dim)
    if boost.policy == "dynamic":
        return "magnitude", nothing, (0, 0, 0)
    if boost.query_energy is not None:
        return "range", boost.query_energy, (0, 0, head_dim)
    assert energy is not None
    return "range", energy, (energy.stride(0), energy.stride(1), energy.stride(2))
