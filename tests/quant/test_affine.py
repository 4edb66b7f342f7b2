"""Affine quantization: exact parameters, exact codes, and values no key should have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from page_format import affine

from kitty_runtime.quant.affine import CLIPS, QParams, choose_qparams, dequantize, quantize


def column(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


@pytest.mark.parametrize(("levels", "scale"), [(3, 2.0), (15, 0.4)])
def test_qparams_are_min_and_range_over_levels_in_fp16(levels, scale):
    qparams = choose_qparams(column(-1.0, 5.0, 0.0), levels, dim=0)
    assert qparams.scale.dtype == qparams.zero_point.dtype == torch.float16
    assert qparams.scale.shape == qparams.zero_point.shape == (1, 1)
    assert qparams.scale.item() == torch.tensor(scale).half().item()
    assert qparams.zero_point.item() == -1.0


@pytest.mark.parametrize("levels", [3, 15])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_independent_formula(levels, dtype):
    x = (torch.randn(128, 16, generator=torch.Generator().manual_seed(levels), dtype=torch.float64) * 3).to(dtype)
    qparams = choose_qparams(x, levels, dim=0)
    codes = quantize(x, qparams, levels)
    assert codes.dtype == torch.uint8
    for channel in range(16):
        scale, zero_point, expected = affine(x[:, channel].float().numpy(), levels)
        assert qparams.scale[0, channel].item() == float(scale)
        assert qparams.zero_point[0, channel].item() == float(zero_point)
        assert codes[:, channel].tolist() == expected


def test_levels_may_differ_by_channel():
    x = torch.randn(128, 3, generator=torch.Generator().manual_seed(1))
    levels = torch.tensor([[3, 15, 3]])
    mixed = choose_qparams(x, levels, dim=0)
    codes = quantize(x, mixed, levels)
    for channel, top in enumerate([3, 15, 3]):
        alone = choose_qparams(x[:, channel : channel + 1], top, dim=0)
        assert mixed.scale[0, channel] == alone.scale[0, 0]
        assert torch.equal(codes[:, channel : channel + 1], quantize(x[:, channel : channel + 1], alone, top))
    assert codes.amax(0).tolist() == [3, 15, 3]


def test_rounds_half_to_even():
    qparams = QParams(torch.ones(1, 1).half(), torch.zeros(1, 1).half())
    codes = quantize(column(0.5, 1.5, 2.5, 3.5, 4.5, 0.49, 0.51), qparams, 15)
    assert codes.flatten().tolist() == [0, 2, 2, 4, 4, 0, 1]


def test_codes_come_from_the_stored_fp16_parameters():
    # The range 3.0 + 2^-12 gives scale 1 + 2^-12 / 3, stored as 1; the minimum 2049 is stored as 2048.
    x = column(2049.0, 2050.0, 2052.0)
    qparams = choose_qparams(x, 3, dim=0)
    assert (qparams.scale.item(), qparams.zero_point.item()) == (1.0, 2048.0)
    assert quantize(x, qparams, 3).flatten().tolist() == [1, 2, 3]  # with the exact minimum: 0, 1, 3
    assert dequantize(quantize(x, qparams, 3), qparams, torch.float32).flatten().tolist() == [2049, 2050, 2051]


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e-5, 65504.0, -65504.0])
@pytest.mark.parametrize("levels", [3, 15])
def test_a_constant_comes_back_to_metadata_precision(value, levels):
    x = torch.full((128, 2), value)
    qparams = choose_qparams(x, levels, dim=0)
    assert bool((qparams.scale > 0).all())
    back = dequantize(quantize(x, qparams, levels), qparams, torch.float32)
    assert bool(((back - value).abs() <= abs(value) / 2048 + 1e-6 * 1.02).all())
    assert bool((back == back[0, 0]).all())


@pytest.mark.parametrize("levels", [3, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_largest_fp16_numbers_stay_finite(levels, dtype):
    x = column(-65504.0, 65504.0, 0.0, 1.0, dtype=dtype)
    qparams = choose_qparams(x, levels, dim=0)
    back = dequantize(quantize(x, qparams, levels), qparams, dtype)
    assert bool(back.isfinite().all()), back
    assert bool(((back.float() - x.float()).abs() <= qparams.scale.float() / 2 + 64).all())


@pytest.mark.parametrize("levels", [3, 15])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beyond_fp16_saturates(levels, dtype):
    x = column(-1e5, 1e5, 3e38, 0.0, dtype=dtype)
    qparams = choose_qparams(x, levels, dim=0)
    codes = quantize(x, qparams, levels)
    assert bool(torch.cat(list(qparams)).isfinite().all())
    assert qparams.zero_point.item() == -65504
    assert codes.flatten().tolist()[:3] == [0, levels, levels]
    assert bool(dequantize(codes, qparams, dtype).isfinite().all())


def test_tiny_ranges_do_not_divide_by_zero():
    x = column(0.0, 1e-12, 5e-8)
    qparams = choose_qparams(x, 3, dim=0)
    assert qparams.scale.item() == float(np.float16(1e-6))
    assert quantize(x, qparams, 3).flatten().tolist() == [0, 0, 0]


def test_dequantize_computes_in_at_least_fp32():
    # In fp16 2047 + 3 * 0.3333 would round at every step; in fp32 it is rounded once.
    qparams = QParams(torch.tensor([[0.3333]]).half(), torch.tensor([[2047.0]]).half())
    exact = 3 * float(np.float16(0.3333)) + 2047.0
    codes = torch.tensor([[3]], dtype=torch.uint8)
    assert dequantize(codes, qparams, torch.float64).item() == exact
    assert dequantize(codes, qparams, torch.float32).item() == float(np.float32(exact))
    assert dequantize(codes, qparams, torch.float16).item() == float(np.float16(exact))


@pytest.mark.parametrize("levels", [3, 15])
def test_the_search_finds_the_clipped_range_of_least_squared_error(levels):
    x = torch.randn(128, 40, generator=torch.Generator().manual_seed(0))
    x[5, :20] *= 4  # an outlier, which is worth leaving out
    found = choose_qparams(x, levels, dim=0, clip_search=True)
    for channel in range(x.shape[1]):
        column = x[:, channel].numpy()
        low, spread = column.min(), column.max() - column.min()
        errors = []
        for clip in (0.0, *CLIPS):
            scale, zero_point = np.float16(spread * (1 - 2 * clip) / levels), np.float16(low + spread * clip)
            codes = np.clip(np.rint((column - np.float64(zero_point)) / np.float64(scale)), 0, levels)
            errors.append((((codes * np.float64(scale) + np.float64(zero_point)) - column) ** 2).sum())
        qparams = QParams(*(p[:, channel] for p in found))
        error = (dequantize(quantize(x[:, channel], qparams, levels), qparams, torch.float64) - x[:, channel]) ** 2
        assert error.sum().item() == pytest.approx(min(errors), rel=1e-3)


def test_the_search_keeps_the_whole_range_where_clipping_gains_nothing():
    even = torch.arange(4.0).repeat(32)[:, None]
    for x in (even, torch.full((128, 1), 7.25)):
        assert all(
            torch.equal(a, b) for a, b in zip(choose_qparams(x, 3, 0, True), choose_qparams(x, 3, 0), strict=True)
        )


def test_the_search_takes_numbers_beyond_fp16():
    x = torch.tensor([-1e6, 1e6, 0.0, 65504.0, 1e-7])[:, None]
    qparams = choose_qparams(x, 3, 0, clip_search=True)
    assert dequantize(quantize(x, qparams, 3), qparams, torch.float16).isfinite().all()
