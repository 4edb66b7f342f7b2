"""The kernel for many new tokens against the float64 reference: small shapes under the interpreter, larger on a GPU."""

from __future__ import annotations

import pytest
import torch
from decode_case import assert_close, make_softmax
from kernel_case import (
    BF16,
    DEVICE,
    F16,
    GROUPS,
    HEAD_DIMS,
    KITTY,
    NO_SINK,
    RECENT,
    UNPACKED,
    copy_to,
    label,
    poisoned_case,
    random_tokens,
    same,
    with_tensors,
)
from page_format import Spec

from kitty_runtime.ops.extend_attention import reference
from kitty_runtime.ops.extend_attention import triton as kernel

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(spec, windows, past, new, group=2, dtype=F16, softcap=None, learned_sinks=False, read_packed=True):
    state, batch = poisoned_case(spec, windows, past, dtype, seed=sum(past) + group, new=new)
    keys, values = random_tokens(state.layout, batch, seed=1)
    generator = torch.Generator().manual_seed(group)
    shape = (len(past), max(1, *new), state.layout.num_kv_heads * group, spec.head_dim)
    query = torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)  # as projections leave it
    softmax = make_softmax(query.transpose(1, 2)[0], softcap, learned_sinks)
    exact = with_tensors(state, lambda x: x.double(), UNPACKED)
    wide = (x.double() for x in (query, keys, values))
    expected = reference.extend_attention(*wide, exact, batch, softmax, read_packed)

    state, batch = copy_to(DEVICE, state), copy_to(DEVICE, batch)
    before = copy_to(DEVICE, state)
    softmax = make_softmax(query.to(DEVICE).transpose(1, 2)[0], softcap, learned_sinks)
    moved = (x.to(DEVICE) for x in (query, keys, values))
    out = kernel.extend_attention(*moved, state, batch, softmax, read_packed)
    assert out.dtype == dtype
    assert out.shape == query.shape
    for row, n in enumerate(new):
        assert (out[row, :, n:] == 0).all()
        if n:
            assert_close(out[row, :, :n], expected[row, :, :n])
    assert same(before, state) == []


@pytest.mark.parametrize("group", GROUPS)
def test_every_group(group):
    check(Spec(32, 2, 2, 4), (KITTY, RECENT)[group % 2], [200, 0], [70, 9], group)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=label)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size(head_dim, dtype):
    check(Spec(head_dim, 2, 2, head_dim // 8), KITTY, [300], [20], 2, dtype)


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=label)
@pytest.mark.parametrize(
    ("k_bits", "num_boosted", "v_bits"), [(2, 0, 2), (2, 5, 4), (4, 32, 4), (4, 32, 2), (16, 0, 16)]
)
def test_every_width_of_codes(windows, k_bits, num_boosted, v_bits):
    check(Spec(32, k_bits, v_bits, num_boosted), windows, [150], [130], 3)


@pytest.mark.parametrize("windows", [KITTY, RECENT, NO_SINK], ids=label)
@pytest.mark.parametrize("new", [1, 2, 131])
def test_odd_pasts(windows, new):
    check(Spec(32, 2, 2, 4), windows, [0, 1, 5, 6, 7, 133, 134, 135, 262], [new] * 9)


def test_rows_of_any_length_even_none():
    check(Spec(32, 2, 2, 4), KITTY, [400, 0, 7, 134, 1], [0, 300, 1, 128, 0])


def test_the_last_channel_is_not_boosted_by_padding():
    check(Spec(256, 2, 2, 3), KITTY, [140], [2])


@pytest.mark.parametrize(("softcap", "learned_sinks"), [(1.5, False), (None, True), (0.7, True)])
def test_softcap_and_learned_sinks(softcap, learned_sinks):
    check(Spec(32, 2, 2, 4), KITTY, [150], [40], 2, F16, softcap, learned_sinks)


def test_tensors_of_any_strides():
    spec = Spec(32, 2, 2, 4)
    state, batch = poisoned_case(spec, KITTY, [150], F16, seed=3, new=[40])
    tokens = (torch.randn(1, heads, 40, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    query, keys, values = (x.to(DEVICE, F16) for x in tokens)
    state, batch, softmax = copy_to(DEVICE, state), copy_to(DEVICE, batch), make_softmax(query[:, :, 0])
    out = kernel.extend_attention(query, keys, values, state, batch, softmax, True)
    strided = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, keys, values))
    assert torch.equal(out, kernel.extend_attention(*strided, state, batch, softmax, True))
    odd = (torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (query, keys, values))  # rows off any vector's boundary
    assert torch.equal(out, kernel.extend_attention(*odd, state, batch, softmax, True))


def test_a_first_pass_may_read_nothing_packed():
    check(Spec(32, 2, 2, 4), KITTY, [0, 200], [300, 10], read_packed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_pasts_and_prompts(head_dim, group):
    check(Spec(head_dim, 2, 2, head_dim // 8), RECENT, [700, 0, 129], [150, 900, 700], group)
