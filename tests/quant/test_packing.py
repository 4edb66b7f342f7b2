"""The page format: bit order, offsets, sizes, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from page_format import Spec, words_of

from kitty_runtime.errors import ConfigError
from kitty_runtime.quant.packing import PageLayout, pack_tokens, unpack_tokens

HEAD_DIMS = [64, 80, 96, 128, 256]
KEYS = [(2, 0.0), (2, 0.125), (2, 0.25), (2, 1.0), (4, 1.0)]
SETTINGS = [(k, ratio, v) for (k, ratio), v in itertools.product(KEYS, (2, 4))] + [(16, 0.0, 16)]


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_pack_and_unpack_along_any_dimension(dim):
    shape = [3, 3, 3]
    shape[dim] = 128
    codes = random_codes(*shape)
    words = pack_tokens(codes, dim)
    assert words.dtype == torch.int16
    assert words.shape[dim] == 16
    assert torch.equal(unpack_tokens(words, dim).to(torch.uint8), codes)


def test_bit_order():
    codes = random_codes(128, 5)
    words = pack_tokens(codes, 0)
    for channel in range(5):
        assert [word & 0xFFFF for word in words[:, channel].tolist()] == words_of(codes[:, channel].tolist())


def test_every_word_survives():
    # All 65536 bit patterns, the sign bit of int16 included.
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(-1, 16)
    codes = unpack_tokens(words, 1)
    assert int(codes.min()) == 0
    assert int(codes.max()) == 3
    assert torch.equal(pack_tokens(codes, 1), words)


@pytest.mark.parametrize(("head_dim", "num_bytes"), [(64, 5136), (128, 9744)])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_bytes_of_the_paper_setting(head_dim, num_bytes, num_kv_heads):
    layout = PageLayout(num_kv_heads, head_dim, 2, 2, head_dim // 8)
    assert layout.head_bytes + layout.ids_bytes == num_bytes
    assert layout.page_bytes == num_kv_heads * num_bytes
    assert layout.dense_page_bytes == num_kv_heads * 128 * head_dim * 4


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("k_bits", "ratio", "v_bits"), SETTINGS)
def test_every_setting_has_the_bytes_of_the_formula(head_dim, k_bits, ratio, v_bits):
    boosted = int(ratio * head_dim)
    layout = PageLayout(2, head_dim, k_bits, v_bits, boosted)
    spec = Spec(head_dim, k_bits, v_bits, boosted)
    assert layout.head_bytes == spec.head_bytes - spec.ids_bytes
    assert layout.page_bytes == 2 * spec.head_bytes
    assert layout.ids_offset == 2 * layout.head_bytes
    assert layout.head_bytes % 16 == 0
    assert layout.head_bytes % 32 == 0
    taken: set[int] = set()
    for name, (first, end) in spec.spans.items():
        if name == "boosted_channels":
            assert first == layout.head_bytes
            continue
        assert layout.offset(name) == first
        assert first % 16 == 0
        span = set(range(first, end))
        assert not span & taken
        assert end <= layout.head_bytes
        taken |= span


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("k_bits", "ratio", "v_bits"), SETTINGS)
def test_views_write_their_own_bytes_and_no_others(head_dim, k_bits, ratio, v_bits):
    boosted = int(ratio * head_dim)
    layout = PageLayout(2, head_dim, k_bits, v_bits, boosted)
    spec = Spec(head_dim, k_bits, v_bits, boosted)
    pages = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    if k_bits == 16:
        views = {
            "keys": layout.dense_keys(pages),
            "values": layout.dense_values(pages),
        }
    else:
        page = layout.fields(pages)
        views = {
            "k_low": page.k_low,
            "k_high": page.k_high,
            "v_low": page.v_low,
            "v_high": page.v_high,
            "k_scale": page.k_qparams.scale,
            "k_zero_point": page.k_qparams.zero_point,
            "v_scale": page.v_qparams.scale,
            "v_zero_point": page.v_qparams.zero_point,
            "boosted_channels": page.boosted_channels,
        }
    for name, view in views.items():
        first, end = spec.spans[name]
        assert view.nbytes == 3 * 2 * (end - first)
        if not view.numel():
            continue
        pages.zero_()
        view[1, 1] = -1 if view.dtype.is_signed else 255
        written = pages.nonzero()
        assert set(written[:, 0].tolist()) == {1}
        if name == "boosted_channels":
            first, end = (layout.ids_offset + layout.ids_bytes + x - layout.head_bytes for x in (first, end))
            at = written[:, 1]
        else:
            at = written[:, 1] - layout.head_bytes
        assert int(at.min()) >= first
        assert int(at.max()) < end
        assert len(at) >= (end - first) // 2  # -1.0 in fp16 has one zero byte


def test_first_word_and_last_word_lie_where_the_format_says():
    layout = PageLayout(1, 32, 2, 2, 4)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    layout.fields(pages).k_low[0, 0, 2, 5] = 0x0102  # word 2 of channel 5: [16][head_dim]
    layout.fields(pages).v_low[0, 0, 5, 2] = 0x0304  # word 2 of channel 5: [head_dim][16]
    k, v = layout.offset("k_low") + 2 * (2 * 32 + 5), layout.offset("v_low") + 2 * (5 * 16 + 2)
    assert pages[0, k : k + 2].tolist() == [0x02, 0x01]
    assert pages[0, v : v + 2].tolist() == [0x04, 0x03]


@pytest.mark.parametrize("head_dim", [0, 8, 24, 100, 272, 512, -16])
def test_refuses_head_sizes(head_dim):
    with pytest.raises(ConfigError, match=str(head_dim)):
        PageLayout(1, head_dim, 2, 2, 0)


@pytest.mark.parametrize("num_boosted", [-1, 65, 1000])
def test_refuses_boosted_counts(num_boosted):
    with pytest.raises(ConfigError, match=str(num_boosted)):
        PageLayout(1, 64, 2, 2, num_boosted)


@pytest.mark.parametrize("num_boosted", [0, 8, 63])
def test_four_bit_keys_boost_every_channel(num_boosted):
    with pytest.raises(ConfigError, match="num_boosted"):
        PageLayout(1, 64, 4, 2, num_boosted)
