"""The Hadamard rotation of values: it spreads a token's outliers over its channels, so that 2 bits hold them better.

Values are rotated before they are stored, sinks and rings included, and attention's output is rotated back:
sum_t p_t (v_t H) H = sum_t p_t v_t, as H is its own inverse. Kernels know nothing of it, and the model's weights stay
as they are.

Source: QuaRot (arXiv 2404.00456), section 4, for rotating values by Hadamard matrices. Differs: in the cache, not in
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
        the same shape and dtype. In 16 bits it is one matrix product, which accumulates in fp32; the root of the
        block's size is then rounded too, by at most 1.1e-4, less than the dtype's own step.
    """
    block = block_len(x.shape[-1])
    blocks = x.unflatten(-1, (-1, block))
    if x.element_size() == 2:
        rotated: Tensor = blocks @ _matrix(block, block**-0.5, x.dtype, x.device)
    else:
        rotated = (blocks @ _matrix(block, 1.0, x.dtype, x.device)) * block**-0.5
    return rotated.flatten(-2)


@functools.cache
def _matrix(size: int, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of `scale` and its negative; symmetric, and over the root of its size its own
    inverse."""
    with torch.inference_mode(False):  # it outlives the caller's mode
        matrix = torch.full((1, 1), scale, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix.to(dtype=dtype, device=device)
