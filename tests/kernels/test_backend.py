"""Which backend runs where, and that every operation asks."""

from __future__ import annotations

import sys

import pytest
import torch
from decode_case import make_query, make_softmax
from kernel_case import BF16, DEVICE, F16, KITTY, copy_to, random_batch, random_state, random_tokens

from kitty_runtime.errors import ConfigError
from kitty_runtime.ops import backend
from kitty_runtime.ops.decode_attention.api import decode_attention
from kitty_runtime.ops.quantize_page.api import quantize_pages
from kitty_runtime.ops.store_tokens.api import store_tokens
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout


@pytest.fixture
def ask(monkeypatch):
    """Sets ``KITTY_BACKEND`` and ``TRITON_INTERPRET``; None leaves them out."""

    def set_both(asked, interpret=None):
        for name, value in ((backend.ENV, asked), ("TRITON_INTERPRET", interpret)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_both


@pytest.mark.parametrize("asked", [None, ""])
def test_unasked_kernels_run_for_16_bit_models_on_cuda_alone(ask, asked):
    ask(asked)
    assert [backend.backend_of("cuda", dtype) for dtype in (F16, BF16)] == ["triton", "triton"]
    assert [backend.backend_of("cuda", dtype) for dtype in (torch.float32, torch.float64)] == ["reference"] * 2
    assert [backend.backend_of(device, F16) for device in ("cpu", "mps")] == ["reference", "reference"]


def test_unasked_the_interpreter_is_not_used(ask):
    ask(None, interpret="1")
    assert backend.backend_of("cpu", F16) == "reference"


def test_the_reference_runs_anywhere_when_asked_for(ask):
    ask("reference")
    assert {backend.backend_of(device, dtype) for device in ("cuda", "cpu") for dtype in (F16, torch.float32)} == {
        "reference"
    }


def test_kernels_run_when_asked_for_on_cuda_and_in_the_interpreter(ask):
    ask("triton")
    assert backend.backend_of("cuda", BF16) == "triton"
    ask("triton", interpret="1")
    assert backend.backend_of("cpu", F16) == "triton"


@pytest.mark.parametrize("interpret", [None, "0"])
def test_kernels_asked_for_on_the_cpu_are_refused(ask, interpret):
    ask("triton", interpret)
    with pytest.raises(ConfigError, match="KITTY_BACKEND is triton, but the cache is on cpu"):
        backend.backend_of("cpu", F16)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kernels_asked_for_in_fp32_are_refused(ask, device):
    ask("triton", interpret="1")
    with pytest.raises(ConfigError, match="the model is in float32"):
        backend.backend_of(device, torch.float32)


def test_without_the_package_the_reference_runs_unless_kernels_are_asked_for(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._has_triton.cache_clear()
    try:
        ask(None)
        assert backend.backend_of("cuda", F16) == "reference"
        ask("triton")
        with pytest.raises(ConfigError, match="triton is not installed"):
            backend.backend_of("cuda", F16)
    finally:
        backend._has_triton.cache_clear()


@pytest.mark.parametrize("asked", ["cuda", "Triton", "0", " reference"])
def test_a_name_that_is_no_backend_is_refused_everywhere(ask, asked):
    ask(asked)
    for device in ("cuda", "cpu"):
        with pytest.raises(ConfigError, match="Use triton or reference"):
            backend.backend_of(device, F16)


@pytest.mark.parametrize("asked", ["triton", "reference"])
def test_every_operation_runs_what_is_asked_for(ask, asked, monkeypatch):
    layout = PageLayout(1, 32, 2, 2, 4, F16)
    state = random_state(layout, KITTY, 1, 1, seed=0, device=DEVICE)
    batch = copy_to(DEVICE, random_batch(KITTY, [2], [1], 1, 1, seed=0))
    tokens = [x.to(DEVICE) for x in random_tokens(layout, batch, seed=0)]
    query = make_query(state, 1, 1).to(DEVICE)
    ran = []
    for folder, name in (
        ("decode_attention", "decode_attention"),
        ("quantize_page", "quantize_pages"),
        ("store_tokens", "store_tokens"),
    ):
        for which in ("triton", "reference"):
            target = f"kitty_runtime.ops.{folder}.{which}.{name}"
            monkeypatch.setattr(target, lambda *args, what=(which, name): ran.append(what))
    ask(asked, interpret=None if DEVICE.type == "cuda" else "1")
    store_tokens(state, batch, *tokens)
    decode_attention(query, state, batch, make_softmax(query))
    quantize_pages(state, batch, None, None, LayerBoost("dynamic", 4))
    assert ran == [(asked, "store_tokens"), (asked, "decode_attention"), (asked, "quantize_pages")]
