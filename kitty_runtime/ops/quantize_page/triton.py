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
from kitty_runtime.ops.quantize_page.triton_affine import MIN_SCALE, codes_of, inverse_of, qparams_of, saturated
from kitty_runtime.ops.triton_pages import rows_are_aligned
from kitty_runtime.quant.boost import LayerBoost

PAGE = tl.constexpr(128)


@triton.jit
def _tokens(
    token,
    ring,
    new,
    first,
    stored,
    token_stride,
    d,
    channel,
    RECENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Tokens of a page, [16, D]: the first `stored` from the ring, the rest from the pass.

    `new` is where the page's first token is in the pass, or would be if that began earlier.
    """
    row = ring + (first + token) % (RECENT + PAGE) * HEAD_DIM
    if HAS_NEW:
        row = tl.where(token < stored, row, new + token * token_stride)
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return tl.load(row[:, None] + d[None, :], mask=channel[None, :], other=0.0)


@triton.jit
def _error(
    qscale,
    qzero,
    levels,
    inverse_spread,
    ring,
    new,
    first,
    stored,
    token_stride,
    d,
    channel,
    RECENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Squared error of a page's keys per channel; see `kitty_runtime.quant.affine._error`."""
    j = tl.arange(0, 16)
    zero, scale = qzero.to(tl.float32)[None, :], qscale.to(tl.float32)[None, :]
    inverse = inverse_of(qscale)[None, :]
    sums = tl.zeros([16, D], tl.int32)
    for i in tl.range(8, num_stages=1):
        x = _tokens(i * 16 + j, ring, new, first, stored, token_stride, d, channel, RECENT, HAS_NEW, ALIGNED, HEAD_DIM)
        x = saturated(x.to(tl.float32))
        codes = codes_of(x, zero, inverse, levels[None, :])
        off = (x - (codes.to(tl.float32) * scale + zero)) * inverse_spread[None, :]
        sums += (tl.minimum(off * off, 1.0) * 8388608.0).to(tl.int32)
    return tl.sum(sums, 0)


@triton.jit
def _write_values(
    at,
    ring,
    new,
    first,
    stored,
    token_stride,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_SCALE: tl.constexpr,
    V_ZERO: tl.constexpr,
    RECENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    ALIGNED: tl.constexpr,
    DENSE: tl.constexpr,
    V4: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Values of one page and head, 16 tokens at a time, the last first: they are the words' highest bits."""
    d = tl.arange(0, D)
    j = tl.arange(0, 16)
    channel = d < HEAD_DIM
    low_words = tl.zeros([16, D], tl.int32)
    high_words = tl.zeros([16, D], tl.int32)
    halves = at.to(tl.pointer_type(tl.float16))
    x = _tokens(7 * 16 + j, ring, new, first, stored, token_stride, d, channel, RECENT, HAS_NEW, ALIGNED, HEAD_DIM)
    for n in tl.range(8, num_stages=1):
        token = (7 - n) * 16 + j
        # Loaded a round ahead; the last round loads what the first had.
        later = ((6 - n) & 7) * 16 + j
        ahead = _tokens(later, ring, new, first, stored, token_stride, d, channel, RECENT, HAS_NEW, ALIGNED, HEAD_DIM)
        if DENSE:
            dense = at.to(tl.pointer_type(x.dtype)) + PAGE * HEAD_DIM
            tl.store(dense + token[:, None] * HEAD_DIM + d[None, :], x, mask=channel[None, :])
        else:
            levels: tl.constexpr = 15 if V4 else 3
            low, high = x, x
            if D != HEAD_DIM:
                low = tl.where(channel[None, :], x, float("inf"))
                high = tl.where(channel[None, :], x, float("-inf"))
            low, high = tl.min(low, 1).to(tl.float32), tl.max(high, 1).to(tl.float32)
            scale, zero = qparams_of(saturated(low), saturated(high), levels)
            tl.store(halves + V_SCALE // 2 + token, scale)
            tl.store(halves + V_ZERO // 2 + token, zero)
            codes = codes_of(x, zero.to(tl.float32)[:, None], inverse_of(scale)[:, None], levels)
            if V4:
                high_words = high_words * 4 + (codes >> 2)
                codes &= 3
            low_words = low_words * 4 + codes
        x = ahead
    if not DENSE:
        words = at.to(tl.pointer_type(tl.int16)) + d[None, :] * 16 + j[:, None]
        tl.store(words + V_LOW // 2, low_words.to(tl.int16), mask=channel[None, :])
        if V4:
            tl.store(words + V_HIGH // 2, high_words.to(tl.int16), mask=channel[None, :])


@triton.jit
def _write_keys(
    at,
    ring,
    new,
    first,
    stored,
    token_stride,
    at_energy,
    num_queries,
    at_ids,
    num_boosted,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    K_HIGH: tl.constexpr,
    RECENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    ALIGNED: tl.constexpr,
    POLICY: tl.constexpr,
    CLIP_SEARCH: tl.constexpr,
    DENSE: tl.constexpr,
    K4: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Keys of one page and head: a pass for ranges and scores, the choice of boosted channels, a pass for codes."""
    d = tl.arange(0, D)
    j = tl.arange(0, 16)
    channel = d < HEAD_DIM
    lowest = tl.full([16, D], float("inf"), tl.float32)
    highest = tl.full([16, D], float("-inf"), tl.float32)
    magnitude = tl.zeros([16, D], tl.float32)
    x = _tokens(j, ring, new, first, stored, token_stride, d, channel, RECENT, HAS_NEW, ALIGNED, HEAD_DIM)
    for i in tl.range(8, num_stages=1):
        token = i * 16 + j
        # Loaded a round ahead; the last round loads what the pass for codes begins with.
        later = tl.minimum(i + 1, 7) * 16 + j
        ahead = _tokens(later, ring, new, first, stored, token_stride, d, channel, RECENT, HAS_NEW, ALIGNED, HEAD_DIM)
        if DENSE:
            dense = at.to(tl.pointer_type(x.dtype))
            tl.store(dense + token[:, None] * HEAD_DIM + d[None, :], x, mask=channel[None, :])
        else:
            y = x.to(tl.float32)
            lowest = tl.minimum(lowest, y)
            highest = tl.maximum(highest, y)
            magnitude += tl.abs(y)
        x = ahead
    if not DENSE:
        low, high = tl.min(lowest, 0), tl.max(highest, 0)
        if K4:
            boosted = channel
        elif POLICY == "none":
            boosted = d < 0
        else:
            if POLICY == "magnitude":
                score = tl.sum(magnitude, 0)
            else:
                score = tl.load(at_energy + d, mask=channel, other=0.0)
                if POLICY == "running":
                    score = tl.sqrt_rn(tl.math.div_rn(score, num_queries.to(tl.float32)))
                if POLICY != "fixed":
                    score = score * (high - low)
            # Scores are not negative, so their bits rank as they do.
            key = tl.where(channel, score.to(tl.float32).to(tl.int32, bitcast=True), -1)
            last = tl.sum(tl.where(d == num_boosted - 1, tl.sort(key, descending=True), 0), 0)
            # Of equals the lower channel wins.
            equal = (key == last).to(tl.int32)
            left = num_boosted - tl.sum((key > last).to(tl.int32), 0)
            boosted = (key > last) | ((equal == 1) & (tl.cumsum(equal, 0) <= left))
        levels = tl.where(boosted, 15, 3)
        low, high = saturated(low), saturated(high)
        scale, zero = qparams_of(low, high, levels.to(tl.float32))
        if CLIP_SEARCH:
            spread = high - low
            per_spread = tl.math.div_rn(1.0, tl.maximum(spread, MIN_SCALE))
            least = tl.full([D], 2**31 - 1, tl.int32)
            for clip in tl.range(0, 3, num_stages=1):
                narrower = spread * (clip * 0.0625)
                other, at_zero = qparams_of(low + narrower, high - narrower, levels.to(tl.float32))
                error = _error(
                    other, at_zero, levels, per_spread, ring, new, first, stored, token_stride, d, channel, RECENT,
                    HAS_NEW, ALIGNED, HEAD_DIM, D,
                )  # fmt: skip
                scale, zero = tl.where(error < least, other, scale), tl.where(error < least, at_zero, zero)
                least = tl.minimum(error, least)
        halves = at.to(tl.pointer_type(tl.float16))
        tl.store(halves + K_SCALE // 2 + d, scale, mask=channel)
        tl.store(halves + K_ZERO // 2 + d, zero, mask=channel)
        zero, inverse = zero.to(tl.float32)[None, :], inverse_of(scale)[None, :]
        low_words = tl.zeros([16, D], tl.int32)
        high_words = tl.zeros([16, D], tl.int32)
        for n in tl.range(8, num_stages=1):
            later = ((6 - n) & 7) * 16 + j
            ahead = _tokens(
                later, ring, new, first, stored, token_stride, d, channel, RECENT, HAS_NEW, ALIGNED, HEAD_DIM
            )
            codes = codes_of(x, zero, inverse, levels[None, :])
            low_words = low_words * 4 + (codes & 3)
            high_words = high_words * 4 + (codes >> 2)
            x = ahead
        words = at.to(tl.pointer_type(tl.int16)) + j[:, None] * HEAD_DIM + d[None, :]
        tl.store(words, low_words.to(tl.int16), mask=channel[None, :])
        if K4:
            tl.store(words + K_HIGH // 2, high_words.to(tl.int16), mask=channel[None, :])
        elif POLICY != "none":
            place = tl.cumsum(boosted.to(tl.int32), 0) - 1
            compact = at.to(tl.pointer_type(tl.int16)) + K_HIGH // 2 + j[:, None] * num_boosted + place[None, :]
            tl.store(compact, high_words.to(tl.int16), mask=boosted[None, :])
            tl.store(at_ids + place, d.to(tl.uint8), mask=boosted)


# Not compiled anew for each width of the page table.
@triton.jit(do_not_specialize=["table_stride"])
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
    ids_at,
    ids_bytes,
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
    ALIGNED: tl.constexpr,
    POLICY: tl.constexpr,
    CLIP_SEARCH: tl.constexpr,
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
    page_at = pages + page_id * page_bytes
    at = page_at + head * head_bytes
    first = page * PAGE
    stored = past_len - SINK_LEN - first
    before = stored.to(tl.int64)
    slot_head = (slot * num_kv_heads + head) * HEAD_DIM
    if is_value:
        new = new_values + row * v_row_stride + head * v_head_stride - before * v_token_stride
        _write_values(
            at, v_ring + slot_head * (V_RECENT + PAGE), new, first, stored, v_token_stride, V_LOW, V_HIGH, V_SCALE,
            V_ZERO, V_RECENT, HAS_NEW, ALIGNED, DENSE, V4, HEAD_DIM, D,
        )  # fmt: skip
    else:
        energy_row = slot if POLICY == "running" else row
        at_energy = energy + energy_row * e_row_stride + tl.program_id(0) * e_page_stride + head * e_head_stride
        at_ids = page_at + ids_at + head * ids_bytes
        new = new_keys + row * k_row_stride + head * k_head_stride - before * k_token_stride
        _write_keys(
            at, k_ring + slot_head * (K_RECENT + PAGE), new, first, stored, k_token_stride, at_energy, seq_len,
            at_ids, num_boosted, K_SCALE, K_ZERO, K_HIGH, K_RECENT, HAS_NEW, ALIGNED, POLICY, CLIP_SEARCH, DENSE, K4,
            HEAD_DIM, D,
        )  # fmt: skip


def quantize_pages(
    state: LayerState,
    batch: Batch,
    keys: Tensor | None,
    values: Tensor | None,
    boost: LayerBoost,
    energy: Tensor | None,
    clip_search: bool = False,
) -> None:
    """See `kitty_runtime.ops.quantize_page.api.quantize_pages`."""
    layout, windows = state.layout, state.windows
    num_seqs = len(batch.slots)
    policy, scores, strides = _scores(state, boost, energy)
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
        batch.page_table.stride(0), layout.page_bytes, layout.head_bytes,
        layout.ids_offset, layout.ids_bytes, layout.num_kv_heads, layout.num_boosted,
        *new[0].stride()[:3], *new[1].stride()[:3], *strides,
        **offsets,
        SINK_LEN=windows.sink_len,
        K_RECENT=windows.k_recent_len,
        V_RECENT=windows.v_recent_len,
        HAS_NEW=keys is not None,
        ALIGNED=all(rows_are_aligned(x) for x in new),
        POLICY=policy,
        CLIP_SEARCH=clip_search,
        DENSE=layout.dense,
        K4=layout.num_boosted == layout.head_dim,
        V4=layout.v_bits == 4,
        HEAD_DIM=layout.head_dim,
        D=triton.next_power_of_2(layout.head_dim),
        num_warps=4,
        # Five programs per multiprocessor.
        maxnreg=96 if layout.head_dim <= 128 and not clip_search else None,
        enable_fp_fusion=False,  # bytes equal the reference's: a product is rounded before it is added to
    )  # fmt: skip


def _scores(state: LayerState, boost: LayerBoost, energy: Tensor | None) -> tuple[str, Tensor, tuple[int, int, int]]:
    """How the kernel ranks channels, from what, and that tensor's strides over rows, pages and heads."""
    head_dim, device = state.layout.head_dim, state.pages.device
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
    if energy is not None:
        return "range", energy, (energy.stride(0), energy.stride(1), energy.stride(2))
    assert state.query_sq_sum is not None
    return "running", state.query_sq_sum, (state.query_sq_sum.stride(0), 0, head_dim)
