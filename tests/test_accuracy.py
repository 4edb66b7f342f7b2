"""Token by token against the unquantized cache: lockstep and chunks give what whole windows at once would."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import logits_in_chunks, random_ids, tiny_model
from transformers import DynamicCache

from kitty_runtime.accuracy import Method, measure_divergence, measure_tokens, packed_fraction, packed_fraction_of
from kitty_runtime.accuracy_stats import statistics_of
from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import CacheConfig, preset
from kitty_runtime.errors import DataError, NumericsError
from kitty_runtime.peers import PEERS, peer_cache

FIRST = 200
LENGTHS = (700, 530)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float64)


@pytest.fixture(scope="module")
def windows():
    return [random_ids(length, seed=length) for length in LENGTHS]


METHODS = {"kitty": Method(preset("kitty")), "16": Method(preset("16")), "fp8": PEERS["fp8"]}


@pytest.fixture(scope="module")
def found(model, windows):
    return measure_tokens(model, windows, METHODS, FIRST)


def cache_of(model, method):
    if isinstance(method, Method):
        return KittyCache(model.config, method.config)
    return peer_cache(model.config, method)


@pytest.mark.parametrize("name", METHODS)
def test_equals_whole_windows(model, windows, found, name):
    for window, values in zip(windows, found[name], strict=True):
        reference = logits_in_chunks(model, window, DynamicCache(config=model.config), len(window)).log_softmax(-1)
        method = logits_in_chunks(model, window, cache_of(model, METHODS[name]), len(window)).log_softmax(-1)
        kl = (reference.exp() * (reference - method)).sum(-1)[FIRST:]
        assert values.kl.shape == (len(window) - FIRST,)
        assert float((values.kl - kl).abs().max()) <= 1e-5
        assert torch.equal(values.same_top1, (reference.argmax(-1) == method.argmax(-1))[FIRST:])
        for log_probs, nll in ((reference, values.reference_nll), (method, values.nll)):
            expected = [-log_probs[t, window[t + 1]].item() for t in range(FIRST, len(window) - 1)]
            assert nll.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_noise_floor_is_rounding_alone(found):
    assert all(0 <= float(values.kl.max()) <= 1e-6 and bool(values.same_top1.all()) for values in found["16"])
    assert all(float(values.kl.mean()) > 1e-3 for values in found["kitty"])


def test_repeats_to_the_bit(model, windows, found):
    again = measure_tokens(model, windows, METHODS, FIRST)
    for name, values in found.items():
        for one, other in zip(values, again[name], strict=True):
            assert torch.equal(one.kl, other.kl)
            assert torch.equal(one.nll, other.nll)


def test_divergence_is_the_same_measurement(model, windows, found):
    methods = {"kitty": METHODS["kitty"]}
    divergence = measure_divergence(model, windows, methods, FIRST)["kitty"]
    stats = statistics_of(found["kitty"], FIRST)
    assert (divergence.kl, divergence.ppl, divergence.same_top1) == (stats.kl_mean, stats.ppl, stats.same_top1)
    assert divergence.reference_ppl == pytest.approx(stats.ppl / stats.ppl_ratio)
    assert divergence.num_scored == sum(LENGTHS) - 2 * FIRST


def test_progress_ends_at_its_total(model, windows):
    calls = []
    measure_tokens(model, windows[:1], METHODS, FIRST, lambda *call: calls.append(call))
    assert {(what, total) for what, _, total in calls} == {("tokens", 4 * 700)}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == 2800


def test_methods_of_the_first_window_only(model, windows, found):
    calls = []
    fewer = measure_tokens(model, windows, METHODS, FIRST, lambda *call: calls.append(call), ("16",))
    assert [len(values) for values in fewer.values()] == [2, 1, 2]
    assert all(
        torch.equal(one.kl, other.kl) for name in METHODS for one, other in zip(fewer[name], found[name], strict=False)
    )
    assert calls[-1] == ("tokens", 4 * 700 + 3 * 530, 4 * 700 + 3 * 530)


def test_short_windows_are_refused(model):
    with pytest.raises(DataError, match="A window has 201 tokens, scoring starts at 200"):
        measure_tokens(model, [random_ids(201)], METHODS, FIRST)
    with pytest.raises(DataError, match="A window has 0 tokens"):
        measure_tokens(model, [], METHODS, FIRST)


def test_infinite_divergence_is_an_error(windows):
    broken = tiny_model()
    broken.lm_head.weight.data[5] = math.inf
    with pytest.raises(NumericsError, match="The KL divergence of kitty is nan"):
        measure_tokens(broken, windows[:1], {"kitty": METHODS["kitty"]}, FIRST)


def test_packed_fraction():
    config = CacheConfig(sink_len=0, k_recent_len=0, v_recent_len=128, policy="dynamic")
    expected = (256 / 383 + 256 / 384 + 384 / 385) / 3
    assert packed_fraction(config, [385], 382) == pytest.approx(expected)
    assert packed_fraction_of(Method(config), [385], 382) == pytest.approx(expected)
    assert packed_fraction(config, [100], 50) == 0.0
    assert packed_fraction(preset("16"), [4096]) == 0.0
    assert packed_fraction_of(PEERS["fp8"], [600]) == 1.0
    assert packed_fraction_of(PEERS["kivi-2-g32"], [386]) == pytest.approx((384 / 385 + 384 / 386) / 2)
