"""The Hadamard rotation of values as one Triton launch: butterflies of sums and differences in fp32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitty_runtime.quant.rotation import block_len

NUMBERS = 1024
"""That a program rotates."""


@triton.jit(do_not_specialize=["num_blocks"])
def _rotate_kernel(
    x,
    out,
    num_blocks,
    scale,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks of SIZE channels, one after the other in memory."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    real = (block < num_blocks)[:, None]
    y = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    for _ in tl.static_range(STAGES):
        # The lowest bit of a channel's number is transformed and becomes the highest: after all stages each is back.
        even, odd = tl.split(tl.reshape(y, [BLOCKS, SIZE // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [BLOCKS, SIZE])
    tl.store(out + at, (y * scale).to(out.dtype.element_ty), mask=real)


def rotate_values(x: Tensor) -> Tensor:
    """See `kitty_runtime.ops.rotate_values.api.rotate_values`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = block_len(x.shape[-1])
    num_blocks, blocks = x.numel() // size, max(1, NUMBERS // size)
    _rotate_kernel[(triton.cdiv(num_blocks, blocks),)](
        x, out, num_blocks, size**-0.5,
        BLOCKS=blocks,
        SIZE=size,
        STAGES=size.bit_length() - 1,
        num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out
