"""One call of the decode kernel, held against the float64 reference on the same bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
from kernel_case import BF16, DEVICE, F16, UNPACKED, copy_to, poisoned_case, same, with_tensors
from page_format import Spec
from torch import Tensor

from kitty_runtime.config import Windows
from kitty_runtime.ops.decode_attention import reference
from kitty_runtime.ops.decode_attention import triton as kernel
from kitty_runtime.ops.operands import Batch, LayerState, SoftmaxSpec

TOLERANCE = {F16: 2e-3, BF16: 1e-2}
"""Norm of the error over the norm of the result."""


def make_query(state: LayerState, num_seqs: int, group: int, size: float = 1.0) -> Tensor:
    layout = state.layout
    shape = (num_seqs, layout.num_kv_heads * group, layout.head_dim)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(group)) * size).to(layout.dtype)


def make_softmax(query: Tensor, softcap: float | None = None, learned_sinks: bool = False) -> SoftmaxSpec:
    """The usual scale; learned sinks in the model's dtype, from -2 to 4."""
    sinks = torch.linspace(-2, 4, query.shape[1]).to(query) if learned_sinks else None
    return SoftmaxSpec(query.shape[-1] ** -0.5, softcap, sinks)


def expected_of(query: Tensor, state: LayerState, batch: Batch, softmax: SoftmaxSpec) -> Tensor:
    exact = with_tensors(state, lambda x: x.double(), UNPACKED)
    return reference.decode_attention(query.double(), exact, batch, softmax)


def assert_close(out: Tensor, expected: Tensor) -> None:
    error = float((out.double() - expected.to(out.device)).norm() / expected.norm())
    assert error <= TOLERANCE[out.dtype]  # False for NaN


def compare(query: Tensor, state: LayerState, batch: Batch, softmax: SoftmaxSpec, expected: Tensor) -> None:
    """The kernel on the device, wherever the operands lie; it changes none of them."""
    state, batch = copy_to(DEVICE, state), copy_to(DEVICE, batch)
    if softmax.sink_logits is not None:
        softmax = replace(softmax, sink_logits=softmax.sink_logits.to(DEVICE))
    before = copy_to(DEVICE, state)
    out = kernel.decode_attention(query.to(DEVICE), state, batch, softmax)
    assert out.dtype == query.dtype
    assert out.shape == query.shape
    assert_close(out, expected)
    assert same(before, state) == []


def check(
    spec: Spec,
    windows: Windows,
    lens: list[int],
    group: int = 2,
    dtype: torch.dtype = F16,
    *,
    size: float = 1.0,
    softcap: float | None = None,
    learned_sinks: bool = False,
) -> None:
    """Poisoned sequences of `lens` tokens."""
    state, batch = poisoned_case(spec, windows, lens, dtype, seed=sum(lens) + group)
    query = make_query(state, len(lens), group, size)
    softmax = make_softmax(query, softcap, learned_sinks)
    compare(query, state, batch, softmax, expected_of(query, state, batch, softmax))
