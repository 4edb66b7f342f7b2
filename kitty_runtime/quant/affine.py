"""Asymmetric min-max quantization: the formulas of codes, scale and zero point, in plain torch.

    codes = clamp(round((x - zero_point) / scale), 0, levels)        x ~ codes * scale + zero_point

Source: Kitty, section 2.2; KIVI, section 3. Differs: codes are computed with the *stored* fp16 scale and zero point,
so what the page holds and what the codes meant are the same numbers; and with the fp32 reciprocal of the scale, which
costs a kernel one division per group and changes a code only where both are as near.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP16_MAX = 65504.0
"""Largest finite fp16. Keys and values beyond it saturate: scale and zero point are stored as fp16."""

FP16_OVERFLOW = 65520.0
"""Smallest number that rounds to infinity in fp16."""

MIN_SCALE = 1e-6
"""Smallest scale, so that a constant channel divides by no zero; representable in fp16 as a subnormal."""


class QParams(NamedTuple):
    """Affine parameters as stored: fp16, shaped like the input with the quantized dimension kept as 1."""

    scale: Tensor
    zero_point: Tensor


def choose_qparams(x: Tensor, levels: Tensor | int, dim: int) -> QParams:
    """Min-max parameters over `dim`.

    Args:
        x: float, any shape.
        levels: largest code, 3 for 2 bits and 15 for 4; broadcastable to the parameters.
        dim: the dimension that shares one scale and zero point.
    Returns:
        fp16 scale = (max - min) / levels and zero_point = min; x saturates at +-65504 first, and the scale is one
        fp16 step smaller where the largest code would otherwise come back as infinity in fp16.
    """
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, zero_point = ((high - low) / levels).clamp_min(MIN_SCALE).half(), low.half()
    # Rounded up, the scale can lead past the largest fp16 number, and a value would come back infinite: one step down.
    overflows = scale.float() * levels + zero_point.float() >= FP16_OVERFLOW
    scale = (scale.view(torch.int16) - overflows.to(torch.int16)).view(torch.float16)
    return QParams(scale, zero_point)


def quantize(x: Tensor, qparams: QParams, levels: Tensor | int) -> Tensor:
    """Codes of `x`, rounding half to even.

    Returns:
        uint8, the shape of `x`, in 0..levels.
    """
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    codes = ((x - qparams.zero_point.float()) * qparams.scale.float().reciprocal()).round()
    top = torch.as_tensor(levels, dtype=codes.dtype, device=codes.device)
    return torch.minimum(codes.clamp_min(0), top).to(torch.uint8)


def dequantize(codes: Tensor, qparams: QParams, dtype: torch.dtype) -> Tensor:
    """``codes * scale + zero_point`` computed in at least fp32, returned as `dtype`."""
    compute = torch.promote_types(dtype, torch.float32)
    return (codes.to(compute) * qparams.scale.to(compute) + qparams.zero_point.to(compute)).to(dtype)
