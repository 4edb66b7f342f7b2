"""The decode kernel against the float64 reference on the same bytes, with poison wherever nothing may be read."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_case import (
    BF16,
    DEVICE,
    F16,
    KITTY,
    NO_SINK,
    RECENT,
    UNPACKED,
    copy_to,
    needs_gpu_memory,
    poisoned_case,
    random_batch,
    random_state,
    same,
    spread,
    with_tensors,
)
from page_format import Spec

from kitty_runtime.config import Windows
from kitty_runtime.ops.decode_attention import reference
from kitty_runtime.ops.decode_attention import triton as kernel
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.quant.packing import PageLayout

TOLERANCE = {F16: 2e-3, BF16: 1e-2}

HEAD_DIMS = [32, 64, 80, 96, 128, 256]
GROUPS = [1, 2, 3, 4, 5, 7, 8, 16]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """New memory holds NaN: what the kernels leave unwritten, or read unwritten, shows."""

    def poisoned(allocate):
        def allocate_poison(*args, **kwargs):
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return allocate_poison

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


def make_query(state, num_seqs, group, seed, size=1.0):
    shape = (num_seqs, state.layout.num_kv_heads * group, state.layout.head_dim)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(state.layout.dtype)


def make_softmax(query, softcap=None, learned_sinks=False):
    """The usual scale; learned sinks in the model's dtype, from -2 to 4."""
    sinks = torch.linspace(-2, 4, query.shape[1]).to(query) if learned_sinks else None
    return SoftmaxSpec(query.shape[-1] ** -0.5, softcap, sinks)


def expected_of(query, state, batch, softmax):
    exact = with_tensors(state, lambda x: x.double(), UNPACKED)
    return reference.decode_attention(query.double(), exact, batch, softmax)


def compare(query, state, batch, softmax, expected):
    """Run the kernel on the device; what is given lies anywhere."""
    state, batch = copy_to(DEVICE, state), copy_to(DEVICE, batch)
    if softmax.sink_logits is not None:
        softmax = replace(softmax, sink_logits=softmax.sink_logits.to(DEVICE))
    before = copy_to(DEVICE, state)
    out = kernel.decode_attention(query.to(DEVICE), state, batch, softmax)
    assert out.dtype == query.dtype
    assert out.shape == query.shape
    assert_close(out, expected)
    assert same(before, state) == []


def assert_close(out, expected):
    error = (out.double() - expected.to(out.device)).norm() / expected.norm()
    assert float(error) <= TOLERANCE[out.dtype]  # False for NaN


def check(spec, windows, lens, group=2, dtype=F16, softcap=None, learned_sinks=False, seed=0):
    state, batch = poisoned_case(spec, windows, lens, dtype, seed)
    query = make_query(state, len(lens), group, seed)
    softmax = make_softmax(query, softcap, learned_sinks)
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))


def some_lens(windows: Windows) -> list[int]:
    """A token past the sink; one page that is packed and one more, of which the paper's windows pack keys alone."""
    return [windows.sink_len + 1, windows.sink_len + windows.k_recent_len + 256 + 37]


