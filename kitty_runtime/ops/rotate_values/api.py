"""Rotate values before they are stored, and what attention makes of stored ones: dispatch."""

from __future__ import annotations

from torch import Tensor

from kitty_runtime.ops.backend import backend_of
from kitty_runtime.quant import rotation


def rotate_values(x: Tensor) -> Tensor:
    """See `kitty_runtime.quant.rotation.rotate`, whose formula this is on any backend.

    Args:
        x: float ``[..., head_dim]``.
    Returns:
        the same shape and dtype, contiguous.
    """
    if backend_of(x.device.type, x.dtype) == "triton":
        from kitty_runtime.ops.rotate_values import triton

        return triton.rotate_values(x)
    return rotation.rotate(x)
