"""Device functions that read packed pages straight into matrix products; shared by the attention kernels.

A page's words are eight lanes of two bits: lane i of word j is token 16 i + j. A masked lane is an fp16 subnormal,
``code * 4**(i % 5) * 2**-24``, which tensor cores take as it is, so codes are never converted. Scales go into the query
and the weights, zero points into products with ones. Eight lanes are eight tensors: Triton has no arrays of tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)
CODE_UNIT = tl.constexpr(16777216.0)
"""2**24: a masked code is the fp16 subnormal code * 4**i * 2**-24."""


def rows_are_aligned(tokens: Tensor) -> bool:
    """Whether every row of 16-bit ``[..., head_dim]`` tokens begins on 16 bytes; kernels then load it in vectors."""
    return tokens.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in tokens.stride()[:-1])


@triton.jit
def codes_of(words, i: tl.constexpr, ASM: tl.constexpr):
    """Bits 2i, 2i+1 of uint16 words as fp16 ``code * 4**(i % 5) * 2**-24``; two words per instruction."""
    if ASM:
        if i == 0:
            body: tl.constexpr = "and.b32 $0, $1, 0x00030003;"
        elif i == 1:
            body: tl.constexpr = "and.b32 $0, $1, 0x000c000c;"
        elif i == 2:
            body: tl.constexpr = "and.b32 $0, $1, 0x00300030;"
        elif i == 3:
            body: tl.constexpr = "and.b32 $0, $1, 0x00c000c0;"
        elif i == 4:
            body: tl.constexpr = "and.b32 $0, $1, 0x03000300;"
        elif i == 5:
            body: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 10; and.b32 $0, t, 0x00030003;}"
        elif i == 6:
            body: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 10; and.b32 $0, t, 0x000c000c;}"
        else:
            body: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 10; and.b32 $0, t, 0x00300030;}"
        return tl.inline_asm_elementwise(body, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        if i >= 5:
            words = words >> 10
        return (words & (3 << (2 * (i % 5)))).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def as_operand(weights, GROUP: tl.constexpr, ASM: tl.constexpr):
    """[16, GROUP] 16-bit weights, a product's result, placed where the next product wants its right operand."""
    if ASM:
        # Transposes each 8 x 8 block across the warp: the thread then holds what the operand layout asks of it.
        blocks = tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
            "=r,r",
            [weights],
            dtype=weights.dtype,
            is_pure=True,
            pack=2,
        )
        blocks = tl.permute(tl.reshape(blocks, (2, 8, GROUP // 8, 8)), (0, 3, 2, 1))
        return tl.reshape(blocks, (16, GROUP))
    else:
        return weights


@triton.jit
def lanes(vector):
    """[128] to eight [16]; lane i holds tokens 16 i .. 16 i + 15."""
    lanes = tl.permute(tl.reshape(vector, (2, 2, 2, 16)), (3, 0, 1, 2))
    even, odd = tl.split(lanes)
    v04, v26 = tl.split(even)
    v15, v37 = tl.split(odd)
    v0, v4 = tl.split(v04)
    v2, v6 = tl.split(v26)
    v1, v5 = tl.split(v15)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def add_dots(words, operand, s0, s1, s2, s3, s4, s5, s6, s7, ASM: tl.constexpr):
    """Add ``codes_i @ operand`` to each lane's sums."""
    s0 = tl.dot(codes_of(words, 0, ASM), operand, s0)
    s1 = tl.dot(codes_of(words, 1, ASM), operand, s1)
    s2 = tl.dot(codes_of(words, 2, ASM), operand, s2)
    s3 = tl.dot(codes_of(words, 3, ASM), operand, s3)
    s4 = tl.dot(codes_of(words, 4, ASM), operand, s4)
    s5 = tl.dot(codes_of(words, 5, ASM), operand, s5)
    s6 = tl.dot(codes_of(words, 6, ASM), operand, s6)
    s7 = tl.dot(codes_of(words, 7, ASM), operand, s7)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def page_logits(
    at,
    ids_at,
    q_at,
    q16,
    ones_d,
    zeros,
    j,
    d,
    g,
    b,
    channel,
    K_HIGH: tl.constexpr,
    K_SCALE: tl.constexpr,
    K_ZERO: tl.constexpr,
    num_boosted,
    q_scale,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BOOSTED: tl.constexpr,
    K4: tl.constexpr,
    SOFTCAP: tl.constexpr,
    softcap,
    ASM: tl.constexpr,
):
    """Sums of a page's keys, lane by lane, each [16, GROUP], and what the zero points add.

    Lane i is in units of 4**(i % 5) * 2**-24; with a softcap the lanes are finished logits.
    """
    halves = at.to(tl.pointer_type(tl.float16))
    words = at.to(tl.pointer_type(tl.uint16))
    k_words = tl.load(words + j[:, None] * HEAD_DIM + d[None, :], mask=channel[None, :], other=0)
    k_scale = tl.load(halves + K_SCALE // 2 + d, mask=channel, other=0.0)
    k_zero = tl.load(halves + K_ZERO // 2 + d, mask=channel, other=0.0)
    operand = q16 * k_scale[:, None]
    z = tl.dot(ones_d, q16 * k_zero[:, None])
    s0, s1, s2, s3, s4, s5, s6, s7 = add_dots(
        k_words, operand, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, ASM
    )
    if K4:
        k_high = tl.load(words + K_HIGH // 2 + j[:, None] * HEAD_DIM + d[None, :], mask=channel[None, :], other=0)
        s0, s1, s2, s3, s4, s5, s6, s7 = add_dots(k_high, operand * 4, s0, s1, s2, s3, s4, s5, s6, s7, ASM)
    elif BOOSTED > 0:
        real = b < num_boosted
        ids = (tl.load(ids_at.to(tl.pointer_type(tl.int32)) + b // 4, mask=real, other=0) >> (b % 4 * 8)) & 255
        k_high = tl.load(words + K_HIGH // 2 + j[:, None] * num_boosted + b[None, :], mask=real[None, :], other=0)
        b_scale = tl.load(halves + K_SCALE // 2 + ids, mask=real, other=0.0).to(tl.float32) * (4.0 * q_scale)
        b_query = tl.load(
            q_at + g[None, :] * HEAD_DIM + ids[:, None], mask=real[:, None] & (g[None, :] < GROUP_SIZE), other=0.0
        ).to(tl.float32)
        b_operand = (b_query * b_scale[:, None]).to(tl.float16)
        s0, s1, s2, s3, s4, s5, s6, s7 = add_dots(k_high, b_operand, s0, s1, s2, s3, s4, s5, s6, s7, ASM)
    if SOFTCAP:
        s0 = capped(s0 * CODE_UNIT + z, softcap)
        s1 = capped(s1 * (CODE_UNIT / 4) + z, softcap)
        s2 = capped(s2 * (CODE_UNIT / 16) + z, softcap)
        s3 = capped(s3 * (CODE_UNIT / 64) + z, softcap)
        s4 = capped(s4 * (CODE_UNIT / 256) + z, softcap)
        s5 = capped(s5 * CODE_UNIT + z, softcap)
        s6 = capped(s6 * (CODE_UNIT / 4) + z, softcap)
        s7 = capped(s7 * (CODE_UNIT / 16) + z, softcap)
        z = zeros
    return s0, s1, s2, s3, s4, s5, s6, s7, z


@triton.jit
def capped(x, softcap):
    """``softcap * tanh(y / softcap)`` in units of log2(e), of ``x = y * 2 log2(e) / softcap``."""
    return (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(x) + 1.0))


@triton.jit
def highest(s0, s1, s2, s3, s4, s5, s6, s7, SOFTCAP: tl.constexpr):
    """Largest of the lanes' logits, zero points left out."""
    s05, s16, s27 = tl.maximum(s0, s5), tl.maximum(s1, s6), tl.maximum(s2, s7)
    if not SOFTCAP:
        s05, s16, s27 = s05 * CODE_UNIT, s16 * (CODE_UNIT / 4), s27 * (CODE_UNIT / 16)
        s3, s4 = s3 * (CODE_UNIT / 64), s4 * (CODE_UNIT / 256)
    return tl.maximum(tl.maximum(tl.maximum(s05, s16), s27), tl.maximum(s3, s4))


@triton.jit
def page_weights(
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    s7,
    shift,
    FOR_CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
    ASM: tl.constexpr,
):
    """``exp2`` of the shifted logits as operands; for codes times 2**4 * 4**-(i % 5)."""
    C: tl.constexpr = 1.0 if SOFTCAP else CODE_UNIT
    # With a softcap the lanes are finished logits, all in one unit.
    R: tl.constexpr = 1.0 if SOFTCAP else 0.25
    w0 = tl.exp2(s0 * C + (shift + (4 if FOR_CODES else 0)))
    w1 = tl.exp2(s1 * (C * R) + (shift + (2 if FOR_CODES else 0)))
    w2 = tl.exp2(s2 * (C * R * R) + shift)
    w3 = tl.exp2(s3 * (C * R * R * R) + (shift - (2 if FOR_CODES else 0)))
    w4 = tl.exp2(s4 * (C * R * R * R * R) + (shift - (4 if FOR_CODES else 0)))
    w5 = tl.exp2(s5 * C + (shift + (4 if FOR_CODES else 0)))
    w6 = tl.exp2(s6 * (C * R) + (shift + (2 if FOR_CODES else 0)))
    w7 = tl.exp2(s7 * (C * R * R) + shift)
    return (
        as_operand(w0.to(OPERAND), GROUP, ASM),
        as_operand(w1.to(OPERAND), GROUP, ASM),
        as_operand(w2.to(OPERAND), GROUP, ASM),
        as_operand(w3.to(OPERAND), GROUP, ASM),
        as_operand(w4.to(OPERAND), GROUP, ASM),
        as_operand(w5.to(OPERAND), GROUP, ASM),
        as_operand(w6.to(OPERAND), GROUP, ASM),
        as_operand(w7.to(OPERAND), GROUP, ASM),
    )


@triton.jit
def add_rows(one, w0, w1, w2, w3, w4, w5, w6, w7, sums):
    """Add the sum over tokens of all lanes' weights to every row of `sums`; lane i weighs 4**(i % 5)."""
    sums = tl.dot(one, w0, sums)
    sums = tl.dot(one * 4, w1, sums)
    sums = tl.dot(one * 16, w2, sums)
    sums = tl.dot(one * 64, w3, sums)
    sums = tl.dot(one * 256, w4, sums)
    sums = tl.dot(one, w5, sums)
    sums = tl.dot(one * 4, w6, sums)
    return tl.dot(one * 16, w7, sums)


@triton.jit
def add_values(words, w0, w1, w2, w3, w4, w5, w6, w7, acc, ASM: tl.constexpr):
    """Add ``codes_i @ weights_i`` over the lanes of a value plane [D, 16]."""
    acc = tl.dot(codes_of(words, 0, ASM), w0, acc)
    acc = tl.dot(codes_of(words, 1, ASM), w1, acc)
    acc = tl.dot(codes_of(words, 2, ASM), w2, acc)
    acc = tl.dot(codes_of(words, 3, ASM), w3, acc)
    acc = tl.dot(codes_of(words, 4, ASM), w4, acc)
    acc = tl.dot(codes_of(words, 5, ASM), w5, acc)
    acc = tl.dot(codes_of(words, 6, ASM), w6, acc)
    return tl.dot(codes_of(words, 7, ASM), w7, acc)
