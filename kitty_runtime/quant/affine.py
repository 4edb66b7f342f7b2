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


CLIPS = (1 / 16, 1 / 8)
"""Shares of a channel's range that the search for a clipped range tries to leave out at either end."""


class QParams(NamedTuple):
    """Affine parameters as stored: fp16, shaped like the input with the quantized dimension kept as 1."""

    scale: Tensor
    zero_point: Tensor


def choose_qparams(x: Tensor, levels: Tensor | int, dim: int, clip_search: bool = False) -> QParams:
    """Min-max parameters over `dim`, or those of the clipped range that leaves the least squared error.

    Args:
        x: float, any shape; at most 128 along `dim` with `clip_search`.
        levels: largest code, 3 for 2 bits and 15 for 4; broadcastable to the parameters.
        dim: the dimension that shares one scale and zero point.
        clip_search: try ranges that are `CLIPS` narrower at either end; of equals the widest wins.
    Returns:
        fp16 scale = (max - min) / levels and zero_point = min; x saturates at +-65504 first, and the scale is one
        fp16 step smaller where the largest code would otherwise come back as infinity in fp16.
    """
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    chosen = _qparams_of(low, high, levels)
    if not clip_search:
        return chosen
    spread = high - low
    least = _error(x, chosen, levels, spread, dim)
    for clip in CLIPS:
        qparams = _qparams_of(low + spread * clip, high - spread * clip, levels)
        error = _error(x, qparams, levels, spread, dim)
        better, least = error < least, torch.minimum(error, least)
        chosen = QParams(*(torch.where(better, new, old) for new, old in zip(qparams, chosen, strict=True)))
    return chosen


def _qparams_of(low: Tensor, high: Tensor, levels: Tensor | int) -> QParams:
    scale, zero_point = ((high - low) / levels).clamp_min(MIN_SCALE).half(), low.half()
    # Rounded up, the scale can lead past the largest fp16 number, and a value would come back infinite: one step down.
    overflows = scale.float() * levels + zero_point.float() >= FP16_OVERFLOW
    scale = (scale.view(torch.int16) - overflows.to(torch.int16)).view(torch.float16)
    return QParams(scale, zero_point)


def _error(x: Tensor, qparams: QParams, levels: Tensor | int, spread: Tensor, dim: int) -> Tensor:
    """Sum of squared errors over the squared range, in units of 2**-23; integers, so any order of adding agrees."""
    off = (x - dequantize(quantize(x, qparams, levels), qparams, x.dtype)) * spread.clamp_min(MIN_SCALE).reciprocal()
    return ((off * off).clamp_max(1.0) * 2.0**23).to(torch.int32).sum(dim, keepdim=True)


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
