"""Many new tokens on a quantized past against dequantize-then-attend in float64, query by query."""

from __future__ import annotations

import pytest
import torch
from attention_case import NUM_KV_HEADS, attend_long_way, make_case
from page_format import Spec

from kitty_runtime.config import Windows
from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.extend_attention.api import extend_attention
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec

KITTY = Windows(6, 0, 128)
RECENT = Windows(5, 9, 9)
NO_SINK = Windows(0, 0, 128)
TOLERANCE = 1e-11


def check(spec, windows, group, past_len, n, softcap=None, learned_sinks=False, seed=0, read_packed=True):
    total = past_len + n
    # Slot 1 is the sequence; slot 0 belongs to another one and is poison to it.
    case = make_case(spec, windows, [1, past_len], packed_at=[0, total], seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = random(NUM_KV_HEADS * group, n, spec.head_dim)
    keys, values = (random(NUM_KV_HEADS, n, spec.head_dim) for _ in range(2))
    case.keys[1] = torch.cat([case.keys[1], keys], dim=1)
    case.values[1] = torch.cat([case.values[1], values], dim=1)
    sinks = random(query.shape[0]) if learned_sinks else None
    softmax = SoftmaxSpec(spec.head_dim**-0.5, softcap, sinks)
    # The other sequence adds nothing: its columns are padding.
    batch = Batch(
        torch.arange(2), case.page_table, torch.tensor([1, past_len]), torch.tensor([1, total]), max_new_pages=8
    )
    padded = (torch.stack([torch.full_like(x, float("nan")), x]) for x in (query, keys, values))
    out = extend_attention(*padded, case.state, batch, softmax, read_packed)
    assert (out[0] == 0).all()
    out = out[1]
    assert out.shape == query.shape
    assert out.dtype == query.dtype
    for i in range(n) if n < 60 else sorted({*range(0, n, 17), n - 1, *edges(windows, past_len, n)}):
        pos = past_len + i
        read = case.read_at(1, pos) if read_packed else (case.keys[1][:, : pos + 1], case.values[1][:, : pos + 1])
        expected = attend_long_way(query[:, i], *read, softmax.scale, softcap, sinks)
        torch.testing.assert_close(out[:, i], expected, rtol=0, atol=TOLERANCE, msg=lambda m, p=pos: f"{p}: {m}")


def edges(windows, past_len, n):
    """Queries just before, at and after each packing threshold."""
    return [
        pos - past_len
        for page in range(8)
        for threshold in (windows.k_recent_len, windows.v_recent_len)
        for pos in range(windows.sink_len + 128 * page + threshold - 1, windows.sink_len + 128 * page + threshold + 2)
        if 0 <= pos - past_len < n
    ]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_every_head_size_and_group(head_dim, group):
    windows = (KITTY, RECENT)[group % 2]
    check(Spec(head_dim, 2, 2, head_dim // 8), windows, group, past_len=200, n=90, seed=head_dim + group)


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=str)
@pytest.mark.parametrize(
    ("k_bits", "num_boosted", "v_bits"), [(2, 0, 2), (2, 4, 4), (2, 32, 2), (4, 32, 4), (4, 32, 2), (16, 0, 16)]
)
def test_every_width_of_codes(windows, k_bits, num_boosted, v_bits):
    check(Spec(32, k_bits, v_bits, num_boosted, dense_itemsize=8), windows, 3, past_len=150, n=260)


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=str)
@pytest.mark.parametrize("n", [1, 2, 130])
@pytest.mark.parametrize("past_len", [0, 1, 5, 6, 7, 133, 134, 135, 262, 400])
def test_odd_pasts(windows, past_len, n):
    check(Spec(32, 2, 2, 4), windows, 2, past_len, n, seed=past_len)


@pytest.mark.parametrize(("softcap", "learned_sinks"), [(1.5, False), (None, True), (0.7, True)])
def test_softcap_and_learned_sinks(softcap, learned_sinks):
    check(Spec(64, 2, 2, 8), KITTY, 2, 150, 140, softcap=softcap, learned_sinks=learned_sinks)


@pytest.mark.parametrize("n", [1, 100, 300])
def test_a_first_pass_may_read_nothing_packed(n):
    check(Spec(32, 2, 2, 4), KITTY, 2, past_len=0, n=n, read_packed=False)


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 700), (5, 6), (133, 135), (134, 262), (300, 301), (7, 7)])
def test_tiles_cover_once_and_read_the_same_pages(windows, start, stop):
    pieces = list(windows.tiles(start, stop))
    assert [pos for a, b in pieces for pos in range(a, b)] == list(range(start, stop))
    for a, b in pieces:
        assert len({windows.packed_pages(pos) for pos in range(a, b)}) == 1


def test_refuses_what_does_not_fit():
    state: LayerState = make_case(Spec(32, 2, 2, 4), KITTY, [3], packed_at=[2], seed=0).state
    lens = torch.tensor([3])
    batch = Batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32), lens, lens + 5, 0)
    good = torch.zeros(1, 2, 5, 32, dtype=torch.float64)

    def extend(query, keys, values):
        extend_attention(query, keys, values, state, batch, SoftmaxSpec(1.0))

    extend(good, good, good)
    for bad in (good[:, :1], good[..., :16], good[:, :, :4], torch.cat([good, good])):
        with pytest.raises(ShapeError, match="keys"):
            extend(good, bad, good)
        with pytest.raises(ShapeError, match="keys"):
            extend(good, good, bad)
    for bad in (good[..., :16], torch.zeros(1, 3, 5, 32), torch.cat([good, good])):
        with pytest.raises(ShapeError, match="query"):
            extend(bad, good, good)