@pytest.mark.parametrize(
    ("head_dim", "group", "windows", "dtype"),
    [
        (32, 1, KITTY, F16),
        (64, 3, RECENT, BF16),
        (80, 5, KITTY, F16),
        (96, 7, RECENT, F16),
        (128, 4, KITTY, BF16),
        (256, 8, RECENT, F16),
        (64, 16, KITTY, F16),
        (128, 2, RECENT, F16),
        (80, 16, RECENT, BF16),
        (256, 1, KITTY, BF16),
        (96, 4, KITTY, BF16),
        (32, 8, RECENT, BF16),
    ],
    ids=str,
)
def test_every_head_size_and_group(head_dim, group, windows, dtype):
    check(Spec(head_dim, 2, 2, head_dim // 8), windows, some_lens(windows), group, dtype, seed=head_dim + group)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_pair_of_head_size_and_group(head_dim, group):
    number = HEAD_DIMS.index(head_dim) + GROUPS.index(group)
    windows, dtype = (KITTY, RECENT)[number % 2], (F16, BF16)[number // 2 % 2]
    check(Spec(head_dim, 2, 2, head_dim // 8), windows, [1, 700, 2000], group, dtype)


@pytest.mark.parametrize(
    ("spec", "windows", "dtype"),
    [
        (Spec(32, 2, 2, 0), KITTY, BF16),
        (Spec(32, 2, 2, 1), RECENT, F16),
        (Spec(64, 2, 2, 21), NO_SINK, F16),
        (Spec(32, 2, 2, 32), KITTY, F16),
        (Spec(80, 2, 2, 80), RECENT, BF16),
        (Spec(32, 2, 4, 0), RECENT, F16),
        (Spec(80, 2, 4, 40), KITTY, BF16),
        (Spec(32, 4, 4, 32), NO_SINK, F16),
        (Spec(96, 4, 4, 96), KITTY, BF16),
        (Spec(32, 4, 2, 32), RECENT, F16),
        (Spec(32, 16, 16, 0), KITTY, F16),
        (Spec(80, 16, 16, 0), RECENT, BF16),
        (Spec(64, 16, 16, 0), Windows(0, 0, 0), F16),
    ],
    ids=str,
)
def test_every_width_of_codes(spec, windows, dtype):
    check(spec, windows, some_lens(windows), group=3, dtype=dtype)


@pytest.mark.parametrize(
    ("windows", "dtype"),
    [
        (NO_SINK, BF16),
        (Windows(0, 0, 0), BF16),
        (Windows(32, 64, 64), F16),
        (Windows(16, 16, 144), F16),
        (Windows(130, 0, 0), BF16),
    ],
    ids=str,
)
def test_other_windows(windows, dtype):
    check(Spec(64, 2, 2, 8), windows, some_lens(windows), dtype=dtype)


@pytest.mark.parametrize(
    ("spec", "windows", "dtype", "softcap", "learned_sinks"),
    [
        (Spec(64, 2, 2, 8), KITTY, F16, 1.5, False),
        (Spec(64, 2, 2, 8), RECENT, BF16, None, True),
        (Spec(32, 4, 4, 32), KITTY, BF16, 0.7, True),
        (Spec(32, 16, 16, 0), KITTY, F16, 20.0, True),
        (Spec(32, 2, 4, 0), RECENT, F16, 20.0, False),
    ],
    ids=str,
)
def test_softcap_and_learned_sinks(spec, windows, dtype, softcap, learned_sinks):
    check(spec, windows, [1, *some_lens(windows)], dtype=dtype, softcap=softcap, learned_sinks=learned_sinks)


@pytest.mark.parametrize("learned", [-60.0, 60.0])
def test_learned_sinks_far_from_all_logits(learned):
    """One that takes next to nothing, one that leaves next to nothing."""
    state, batch = poisoned_case(Spec(32, 2, 2, 4), RECENT, [200], BF16, seed=0)
    query = make_query(state, 1, 1, seed=0)
    softmax = SoftmaxSpec(0.2, sink_logits=torch.full((2,), learned, dtype=BF16))
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("spec", [Spec(32, 2, 2, 4), Spec(32, 16, 16, 0)], ids=str)
@pytest.mark.parametrize("windows", [KITTY, RECENT], ids=str)
def test_around_packing_thresholds(windows, spec, first):
    threshold = windows.sink_len + windows.k_recent_len + 128 * first
    check(spec, windows, [threshold + offset for offset in (-1, 0, 1, 2)])


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=str)
def test_around_the_edges_of_sink_and_tiles(windows):
    check(Spec(32, 2, 2, 4), windows, [max(1, windows.sink_len + offset) for offset in (-1, 0, 1, 15, 16, 17, 128)])


@pytest.mark.parametrize("spec", [Spec(32, 2, 2, 4), Spec(32, 16, 16, 0)], ids=str)
def test_no_pages_and_no_columns_for_them(spec):
    state, batch = poisoned_case(spec, KITTY, [1, 40, 3], F16, seed=0)
    state, batch = replace(state, pages=state.pages[:0]), replace(batch, page_table=batch.page_table[:, :0])
    query = make_query(state, 3, 2, seed=0)
    softmax = make_softmax(query)
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))


@pytest.mark.parametrize("programs", [1, 8, 42])
@pytest.mark.parametrize("spec", [Spec(32, 2, 2, 4), Spec(32, 16, 16, 0)], ids=str)
def test_rows_of_very_different_lengths_on_cards_of_any_size(spec, programs, monkeypatch):
    """From a program per sequence to one per unit of work."""
    monkeypatch.setattr(kernel, "_programs", lambda device: programs)
    check(spec, KITTY, [1, 600, 7, 140, 33], seed=programs)


def test_one_sequence_in_more_splits_than_are_combined_at_once(monkeypatch):
    monkeypatch.setattr(kernel, "_programs", lambda device: 42)
    check(Spec(32, 2, 2, 4), Windows(32, 300, 300), [331], learned_sinks=True)


@pytest.mark.parametrize("spec", [Spec(32, 2, 2, 4), Spec(32, 16, 16, 0)], ids=str)
def test_scattered_slots_and_pages(spec):
    state, batch = poisoned_case(spec, KITTY, [300, 5, 170], BF16, seed=3)
    query = make_query(state, 3, 2, seed=0)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    compare(query, *spread(state, batch, torch.tensor([4, 9, 2]), first_page=5), softmax, expected)


def test_a_query_with_any_strides():
    """As it comes out of a projection that keeps heads apart from sequences."""
    state, batch = poisoned_case(Spec(32, 2, 2, 4), KITTY, [30, 5, 170], F16, seed=0)
    query = make_query(state, 3, 2, seed=0)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    query = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    compare(query, state, batch, softmax, expected)


@pytest.mark.parametrize("spec", [Spec(64, 2, 2, 8), Spec(64, 16, 16, 0)], ids=str)
def test_attention_on_few_tokens(spec):
    """Logits far apart, up to some 30."""
    state, batch = poisoned_case(spec, KITTY, [300, 150], F16, seed=0)
    query = make_query(state, 2, 2, seed=0, size=8.0)
    softmax = make_softmax(query)
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("k_bits", "v_bits", "num_boosted"), [(2, 2, 16), (2, 2, 0), (2, 4, 32), (4, 4, 128), (16, 16, 0)]
)
@pytest.mark.parametrize("windows", [Windows(32, 0, 128), Windows(32, 64, 64)], ids=str)
def test_long_sequences(windows, k_bits, v_bits, num_boosted, dtype):
    run_long(PageLayout(8, 128, k_bits, v_bits, num_boosted, dtype), windows, [32_000, 1, 9_000, 161, 4_097], group=4)


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 33, 300])
def test_many_sequences(num_seqs):
    lens = [1 + (i * 7919) % 3000 for i in range(num_seqs)]
    run_long(PageLayout(4, 64, 2, 2, 8, F16), RECENT, lens, group=3)


