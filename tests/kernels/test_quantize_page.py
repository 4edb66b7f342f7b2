"""The quantize kernel writes the reference's bytes, to the bit, and no others."""

from __future__ import annotations

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
    copy_to,
    label,
    random_batch,
    random_state,
    random_tokens,
    same,
    without_stale_slots,
)

from kitty_runtime.config import Windows
from kitty_runtime.ops.quantize_page import reference
from kitty_runtime.ops.quantize_page import triton as kernel
from kitty_runtime.quant.boost import LayerBoost, random_channels
from kitty_runtime.quant.packing import PageLayout

NUM_PAGES = 24


def make_boost(layout, policy, seed=0):
    """Also ``running``: weighted by the energy of the queries so far."""
    generator = torch.Generator().manual_seed(seed)
    shape, count = (layout.num_kv_heads, layout.head_dim), layout.num_boosted
    if policy == "weighted":
        return LayerBoost("weighted", count, query_energy=torch.rand(shape, generator=generator) + 0.1)
    if policy == "static":
        return LayerBoost("static", count, channels=random_channels(*shape, count, seed))
    return LayerBoost("dynamic" if policy == "dynamic" else "weighted", count)


def make_energy(boost, layout, batch):
    """Strides between rows and pages as in a slice of something larger."""
    if not boost.needs_running_energy:
        return None
    shape = (len(batch.slots) + 1, batch.max_new_pages + 2, layout.num_kv_heads, layout.head_dim)
    energy = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
    return energy[1:, 1:-1]


def compare(state, batch, keys, values, boost, energy=None, clip_search=False):
    """The reference on the CPU, the kernel on the device. Returns the indices of pages that changed."""
    expected, got = copy_to("cpu", state), copy_to(DEVICE, state)
    reference.quantize_pages(expected, batch, keys, values, boost, energy, clip_search)
    keys, values, energy = (None if x is None else x.to(DEVICE) for x in (keys, values, energy))
    kernel.quantize_pages(got, copy_to(DEVICE, batch), keys, values, copy_to(DEVICE, boost), energy, clip_search)
    assert same(expected, got) == []
    return (expected.pages != state.pages).any(1).nonzero().flatten().tolist()


def check(layout, windows, policy, past, new, from_rings=False, change=None, clip_search=False):
    """Sequences of `past` tokens get `new` ones; `change` is applied to all tokens first, in place."""
    num_slots = len(past) + 2
    sums = from_rings and policy == "running"
    state = random_state(layout, windows, num_slots, NUM_PAGES, seed=sum(past), running_energy=sums)
    batch = random_batch(windows, past, new, num_slots, NUM_PAGES, seed=sum(new))
    keys, values = random_tokens(layout, batch, seed=2)
    if change is not None:
        for tokens in (state.k_ring, state.v_ring, keys, values):
            change(tokens)
    state = without_stale_slots(state, batch, stored=batch.seq_lens if from_rings else batch.past_lens)
    boost = make_boost(layout, policy)
    energy = None if sums else make_energy(boost, layout, batch)
    if from_rings:
        keys, values = None, None
    changed = compare(state, batch, keys, values, boost, energy, clip_search)
    assert changed == sorted(pages_completed(windows, batch))


def pages_completed(windows, batch):
    found = set()
    for row, (past, total) in enumerate(zip(batch.past_lens.tolist(), batch.seq_lens.tolist(), strict=True)):
        for before, after in zip(windows.packed_pages(past), windows.packed_pages(total), strict=True):
            found |= set(batch.page_table[row, before:after].tolist())
    return found


@pytest.mark.parametrize(
    ("layout", "windows", "policy"),
    [
        (PageLayout(3, 64, 2, 2, 8, F16), KITTY, "dynamic"),
        (PageLayout(1, 128, 2, 2, 16, BF16), RECENT, "weighted"),
        (PageLayout(1, 80, 2, 2, 10, F16), NO_SINK, "running"),
        (PageLayout(1, 256, 2, 2, 32, BF16), KITTY, "static"),
        (PageLayout(1, 96, 2, 4, 21, BF16), RECENT, "dynamic"),
        (PageLayout(1, 32, 2, 4, 0, F16), KITTY, "dynamic"),
        (PageLayout(1, 32, 2, 2, 1, F16), RECENT, "weighted"),
        (PageLayout(1, 32, 2, 2, 31, BF16), RECENT, "running"),
        (PageLayout(1, 32, 2, 2, 32, BF16), KITTY, "weighted"),
        (PageLayout(1, 32, 4, 4, 32, F16), RECENT, "dynamic"),
        (PageLayout(1, 80, 4, 2, 80, BF16), NO_SINK, "dynamic"),
        (PageLayout(2, 32, 16, 16, 0, F16), KITTY, "dynamic"),
        (PageLayout(1, 80, 16, 16, 0, BF16), Windows(0, 0, 0), "dynamic"),
    ],
    ids=label,
)
@pytest.mark.parametrize("clip_search", [False, True])
def test_every_format_and_policy(layout, windows, policy, clip_search):
    """A page that begins in the ring, and one of keys that lies in the pass."""
    past = windows.sink_len + windows.v_recent_len + 40
    check(layout, windows, policy, [past], [220], clip_search=clip_search)


@pytest.mark.parametrize("policy", ["static", "running"])
def test_sequences_of_any_lengths(policy):
    """Nothing stored before, nothing new, no page complete, and pages of keys or values alone."""
    layout = PageLayout(1, 32, 2, 2, 4, F16)
    check(layout, KITTY, policy, [0, 5, 133, 260, 130], [390, 0, 1, 2, 3])


