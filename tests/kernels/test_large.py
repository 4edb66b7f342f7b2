"""Large shapes, on a GPU: long and many sequences, memory beyond 32-bit offsets, launches inside captured graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_case import assert_close, check, compare, expected_of, make_query, make_softmax
from kernel_case import (
    BF16,
    DEVICE,
    F16,
    GROUPS,
    HEAD_DIMS,
    KITTY,
    NO_SINK,
    RECENT,
    copy_to,
    label,
    needs_gpu_memory,
    poisoned_case,
    random_batch,
    random_state,
    random_tokens,
    same,
    spread,
    with_tensors,
)
from page_format import Spec

from kitty_runtime.config import Windows
from kitty_runtime.ops.decode_attention import triton as decode
from kitty_runtime.ops.quantize_page import reference as quantize_reference
from kitty_runtime.ops.quantize_page import triton as quantize
from kitty_runtime.ops.store_tokens import reference as store_reference
from kitty_runtime.ops.store_tokens import triton as store
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

WIDTHS = [(2, 2, 16), (2, 2, 0), (2, 4, 32), (4, 4, 128), (16, 16, 0)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_pair_of_head_size_and_group(head_dim, group):
    number = HEAD_DIMS.index(head_dim) + GROUPS.index(group)
    windows, dtype = (KITTY, RECENT)[number % 2], (F16, BF16)[number // 2 % 2]
    check(Spec(head_dim, 2, 2, head_dim // 8), windows, [1, 700, 2000], group, dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=label)
@pytest.mark.parametrize(("k_bits", "v_bits", "num_boosted"), WIDTHS)
@pytest.mark.parametrize("windows", [Windows(32, 0, 128), Windows(32, 64, 64)], ids=label)
def test_long_sequences(windows, k_bits, v_bits, num_boosted, dtype):
    layout = PageLayout(8, 128, k_bits, v_bits, num_boosted, dtype)
    decode_random(layout, windows, [32_000, 1, 9_000, 161, 4_097], group=4)


@pytest.mark.parametrize("num_seqs", [1, 33, 300])
def test_many_sequences(num_seqs):
    decode_random(PageLayout(4, 64, 2, 2, 8, F16), RECENT, [1 + i * 7919 % 3000 for i in range(num_seqs)], group=3)


def decode_random(layout, windows, lens, group):
    """Random tokens everywhere; the reference runs on the GPU too, sequence by sequence, since it needs much memory."""
    num_pages = sum(windows.packed_pages(n)[0] for n in lens) + 1
    state = random_state(layout, windows, len(lens) + 2, num_pages, seed=0, device=DEVICE)
    batch = random_batch(windows, [n - 1 for n in lens], [1] * len(lens), len(lens) + 2, num_pages, seed=0)
    batch = copy_to(DEVICE, batch)
    query = make_query(state, len(lens), group).to(DEVICE)
    softmax = make_softmax(query)
    expected = []
    for row, length in enumerate(lens):
        alone = with_tensors(batch, lambda x, row=row: x[row : row + 1])
        alone = replace(alone, page_table=alone.page_table[:, : windows.packed_pages(length)[0]])
        expected.append(expected_of(query[row : row + 1], state, alone, softmax))
    compare(query, state, batch, softmax, torch.cat(expected))


@pytest.mark.parametrize("policy", ["dynamic", "weighted"])
@pytest.mark.parametrize(("k_bits", "v_bits", "num_boosted"), WIDTHS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=label)
def test_long_prompts_are_stored_and_quantized_as_by_the_reference(dtype, k_bits, v_bits, num_boosted, policy):
    layout, windows = PageLayout(4, 128, k_bits, v_bits, num_boosted, dtype), Windows(32, 64, 64)
    state = random_state(layout, windows, 6, 80, seed=0)
    batch = random_batch(windows, [0, 300, 77, 0], [3000, 2000, 1, 1300], 6, 80, seed=0)
    keys, values = random_tokens(layout, batch, seed=0)
    energy = torch.linspace(0.5, 2, 4 * 128).view(4, 128) if policy == "weighted" else None
    boost = LayerBoost(policy, num_boosted, query_energy=energy)
    expected, got, on_device = copy_to("cpu", state), copy_to(DEVICE, state), copy_to(DEVICE, batch)
    quantize_reference.quantize_pages(expected, batch, keys, values, boost, None)
    store_reference.store_tokens(expected, batch, keys, values)
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    quantize.quantize_pages(got, on_device, keys, values, copy_to(DEVICE, boost), None)
    store.store_tokens(got, on_device, keys, values)
    assert same(expected, got) == []


@pytest.mark.parametrize("spec", [Spec(128, 2, 2, 16), Spec(128, 16, 16, 0)], ids=label)
def test_attention_on_pages_beyond_two_gib(spec):
    needs_gpu_memory(8)
    state, batch = poisoned_case(spec, KITTY, [700, 150], F16, seed=0)
    query = make_query(state, 2, 4)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    first_page = 2**31 // state.layout.page_bytes + 1
    compare(query, *spread(copy_to(DEVICE, state), batch, batch.slots, first_page), softmax, expected)


def test_attention_on_slots_beyond_two_billion_numbers():
    needs_gpu_memory(50)
    state, batch = poisoned_case(Spec(256, 2, 2, 32), Windows(0, 0, 0), [150, 300], F16, seed=0)
    query = make_query(state, 2, 4)
    softmax = make_softmax(query)
    expected = expected_of(query, state, batch, softmax)
    slots = 2**31 // state.k_ring[0].numel() + torch.tensor([3, 1])
    compare(query, *spread(copy_to(DEVICE, state), batch, slots, first_page=0), softmax, expected)


def test_tokens_and_pages_beyond_32_bit_offsets():
    needs_gpu_memory(30)
    layout = PageLayout(2, 256, 2, 2, 32, F16)
    state = random_state(layout, NO_SINK, 2, 8, seed=0)
    batch = random_batch(NO_SINK, [70, 0], [300, 150], 2, 8, seed=0)
    keys, values = random_tokens(layout, batch, seed=0)
    boost = LayerBoost("dynamic", 32)
    slots = 2**31 // state.k_ring[0].numel() + torch.tensor([3, 1])
    first_page = 2**31 // layout.page_bytes + 1
    far, far_batch = spread(copy_to(DEVICE, state), batch, slots, first_page)
    quantize_reference.quantize_pages(state, batch, keys, values, boost, None)
    store_reference.store_tokens(state, batch, keys, values)
    keys, values, far_batch = keys.to(DEVICE), values.to(DEVICE), copy_to(DEVICE, far_batch)
    quantize.quantize_pages(far, far_batch, keys, values, boost, None)
    store.store_tokens(far, far_batch, keys, values)
    assert torch.equal(far.pages[first_page:].cpu(), state.pages)
    assert bool((far.pages[:first_page] == 0xFF).all())
    for name in ("k_ring", "v_ring"):
        assert torch.equal(getattr(far, name)[slots.to(DEVICE)].cpu(), getattr(state, name)[batch.slots])


def test_captured_launches_serve_other_lengths():
    """A decode step, captured where nothing is packed and replayed where two sequences complete pages."""
    layout, boost, last = PageLayout(2, 64, 2, 2, 8, F16), LayerBoost("dynamic", 8), [270, 40, 654]
    state = random_state(layout, RECENT, 3, 12, seed=0)
    batch = replace(random_batch(RECENT, [n - 1 for n in last], [1] * 3, 3, 12, seed=0), max_new_pages=1)
    keys, values = random_tokens(layout, batch, seed=0)
    query = make_query(state, 3, 3)
    softmax = make_softmax(query)
    expected = copy_to("cpu", state)
    store_reference.store_tokens(expected, batch, keys, values)
    expected_out = expected_of(query, expected, batch, softmax)
    quantize_reference.quantize_pages(expected, batch, None, None, boost, None)
    assert same(expected, state) == ["pages", "k_ring", "v_ring"]

    got, query, keys, values = copy_to(DEVICE, state), *(x.to(DEVICE) for x in (query, keys, values))
    on_device = copy_to(DEVICE, batch)

    def step():
        store.store_tokens(got, on_device, keys, values)
        out = decode.decode_attention(query, got, on_device, softmax)
        quantize.quantize_pages(got, on_device, None, None, boost, None)
        return out

    on_device.seq_lens.copy_(torch.tensor([130, 20, 3]))
    on_device.past_lens.copy_(on_device.seq_lens - 1)
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for mine, first in zip(got.tensors, state.tensors, strict=True):
        mine.copy_(first)
    on_device.past_lens.copy_(batch.past_lens)
    on_device.seq_lens.copy_(batch.seq_lens)
    graph.replay()
    assert_close(out, expected_out)
    assert same(expected, got) == []