def run_long(layout, windows, lens, group):
    """Random tokens everywhere, the reference on the device too."""
    pages = sum(windows.packed_pages(n)[0] for n in lens) + 1
    state = random_state(layout, windows, len(lens) + 2, pages, seed=0, device=DEVICE)
    batch = random_batch(windows, [n - 1 for n in lens], [1] * len(lens), len(lens) + 2, pages, seed=0)
    batch = copy_to(DEVICE, batch)
    query = make_query(state, len(lens), group, seed=0).to(DEVICE)
    softmax = make_softmax(query)
    rows = [torch.tensor([i], device=DEVICE) for i in range(len(lens))]  # one by one: float64 pages are large
    parts = [replace(with_tensors(batch, lambda x, i=i: x[i]), max_new_pages=0) for i in rows]
    expected = torch.cat([expected_of(query[i], state, part, softmax) for i, part in zip(rows, parts, strict=True)])
    compare(query, state, batch, softmax, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [Spec(128, 2, 2, 16), Spec(128, 16, 16, 0)], ids=str)
def test_pages_beyond_two_gib(spec):
    needs_gpu_memory(8)
    state, batch = poisoned_case(spec, KITTY, [700, 150], F16, seed=0)
    query = make_query(state, 2, 4, seed=0)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    first_page = 2**31 // state.layout.page_bytes + 1
    compare(query, *spread(copy_to(DEVICE, state), batch, batch.slots, first_page), softmax, expected)


@pytest.mark.gpu
def test_slots_beyond_two_billion_numbers():
    needs_gpu_memory(24)
    state, batch = poisoned_case(Spec(256, 2, 2, 32), NO_SINK, [150, 300], F16, seed=0)
    query = make_query(state, 2, 4, seed=0)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    slots = 2**31 // state.k_ring[0].numel() + torch.tensor([3, 1])
    compare(query, *spread(copy_to(DEVICE, state), batch, slots, first_page=0), softmax, expected)


@pytest.mark.gpu
def test_a_captured_launch_serves_other_lengths():
    lens, later = [130, 300, 5], [700, 40, 290]
    state, batch = (copy_to(DEVICE, x) for x in poisoned_case(Spec(64, 2, 2, 8), KITTY, later, F16, seed=0))
    query = make_query(state, 3, 3, seed=0).to(DEVICE)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    batch.seq_lens.copy_(torch.tensor(lens))
    kernel.decode_attention(query, state, batch, softmax)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.decode_attention(query, state, batch, softmax)
    batch.seq_lens.copy_(torch.tensor(later))
    graph.replay()
    assert_close(out, expected)


def test_covers_every_head_size_and_group():
    marks = {m.name: m for m in test_every_head_size_and_group.pytestmark}
    cases = marks["parametrize"].args[1]
    assert {case[0] for case in cases} == set(HEAD_DIMS)
    assert {case[1] for case in cases} == set(GROUPS)
    assert set(itertools.product((KITTY, RECENT), (F16, BF16))) == {case[2:] for case in cases}