@pytest.mark.parametrize(
    ("windows", "policy"),
    [(KITTY, "dynamic"), (RECENT, "running"), (NO_SINK, "static"), (RECENT, "weighted")],
    ids=label,
)
def test_one_token_packs_where_it_reaches_a_threshold(windows, policy):
    """Decode: the new token is in the ring already. Of seven sequences two complete keys, and one or both values."""
    threshold = windows.sink_len + windows.k_recent_len + 128
    lens = [threshold - 1, threshold, threshold + 1, threshold + 127, threshold + 128, threshold + 129, 1]
    layout = PageLayout(1, 64, 2, 2, 8, BF16)
    check(layout, windows, policy, [n - 1 for n in lens], [1] * 7, from_rings=True)


@pytest.mark.parametrize("layout", [PageLayout(2, 32, 4, 4, 32, F16), PageLayout(2, 32, 16, 16, 0, BF16)], ids=label)
def test_one_token_packs_wide_codes_too(layout):
    check(layout, KITTY, "dynamic", [133, 261], [1, 1], from_rings=True)


@pytest.mark.parametrize("from_rings", [False, True])
def test_a_launch_with_nothing_to_pack_changes_nothing(from_rings):
    layout = PageLayout(2, 32, 2, 2, 4, F16)
    state = random_state(layout, KITTY, 4, NUM_PAGES, seed=0)
    batch = replace(random_batch(KITTY, [3, 134, 200], [1, 1, 1], 4, NUM_PAGES, seed=0), max_new_pages=2)
    new = (None, None) if from_rings else random_tokens(layout, batch, seed=0)
    assert compare(state, batch, *new, make_boost(layout, "dynamic")) == []


def test_more_pages_allowed_than_any_sequence_completes():
    layout = PageLayout(2, 32, 2, 2, 4, F16)
    state = random_state(layout, RECENT, 2, NUM_PAGES, seed=0)
    batch = replace(random_batch(RECENT, [20], [150], 2, NUM_PAGES, seed=0), max_new_pages=3)
    boost = make_boost(layout, "running")
    changed = compare(state, batch, *random_tokens(layout, batch, seed=0), boost, make_energy(boost, layout, batch))
    assert len(changed) == 1


def test_energy_may_be_wider_than_fp32():
    layout = PageLayout(1, 32, 2, 2, 4, F16)
    state = random_state(layout, RECENT, 2, NUM_PAGES, seed=0)
    batch = random_batch(RECENT, [20], [150], 2, NUM_PAGES, seed=0)
    boost = make_boost(layout, "running")
    energy = make_energy(boost, layout, batch).double()
    assert len(compare(state, batch, *random_tokens(layout, batch, seed=0), boost, energy)) == 1


def saturating(tokens):
    """In bf16 beyond what a page holds."""
    tokens.mul_(60_000).clamp_(-torch.finfo(tokens.dtype).max, torch.finfo(tokens.dtype).max)


def at_the_ends_of_fp16(tokens):
    """From the lowest to the largest: the scale must not round up."""
    tokens.copy_(torch.where(tokens > 0, 65504.0, -65504.0))


def constant(tokens):
    """Per channel for keys, per token for values, several of either."""
    for index, value in enumerate([0.0, 1.0, -3.25, 1e-6, 60_000.0]):
        tokens[..., index] = value
        tokens[:, :, index::7] = value


def tiny(tokens):
    """Ranges below the smallest scale, fp16 subnormals."""
    tokens.mul_(2e-6)


def halves(tokens):
    """Multiples of half a step, whether of 3 or of 15 to the range: rounding is to even."""
    tokens.mul_(2).round_().clamp_(-3, 3).add_(3).div_(2)
    tokens[..., ::2, 1::2] *= 5
    tokens[..., 1::2, 1::2] = tokens[..., 1::2, 1::2].mul(5).sub(0.5).clamp_min(0)


def alike(tokens):
    """Three values of magnitude and range: channels of equal scores, the lower ones win."""
    tokens.copy_(torch.where(tokens > 0, 1.0, -1.0))
    tokens[..., 1::3] *= 2
    tokens[..., 2::3] *= 3


@pytest.mark.parametrize("change", [saturating, at_the_ends_of_fp16, constant, tiny, halves, alike])
@pytest.mark.parametrize(
    ("layout", "policy"),
    [(PageLayout(1, 64, 2, 2, 8, BF16), "dynamic"), (PageLayout(1, 64, 2, 4, 30, F16), "weighted")],
    ids=label,
)
@pytest.mark.parametrize("clip_search", [False, True])
def test_unusual_numbers(change, layout, policy, clip_search):
    check(layout, RECENT, policy, [60], [100], change=change, clip_search=clip_search)


@pytest.mark.parametrize("policy", ["dynamic", "weighted", "running"])
def test_of_channels_that_score_the_same_the_lower_ones_are_boosted(policy):
    layout = PageLayout(1, 64, 2, 2, 8, F16)
    state = random_state(layout, RECENT, 1, 1, seed=0, device=DEVICE)
    batch = copy_to(DEVICE, random_batch(RECENT, [0], [150], 1, 1, seed=0))
    keys, values = (x.to(DEVICE) for x in random_tokens(layout, batch, seed=0))
    alike(keys)
    ones = torch.ones(1, 1, 1, 64, device=DEVICE)
    boost = LayerBoost(
        "dynamic" if policy == "dynamic" else "weighted", 8, ones[0, 0] if policy == "weighted" else None
    )
    kernel.quantize_pages(state, batch, keys, values, boost, ones if policy == "running" else None)
    assert layout.fields(state.pages).boosted_channels.flatten().tolist() == list(range(2, 26, 3))
