"""The rotation kernel against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from kernel_case import BF16, DEVICE, F16, HEAD_DIMS, label

from kitty_runtime.ops.rotate_values import triton as kernel
from kitty_runtime.quant.rotation import rotate


@pytest.mark.parametrize("dtype", [F16, BF16], ids=label)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 48, 7])
def test_every_head_size(head_dim, dtype):
    x = torch.randn(3, 5, 2, head_dim, generator=torch.Generator().manual_seed(head_dim)).to(dtype)
    expected = rotate(x.double())
    found = kernel.rotate_values(x.to(DEVICE)).cpu()
    assert found.dtype == dtype
    assert found.shape == x.shape
    # Sums in fp32, rounded once: half a unit in the last place of 16 bits; the interpreter cuts bf16 off instead.
    ulps = 1 if dtype == BF16 and DEVICE.type == "cpu" else 0.5
    error = (found.double() - expected).abs()
    assert bool((error <= ulps * torch.finfo(dtype).eps * expected.abs() + 1e-6).all())


def test_tokens_that_are_not_in_order_in_memory():
    x = torch.randn(2, 4, 3, 64, generator=torch.Generator().manual_seed(0)).to(F16).transpose(1, 2)
    found = kernel.rotate_values(x.to(DEVICE)).cpu()
    assert torch.equal(found, kernel.rotate_values(x.contiguous().to(DEVICE)).cpu())
    assert float((found.double() - rotate(x.double())).abs().max()) < 2e-3


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 1000])
def test_any_number_of_rows(rows):
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(F16)
    assert float((kernel.rotate_values(x.to(DEVICE)).cpu().double() - rotate(x.double())).abs().max()) < 4e-3


def test_beside_large_numbers_nothing_overflows():
    x = torch.full((1, 128), 60000.0, dtype=F16)
    found = kernel.rotate_values(x.to(DEVICE)).cpu()
    assert bool(found[0, 1:].eq(0).all())
    assert bool(found[0, 0].isinf())  # the sum itself, 5.4e6 / sqrt(128), is out of fp16's range
