"""The Hadamard rotation of values: it spreads a token's outliers over its channels, so that 2 bits hold them better.

A page holds the codes of rotated values. Attention adds them up with its weights as they are and rotates the sum back,
once per query: sum_t p_t (v_t H) H = sum_t p_t v_t, as H is its own inverse. The model's weights stay as they are.

Source: QuaRot (arXiv 2404.00456), section 4, for rotating values by Hadamard matrices. Differs: inside the page, not in
the weights.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def block_len(head_dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def rotate(x: Tensor) -> Tensor:
    """Rotate the channels, block by block; rotating twice gives `x` back.

    Args:
        x: float ``[..., head_dim]``.
    Returns:
        the same shape, in fp32 or wider.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    block = block_len(x.shape[-1])
    return (x.unflatten(-1, (-1, block)) @ _matrix(block, x.dtype, x.device)).flatten(-2)


@functools.cache
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix over the root of its size: symmetric, and its own inverse."""
    matrix = torch.ones((1, 1), dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(dtype=dtype, device=device)
