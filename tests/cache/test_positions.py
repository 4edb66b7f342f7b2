"""The rule of position."""

from __future__ import annotations

import pytest
import torch

from kitty_runtime.config import PRESETS, CacheConfig, Windows
from kitty_runtime.errors import ConfigError

WINDOWS = [Windows(32, 0, 128), Windows(32, 64, 64), Windows(0, 0, 0), Windows(0, 0, 128), Windows(7, 13, 141)]


def pages_by_definition(query_pos: int, sink_len: int, recent_len: int) -> int:
    """Page p is packed when it is complete and `recent_len` tokens older than the query."""
    pages = 0
    while sink_len + 128 * (pages + 1) + recent_len <= query_pos:
        pages += 1
    return pages


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_pages_by_definition_for_ints_and_tensors(windows):
    positions = list(range(700))
    expected = [
        (
            pages_by_definition(pos, windows.sink_len, windows.k_recent_len),
            pages_by_definition(pos, windows.sink_len, windows.v_recent_len),
        )
        for pos in positions
    ]
    assert [windows.packed_pages(pos) for pos in positions] == expected
    for dtype in (torch.int32, torch.int64):
        k_pages, v_pages = windows.packed_pages(torch.tensor(positions, dtype=dtype).view(7, 100))
        assert k_pages.dtype == dtype
        assert list(zip(k_pages.flatten().tolist(), v_pages.flatten().tolist(), strict=True)) == expected
    assert {k - v for k, v in expected} == ({0, 1} if windows.v_recent_len > windows.k_recent_len else {0})


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_what_is_not_packed_fits_the_rings(windows):
    for pos in range(700):
        k_pages, v_pages = windows.packed_pages(pos)
        assert max(0, pos + 1 - windows.sink_len) - 128 * k_pages <= windows.k_ring_len
        assert max(0, pos + 1 - windows.sink_len) - 128 * v_pages <= windows.v_ring_len
        assert 128 * k_pages + windows.k_recent_len <= max(0, pos - windows.sink_len) or k_pages == 0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_use_the_same_rule(name):
    config = PRESETS[name]
    assert [config.packed_pages(n) for n in range(600)] == [config.windows.packed_pages(n) for n in range(600)]


@pytest.mark.parametrize("v_recent_len", [0, 63, 65, 127, 191, 193, 320])
def test_values_stay_as_long_as_keys_or_a_page_longer(v_recent_len):
    with pytest.raises(ConfigError, match="v_recent_len"):
        CacheConfig(k_recent_len=64, v_recent_len=v_recent_len)


@pytest.mark.parametrize(
    "changes",
    [
        {"k_bits": 3},
        {"v_bits": 8},
        {"k_bits": 16},
        {"v_bits": 16},
        {"boost_ratio": -0.1},
        {"boost_ratio": 1.1},
        {"boost_ratio": float("nan")},
        {"boost_ratio": True},
        {"boost_ratio": "0.1x"},
        {"k_bits": 4},
        {"sink_len": -1},
        {"sink_len": 1.5},
        {"k_recent_len": -128, "v_recent_len": 0},
        {"policy": "best"},
        {"prefill": "half"},
    ],
    ids=str,
)
def test_refuses_settings_the_format_cannot_hold(changes):
    with pytest.raises(ConfigError) as error:
        CacheConfig(**changes)
    assert error.value.hint
