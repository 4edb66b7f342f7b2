"""The decode kernel equals the reference, for every shape and setting, with poison wherever nothing may be read."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from decode_case import check, compare, expected_of, make_query, make_softmax
from kernel_case import (
    BF16,
    F16,
    GROUPS,
    HEAD_DIMS,
    KITTY,
    NO_SINK,
    RECENT,
    label,
    poisoned_case,
    random_batch,
    random_state,
    spread,
)
from page_format import Spec

from kitty_runtime.config import Windows
from kitty_runtime.ops.decode_attention import triton as kernel
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.quant.packing import PageLayout

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL, DENSE = Spec(32, 2, 2, 4), Spec(32, 16, 16, 0)


def with_pages(windows: Windows) -> int:
    """A length with a page of values, and with the paper's windows one more whose keys alone are packed."""
    return windows.sink_len + windows.v_recent_len + 128 + 3


@pytest.mark.parametrize(
    ("head_dim", "group", "windows", "dtype"),
    [
        (32, 1, KITTY, F16),
        (32, 16, RECENT, F16),
        (64, 3, RECENT, BF16),
        (64, 8, KITTY, BF16),
        (80, 5, KITTY, F16),
        (96, 7, RECENT, F16),
        (128, 4, KITTY, BF16),
        (256, 2, RECENT, F16),
    ],
    ids=label,
)
def test_every_head_size_and_group(head_dim, group, windows, dtype):
    check(Spec(head_dim, 2, 2, head_dim // 8), windows, [with_pages(windows)], group, dtype)


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
    ids=label,
)
def test_every_width_of_codes(spec, windows, dtype):
    check(spec, windows, [with_pages(windows)], group=1, dtype=dtype)


@pytest.mark.parametrize(
    ("windows", "dtype"),
    [
        (Windows(0, 0, 0), BF16),
        (Windows(32, 64, 64), F16),
        (Windows(16, 16, 144), F16),
        (Windows(130, 0, 0), BF16),
    ],
    ids=label,
)
def test_other_windows(windows, dtype):
    check(Spec(64, 2, 2, 8), windows, [with_pages(windows)], group=1, dtype=dtype)


@pytest.mark.parametrize(
    ("spec", "windows", "dtype", "softcap", "learned_sinks"),
    [
        (Spec(64, 2, 2, 8), KITTY, F16, 1.5, False),
        (Spec(64, 2, 2, 8), RECENT, BF16, None, True),
        (Spec(32, 4, 4, 32), KITTY, BF16, 0.7, True),
        (Spec(32, 16, 16, 0), KITTY, F16, 20.0, True),
    ],
    ids=label,
)
def test_softcap_and_learned_sinks(spec, windows, dtype, softcap, learned_sinks):
    check(spec, windows, [with_pages(windows)], dtype=dtype, softcap=softcap, learned_sinks=learned_sinks)


@pytest.mark.parametrize("learned", [-60.0, 60.0])
def test_learned_sinks_far_from_all_logits(learned):
    """One that takes next to nothing, one that leaves next to nothing."""
    state, batch = poisoned_case(SMALL, RECENT, [20], BF16, seed=0)
    query = make_query(state, 1, 1)
    softmax = SoftmaxSpec(0.2, sink_logits=torch.full((2,), learned, dtype=BF16))
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))


@pytest.mark.parametrize(
    ("spec", "windows", "page"),
    [(SMALL, KITTY, 1), (SMALL, KITTY, 2), (SMALL, RECENT, 1), (DENSE, KITTY, 1)],
    ids=label,
)
def test_around_packing_thresholds(spec, windows, page):
    """The last token that reads a page unpacked, and the first that reads it packed."""
    threshold = windows.sink_len + windows.k_recent_len + 128 * page
    check(spec, windows, [threshold, threshold + 1])


@pytest.mark.parametrize("spec", [SMALL, DENSE], ids=label)
def test_around_the_edges_of_sink_and_tiles(spec):
    check(spec, RECENT, [RECENT.sink_len + offset for offset in (-1, 0, 1, 16, 17)])


@pytest.mark.parametrize("spec", [SMALL, DENSE], ids=label)
def test_one_token_and_nothing_else(spec):
    check(spec, NO_SINK, [1])


@pytest.mark.parametrize("spec", [SMALL, DENSE], ids=label)
def test_no_pages_and_no_columns_for_them(spec):
    state, batch = poisoned_case(spec, KITTY, [3, 40], F16, seed=0)
    state, batch = replace(state, pages=state.pages[:0]), replace(batch, page_table=batch.page_table[:, :0])
    query = make_query(state, 2, 2)
    softmax = make_softmax(query)
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))


@pytest.mark.parametrize(
    ("spec", "programs", "lens"),
    [(SMALL, 1, [1, 420, 33]), (SMALL, 20, [1, 420, 7, 33]), (DENSE, 20, [2, 180, 20])],
    ids=label,
)
def test_rows_of_very_different_lengths_on_cards_of_any_size(spec, programs, lens, monkeypatch):
    """From one program per sequence to one per unit of work."""
    monkeypatch.setattr(kernel, "_warps", lambda device: programs)
    check(spec, KITTY, lens)


def test_one_sequence_in_more_splits_than_are_combined_at_once(monkeypatch):
    """One in some 18 splits next to one in one."""
    monkeypatch.setattr(kernel, "_warps", lambda device: 36)
    check(SMALL, Windows(32, 300, 300), [300, 1], group=1, learned_sinks=True)


@pytest.mark.parametrize("spec", [SMALL, DENSE], ids=label)
def test_scattered_slots_and_pages(spec):
    state, batch = poisoned_case(spec, KITTY, [5, 140], BF16, seed=3)
    query = make_query(state, 2, 2)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    compare(query, *spread(state, batch, torch.tensor([6, 3]), first_page=5), softmax, expected)


def test_a_query_with_any_strides():
    """Such as a view of ``[num_q_heads, num_seqs, head_dim]``."""
    state, batch = poisoned_case(SMALL, KITTY, [9, 20], F16, seed=0)
    query = make_query(state, 2, 2)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    query = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    compare(query, state, batch, softmax, expected)


def test_attention_on_few_tokens():
    """Logits far apart, up to some 30."""
    check(Spec(64, 2, 2, 8), KITTY, [with_pages(KITTY)], group=1, size=8.0)


def test_outlier_channels():
    """Four boosted channels from 50 to 70, the others from -1 to 1: zero points far larger than what they add to."""
    layout, windows = PageLayout(2, 128, 2, 2, 16, F16), Windows(0, 0, 0)
    state = random_state(layout, windows, num_slots=1, num_pages=3, seed=0)
    field = layout.fields(state.pages)
    ids = field.boosted_channels[..., None, :4].long()
    field.k_qparams.scale.fill_(0.5).scatter_(-1, ids, 20 / 15)
    field.k_qparams.zero_point.fill_(-1).scatter_(-1, ids, 50)
    batch = random_batch(windows, [270], [1], num_slots=1, num_pages=3, seed=0)
    query = make_query(state, 1, 1)
    softmax = make_softmax(query)
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))


def test_covers_every_head_size_and_group():
    marks = {mark.name: mark.args for mark in test_every_head_size_and_group.pytestmark}
    cases = marks["parametrize"][1]
    assert {case[0] for case in cases} == set(HEAD_DIMS)
    assert {case[1] for case in cases} == set(GROUPS)
    assert {case[2:] for case in cases} == set(itertools.product((KITTY, RECENT), (F16, BF16)))
