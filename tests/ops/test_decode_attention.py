"""Decode attention against dequantize-then-attend in float64, with poison wherever nothing may be read."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_case import NUM_KV_HEADS, attend_long_way, batch_of, make_case
from page_format import Spec

from kitty_runtime.config import Windows
from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.decode_attention.api import decode_attention
from kitty_runtime.ops.operands import Batch, SoftmaxSpec

KITTY = Windows(6, 0, 128)
RECENT = Windows(5, 9, 9)
NO_SINK = Windows(0, 0, 128)
TOLERANCE = 1e-11


def lengths(windows: Windows) -> list[int]:
    """One token, the edges of the sink, of packing, and of the rings."""
    first = windows.sink_len + 128 + windows.k_recent_len
    return [1, max(1, windows.sink_len), windows.sink_len + 1, first, first + 1, first + 128, first + 129, first + 300]


def check(spec, windows, group, lens=None, softcap=None, learned_sinks=False, seed=0):
    lens = lens or lengths(windows)
    case = make_case(spec, windows, lens, packed_at=[n - 1 for n in lens], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    num_q_heads = NUM_KV_HEADS * group
    query = torch.randn(len(lens), num_q_heads, spec.head_dim, generator=generator, dtype=torch.float64)
    sinks = torch.randn(num_q_heads, generator=generator, dtype=torch.float64) if learned_sinks else None
    softmax = SoftmaxSpec(spec.head_dim**-0.5, softcap, sinks)
    before = case.state.pages.clone()
    out = decode_attention(query, case.state, batch_of(case.page_table, lens), softmax)
    assert out.dtype == query.dtype
    for row, length in enumerate(lens):
        keys, values = case.read_at(row, length - 1)
        expected = attend_long_way(query[row], keys, values, softmax.scale, softcap, sinks)
        torch.testing.assert_close(out[row], expected, rtol=0, atol=TOLERANCE, msg=lambda m, n=length: f"{n}: {m}")
    assert torch.equal(before, case.state.pages)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_every_head_size_and_group(head_dim, group):
    check(Spec(head_dim, 2, 2, head_dim // 8), (KITTY, RECENT)[group % 2], group, seed=head_dim + group)


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=str)
@pytest.mark.parametrize(
    ("k_bits", "num_boosted", "v_bits"), [(2, 0, 2), (2, 4, 4), (2, 32, 2), (4, 32, 4), (4, 32, 2), (16, 0, 16)]
)
def test_every_width_of_codes(windows, k_bits, num_boosted, v_bits):
    check(Spec(32, k_bits, v_bits, num_boosted, dense_itemsize=8), windows, group=3)


@pytest.mark.parametrize(("softcap", "learned_sinks"), [(1.5, False), (None, True), (0.7, True)])
@pytest.mark.parametrize("windows", [KITTY, RECENT], ids=str)
def test_softcap_and_learned_sinks(windows, softcap, learned_sinks):
    check(Spec(64, 2, 2, 8), windows, group=2, softcap=softcap, learned_sinks=learned_sinks)


@pytest.mark.parametrize("offset", [*range(-2, 3), 62, 63, 64, 65, 126, 127, 128, 129, 130])
def test_around_a_packing_threshold(offset):
    """The page whose keys are packed and whose values are not, at every edge of it."""
    base = KITTY.sink_len + 128
    check(Spec(32, 2, 2, 4), KITTY, group=2, lens=[base + offset, base + 128 + offset], seed=offset + 5)


def test_no_sequence_has_a_page():
    check(Spec(32, 2, 2, 4), KITTY, group=2, lens=[1, 3, 17, 128])


def test_rows_do_not_depend_on_each_other():
    lens = lengths(KITTY)
    case = make_case(Spec(32, 2, 2, 4), KITTY, lens, packed_at=[n - 1 for n in lens], seed=1)
    query = torch.randn(len(lens), 4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = batch_of(case.page_table, lens)
    together = decode_attention(query, case.state, batch, SoftmaxSpec(0.2))
    order = torch.tensor([5, 0, 7, 3])
    part = Batch(order, batch.page_table[order], batch.past_lens[order], batch.seq_lens[order], 0)
    some = decode_attention(query[order], case.state, part, SoftmaxSpec(0.2))
    torch.testing.assert_close(some, together[order], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_queries_keep_their_dtype(dtype):
    spec, lens = Spec(64, 2, 2, 8), lengths(KITTY)
    case = make_case(spec, KITTY, lens, packed_at=[n - 1 for n in lens], seed=2)
    for name in ("k_sink", "v_sink", "k_ring", "v_ring"):
        setattr(case.state, name, getattr(case.state, name).to(dtype))
    query = torch.randn(len(lens), 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = decode_attention(query, case.state, batch_of(case.page_table, lens), SoftmaxSpec(0.125))
    assert out.dtype == dtype
    case.keys = [keys.to(dtype).double() for keys in case.keys]
    case.values = [values.to(dtype).double() for values in case.values]
    for row, length in enumerate(lens):
        expected = attend_long_way(query[row].double(), *case.read_at(row, length - 1), 0.125)
        error = (out[row].double() - expected).abs() / expected.abs().clamp_min(1e-2)
        assert float(error.max()) <= torch.finfo(dtype).eps  # one rounding of the result; all else in fp32


@pytest.mark.parametrize("shape", [(2, 3, 32), (2, 4, 64), (4, 32), (2, 4, 1, 32)])
def test_refuses_queries_that_do_not_fit(shape):
    case = make_case(Spec(32, 2, 2, 4), KITTY, [3, 5], packed_at=[2, 4], seed=0)
    with pytest.raises(ShapeError, match="query"):
        decode_attention(torch.zeros(shape), case.state, batch_of(case.page_table, [3, 5]), SoftmaxSpec(1.0))


def test_covers_all_pairs():
    """The parametrization above is the whole table of design page 7."""
    marks = {mark.args[0]: mark.args[1] for mark in test_every_head_size_and_group.pytestmark}
    pairs = set(itertools.product(marks["head_dim"], marks["group"]))
    assert pairs == set(itertools.product([32, 64, 80, 96, 128, 256], [1, 2, 3, 4, 7, 8]))
