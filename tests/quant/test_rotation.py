"""The rotation of values: orthonormal, its own inverse, in blocks of a power of two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from page_format import hadamard

from kitty_runtime.quant.rotation import block_len, rotate


@pytest.mark.parametrize(
    ("head_dim", "block"), [(16, 16), (32, 32), (64, 64), (80, 16), (96, 32), (128, 128), (256, 256)]
)
def test_equals_sums_and_differences(head_dim, block):
    assert block_len(head_dim) == block
    x = torch.randint(-50, 50, (3, 5, head_dim), generator=torch.Generator().manual_seed(0)).float()
    assert np.array_equal(rotate(x).numpy(), hadamard(x.numpy()))
    one = torch.zeros(head_dim)
    one[block - 1] = 1.0
    assert int(rotate(one).count_nonzero()) == block  # an outlier is spread over its block and no further
    assert float(rotate(one).abs().max()) == pytest.approx(block**-0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_twice_is_nothing(dtype):
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    back = rotate(rotate(x))
    assert back.dtype == dtype
    assert float((back - x).abs().max()) < 8 * torch.finfo(dtype).eps
    assert float(rotate(x).double().norm()) == pytest.approx(float(x.double().norm()), rel=4 * torch.finfo(dtype).eps)


def test_can_be_used_in_any_mode():
    with torch.inference_mode():
        rotate(torch.ones(2, 48))
    x = torch.ones(2, 48, requires_grad=True)
    rotate(x).sum().backward()
    assert bool(x.grad.isfinite().all())
