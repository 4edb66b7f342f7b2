"""The formulas of `kitty_runtime.quant.affine` as Triton functions, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

FP16_MAX = tl.constexpr(65504.0)
FP16_OVERFLOW = tl.constexpr(65520.0)
MIN_SCALE = tl.constexpr(1e-6)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small number it rounds half to even and leaves the integer in the lowest bits."""
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def qparams_of(low, high, levels):
    """fp16 scale and zero point; see `kitty_runtime.quant.affine.choose_qparams`."""
    scale = tl.maximum(tl.math.div_rn(high - low, levels), MIN_SCALE).to(tl.float16)
    zero = low.to(tl.float16)
    overflows = scale.to(tl.float32) * levels + zero.to(tl.float32) >= FP16_OVERFLOW
    scale = (scale.to(tl.int16, bitcast=True) - overflows.to(tl.int16)).to(tl.float16, bitcast=True)
    return scale, zero


@triton.jit
def inverse_of(scale):
    return tl.math.div_rn(1.0, scale.to(tl.float32))


@triton.jit
def codes_of(x, zero, inverse, levels):
    """Codes as int32; see `kitty_runtime.quant.affine.quantize`.

    Beyond +-65504 nothing needs to saturate: the range did, and codes end at its ends. So do numbers too large for the
    rounding: their bits stay in order.
    """
    rounded = ((x.to(tl.float32) - zero) * inverse + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS
    return tl.maximum(tl.minimum(rounded, levels), 0)


@triton.jit
def saturated(x):
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)
