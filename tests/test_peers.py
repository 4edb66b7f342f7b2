"""Other engines' formats: each rule against plain loops, and KIVI's residuals against its decode loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import logits_in_chunks, random_ids, tiny_config, tiny_model
from transformers import DynamicCache

from kitty_runtime.errors import UnsupportedModelError
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.peers import (
    PEERS,
    ResidualLayer,
    check_peer,
    peer_bytes,
    peer_cache,
    round_affine_keys,
    round_affine_values,
    round_fp8,
    round_q4_0,
)

KIVI = PEERS["kivi-2-g32"]


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


# --- the rules -----------------------------------------------------------------------------------------------------


def at_two_bits(group: np.ndarray) -> np.ndarray:
    """Min-max over one group, scale and zero point in fp16."""
    zero = np.float32(np.float16(group.min()))
    scale = np.float32(np.float16((group.max() - group.min()) / np.float32(3)))
    codes = np.clip(np.rint((group - zero) * (np.float32(1) / scale)), 0, 3)
    return codes * scale + zero


def test_kivi_keys_share_a_scale_over_32_tokens():
    keys = random_tokens(2, 64, 5)
    found = round_affine_keys(keys)
    for head in range(2):
        for start in (0, 32):
            for channel in range(5):
                expected = at_two_bits(keys[head, start : start + 32, channel].numpy())
                assert np.array_equal(found[head, start : start + 32, channel].numpy(), expected)


def test_kivi_values_share_a_scale_over_32_channels():
    values = random_tokens(3, 64)
    found = round_affine_values(values)
    for token in range(3):
        for start in (0, 32):
            expected = at_two_bits(values[token, start : start + 32].numpy())
            assert np.array_equal(found[token, start : start + 32].numpy(), expected)


def e4m3_numbers() -> list[float]:
    """Every finite value: 4 exponent bits of bias 7, 3 mantissa bits; exponent 15 with mantissa 7 is NaN."""
    found = {m / 8 * 2.0**-6 for m in range(8)}
    found |= {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
    return sorted(found | {-x for x in found})


def test_fp8_is_the_nearest_e4m3_number():
    grid = e4m3_numbers()
    assert grid[-1] == 448.0
    x = torch.cat([random_tokens(500), random_tokens(500) * 1e-3, torch.tensor([0.0, 448.0, -448.0])])
    for value, found in zip(x.tolist(), round_fp8(x).tolist(), strict=True):
        assert found in grid
        assert abs(found - value) == min(abs(number - value) for number in grid)
    assert round_fp8(torch.tensor([1e4, -1e4])).tolist() == [448.0, -448.0]


def test_q4_0_is_ggml_s_block():
    x = random_tokens(4, 64, seed=1)
    x[1, :32] = 0
    found = round_q4_0(x)
    for token in range(4):
        for start in (0, 32):
            block = [np.float32(v) for v in x[token, start : start + 32].tolist()]
            farthest = max(block, key=abs)
            d = farthest / np.float32(-8)
            inverse = np.float32(1) / d if d else np.float32(0)
            codes = [min(15, int(v * inverse + np.float32(8.5))) for v in block]
            expected = [(code - 8) * float(np.float16(d)) for code in codes]
            assert found[token, start : start + 32].tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS.keys())
def test_rules_keep_dtype_and_shape(peer):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = random_tokens(1, 2, 128, 64).to(dtype)
        for rounded in (peer.round_keys(x), peer.round_values(x)):
            assert (rounded.dtype, rounded.shape) == (dtype, x.shape)
            assert bool(rounded.isfinite().all())
            assert not torch.equal(rounded, x)


# --- what a query reads --------------------------------------------------------------------------------------------


def kivi_decode(query, keys, values, scale):
    """Token by token as KIVI's own loop: append, attend, then quantize 128 gathered keys at once and the value that
    falls out of the newest 128."""
    num_q_heads, seq_len, _ = query.shape
    group = num_q_heads // keys.shape[0]
    k_read, v_read = keys.clone(), values.clone()
    out = torch.empty_like(query)
    k_waiting, v_waiting = [], []
    for t in range(seq_len):
        k_waiting.append(t)
        v_waiting.append(t)
        for head in range(num_q_heads):
            logits = k_read[head // group, : t + 1] @ query[head, t] * scale
            out[head, t] = logits.softmax(0) @ v_read[head // group, : t + 1]
        if len(k_waiting) == 128:
            k_read[:, k_waiting] = round_affine_keys(keys[:, k_waiting])
            k_waiting = []
        if len(v_waiting) > 128:
            oldest = v_waiting.pop(0)
            v_read[:, oldest] = round_affine_values(values[:, oldest])
    return out


@pytest.mark.parametrize("chunks", [[400], [1, 127, 1, 130, 141], [256, 144]])
def test_kivi_reads_what_its_decode_loop_reads(chunks):
    query, keys, values = (random_tokens(h, 400, 32, seed=h).double() / 3 for h in (4, 2, 3))
    values = values[:2]
    expected = kivi_decode(query, keys, values, 0.3)
    layer = ResidualLayer(tiny_config(), KIVI)
    found = []
    for q, k, v in zip(*(x.split(chunks, dim=1) for x in (query, keys, values)), strict=True):
        found.append(layer.attend_to(q[None], k[None], v[None], None, SoftmaxSpec(0.3)))
        layer._length += k.shape[1]
    assert float((torch.cat(found, 2)[0] - expected).abs().max()) <= 1e-9


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_chunks_do_not_matter(name, family):
    model, ids = tiny_model(family, dtype=torch.float64), random_ids(300)
    once = logits_in_chunks(model, ids, peer_cache(model.config, PEERS[name]), 300)
    chunked = logits_in_chunks(model, ids, peer_cache(model.config, PEERS[name]), [5, 123, 90, 82])
    assert float((once - chunked).abs().max()) <= 1e-9


def test_nothing_is_rounded_before_a_residual_has_gathered():
    model, ids = tiny_model(dtype=torch.float64), random_ids(140)
    plain = logits_in_chunks(model, ids, DynamicCache(config=model.config), 140)
    change = {
        name: (logits_in_chunks(model, ids, peer_cache(model.config, PEERS[name]), 140) - plain).abs().amax(1)
        for name in ("kivi-2-g32", "fp8")
    }
    assert float(change["kivi-2-g32"][:128].max()) <= 1e-9
    assert float(change["kivi-2-g32"][128:].min()) > 1e-3
    assert float(change["fp8"].min()) > 1e-3


# --- bytes and fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [1, 127, 128, 129, 1000])
def test_bytes(seq_len):
    layers = layers_of(tiny_config())
    vector, num_layers = 2 * 32, 2
    for name, bits in (("fp8", 8), ("q4_0", 4.5)):
        found = peer_bytes(layers, PEERS[name], seq_len)
        assert found.total == num_layers * 2 * seq_len * vector * bits / 8
        assert found.dense == num_layers * 2 * seq_len * vector * 2
    k_rounded, v_rounded = seq_len // 128 * 128, max(0, seq_len - 128)
    found = peer_bytes(layers, KIVI, seq_len)
    assert found.pages == num_layers * (k_rounded + v_rounded) * vector * 3 / 8
    assert found.rings == num_layers * (2 * seq_len - k_rounded - v_rounded) * vector * 2
    assert math.isclose(found.total, found.pages + found.rings)


def test_native_layers_cost_16_bits():
    layers = layers_of(tiny_config("gemma2"))
    assert peer_bytes(layers, PEERS["fp8"], 500).kept_layers == 2 * 48 * 2 * 32 * 2


@pytest.mark.parametrize("name", ["q4_0", "kivi-2-g32"])
def test_heads_that_do_not_divide_are_refused(name):
    config = tiny_config(head_dim=80)
    with pytest.raises(UnsupportedModelError, match=f"{name} groups 32 channels, heads of layer 0 have 80"):
        check_peer(PEERS[name], layers_of(config))
    with pytest.raises(UnsupportedModelError):
        peer_cache(config, PEERS[name])
    check_peer(PEERS["fp8"], layers_of(config))
