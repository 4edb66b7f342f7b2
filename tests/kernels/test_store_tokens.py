"""The store kernel leaves sinks and rings as the reference does, to the bit."""

from __future__ import annotations

import pytest
import torch
from kernel_case import (
    BF16,
    DEVICE,
    F16,
    KITTY,
    NO_SINK,
    RECENT,
    copy_to,
    label,
    random_batch,
    random_state,
    random_tokens,
    same,
)

from kitty_runtime.config import Windows
from kitty_runtime.ops.store_tokens import reference
from kitty_runtime.ops.store_tokens import triton as kernel
from kitty_runtime.quant.packing import PageLayout


def check(windows, past, new, head_dim=32, dtype=F16):
    """Sequences of `past` tokens get `new` ones; what pads the shorter of them is NaN."""
    layout = PageLayout(2, head_dim, 2, 2, 4, dtype)
    num_slots = len(past) + 2
    state = random_state(layout, windows, num_slots, num_pages=16, seed=0)
    batch = random_batch(windows, past, new, num_slots, num_pages=16, seed=sum(past))
    keys, values = random_tokens(layout, batch, seed=1)
    expected, got = copy_to("cpu", state), copy_to(DEVICE, state)
    reference.store_tokens(expected, batch, keys, values, None)
    on_device = (x.to(DEVICE) for x in (keys, values))  # strides stay
    kernel.store_tokens(got, copy_to(DEVICE, batch), *on_device, None)
    assert same(expected, got) == []
    assert bool(same(expected, state)) == any(new)
    assert all(bool(getattr(expected, name).isfinite().all()) for name in ("k_sink", "v_sink", "k_ring", "v_ring"))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=label)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_every_head_size(head_dim, dtype):
    check(RECENT, [2, 100], [20, 7], head_dim, dtype)


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK, Windows(0, 0, 0), Windows(20, 0, 0)], ids=label)
def test_a_pass_longer_than_the_rings(windows):
    """Of the tokens that share a slot only the newest may be written."""
    check(windows, [50], [290])


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=label)
def test_around_the_edge_of_the_sink(windows):
    edge = windows.sink_len
    check(windows, [max(0, edge - 2), max(0, edge - 1), edge, edge + 1], [2, 2, 2, 2])
    check(windows, [0, 0, 0], [max(1, edge - 1), max(1, edge), edge + 1])


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=label)
def test_one_token_in_each_sequence(windows):
    """Decode, around the edges of the sink and where the rings wrap."""
    ring = windows.sink_len + 128
    check(windows, [0, max(0, windows.sink_len - 1), windows.sink_len, ring - 1, ring, ring + 137, 999], [1] * 7)


def test_sequences_that_get_nothing():
    check(KITTY, [0, 70, 4], [0, 17, 0])
    check(KITTY, [0, 70, 4, 5], [1, 0, 0, 1])
    check(KITTY, [10, 200], [0, 0])


def test_passes_around_the_size_of_a_block():
    check(RECENT, [0, 3, 133], [15, 16, 17])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=label)
@pytest.mark.parametrize(("head_dim", "group"), [(32, 1), (80, 3), (128, 4), (64, 7)])
def test_queries_add_to_the_running_energy(head_dim, group, dtype):
    layout = PageLayout(2, head_dim, 2, 2, 4, dtype)
    state = random_state(layout, RECENT, num_slots=5, num_pages=4, seed=0, running_energy=True)
    batch = random_batch(RECENT, [0, 9, 200], [1] * 3, num_slots=5, num_pages=4, seed=1)
    keys, values = random_tokens(layout, batch, seed=2)
    query = torch.randn(3, 1, 2 * group, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype).transpose(1, 2)
    expected, got = copy_to("cpu", state), copy_to(DEVICE, state)
    reference.store_tokens(expected, batch, keys, values, query)
    kernel.store_tokens(got, copy_to(DEVICE, batch), *(x.to(DEVICE) for x in (keys, values, query)))
    assert same(expected, got) == []
    torch.testing.assert_close(got.query_sq_sum.cpu(), expected.query_sq_sum, rtol=1e-6, atol=0)
    changed = (expected.query_sq_sum != state.query_sq_sum).any(-1).any(-1)
    assert changed.nonzero().flatten().tolist() == sorted(batch.slots.tolist())
