"""Teacher-forced logits are what token-by-token decode gives, at about the price of a prefill."""

from __future__ import annotations

import time

import pytest
import torch
from tiny_models import logits_in_chunks, random_ids, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import PRESETS, CacheConfig, preset
from kitty_runtime.emulation import forward_in_chunks, teacher_forced_logits
from kitty_runtime.models.demo import demo_model_dir
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.profiles import BoostProfile, LayerProfile, Provenance

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(float64_model):
    return float64_model


def decode(model, ids, config, profile=None):
    """The real thing: every token its own pass, from the first on."""
    return logits_in_chunks(model, ids, KittyCache(model.config, config, profile), 1)


def check_same(found, expected):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", PRESETS)
def test_equals_decode(model, long_ids, decoded, name):
    expected, _ = decoded(name)
    ids = long_ids[: len(expected)]
    found = torch.cat(list(teacher_forced_logits(model, ids, preset(name), chunk_size=150)))
    check_same(found, expected)
    exact = torch.cat(list(teacher_forced_logits(model, ids, preset("16"))))
    assert (float((found - exact).abs().max()) > 20 * TOLERANCE) == (name != "16")


def profile_of(model):
    generator = torch.Generator().manual_seed(4)
    layers = {
        layer.index: LayerProfile(
            torch.rand(layer.num_kv_heads, layer.head_dim, generator=generator),
            torch.rand(layer.num_kv_heads, layer.head_dim, generator=generator),
            (0.1 / (layer.index + 1), 0.05, 0.01),
        )
        for layer in layers_of(model.config)
    }
    unknown = dict.fromkeys(("model", "model_revision", "config_sha256", "weights_sha256", "metric", "data"), "")
    provenance = Provenance(**unknown, token_sha256="", num_tokens=1, kl_tokens=1, seed=0, command="")
    return BoostProfile(layers, (0.0, 0.125, 0.5), provenance)


@pytest.mark.parametrize("policy", ["weighted", "static"])
def test_equals_decode_with_a_profile(model, policy):
    ids, config, profile = random_ids(230), CacheConfig(policy=policy, boost_ratio=0.25), profile_of(model)
    found = torch.cat(list(teacher_forced_logits(model, ids, config, profile)))
    check_same(found, decode(model, ids, config, profile))
    other = torch.cat(list(teacher_forced_logits(model, ids, CacheConfig(policy="dynamic", boost_ratio=0.25))))
    assert float((found - other).abs().max()) > TOLERANCE


def test_prefill_full_is_ignored(model):
    ids = random_ids(300)
    paged, full = (CacheConfig(policy="dynamic", prefill=prefill) for prefill in ("paged", "full"))
    found, expected = (torch.cat(list(teacher_forced_logits(model, ids, c, chunk_size=100))) for c in (full, paged))
    assert torch.equal(found, expected)


def test_without_settings_it_is_the_plain_model(model):
    ids = random_ids(300)
    chunks = list(teacher_forced_logits(model, ids, None, chunk_size=128))
    assert [len(chunk) for chunk in chunks] == [128, 128, 44]
    model.set_attn_implementation("sdpa")
    expected = logits_in_chunks(model, ids, DynamicCache(config=model.config), 300)
    model.set_attn_implementation("kitty")
    assert float((torch.cat(chunks) - expected).abs().max()) <= 1e-9


@pytest.mark.parametrize("first_scored", [1, 127, 128, 200, 299])
def test_unscored_positions_have_no_logits(model, first_scored):
    ids = random_ids(300)
    whole = torch.cat(list(teacher_forced_logits(model, ids, preset("kitty"), chunk_size=128)))
    chunks = list(teacher_forced_logits(model, ids, preset("kitty"), chunk_size=128, first_scored=first_scored))
    assert len(chunks) == 3
    assert float((torch.cat(chunks) - whole[first_scored:]).abs().max()) <= 1e-9


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_equals_decode_beside_native_layers(family):
    """Sliding layers stay native: their windows must move along with the chunks."""
    model, ids = tiny_model(family, dtype=torch.float64), random_ids(170)
    found = torch.cat(list(teacher_forced_logits(model, ids, preset("kitty"), chunk_size=70)))
    check_same(found, decode(model, ids, preset("kitty")))


@pytest.fixture(scope="module")
def demo_ids():
    """Real text would need the tokenizer; what matters here are real keys and queries."""
    return torch.randint(100, 20000, (2048,), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kitty", "weighted"])
@torch.no_grad()
def test_equals_decode_on_the_demo_model(name, demo_ids):
    """600 tokens; those before the first page is packed are read at once, which test_identity shows to be the same."""
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_dir(), dtype=torch.float64, attn_implementation="kitty"
    ).eval()
    ids, config = demo_ids[:600], preset(name)
    found = torch.cat(list(teacher_forced_logits(model, ids, config, chunk_size=256)))
    unpacked = config.windows.longest(0)
    hidden, cache = [], KittyCache(model.config, config)
    for chunk in ids.split([unpacked] + [1] * (600 - unpacked)):  # all logits at once: a fifth of the work
        hidden.append(model.model(input_ids=chunk[None], use_cache=True, **{cache_kwarg(model.model): cache})[0][0])
    check_same(found, model.lm_head(torch.cat(hidden)))


@pytest.mark.slow
def test_costs_at_most_1_6_plain_forwards(demo_ids):
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_dir(), dtype=torch.float32, attn_implementation="kitty"
    ).eval()

    def cpu_seconds(attention, make_cache):
        model.set_attn_implementation(attention)
        start = time.process_time()
        num_tokens = sum(len(chunk) for chunk in forward_in_chunks(model, demo_ids, make_cache()))
        assert num_tokens == 2048
        return time.process_time() - start

    def plain():
        return cpu_seconds("sdpa", lambda: DynamicCache(config=model.config))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain()  # warm
        seconds = {name: [] for name in ("plain", "kitty", "weighted")}
        for _ in range(2):
            seconds["plain"].append(plain())
            for name in ("kitty", "weighted"):
                seconds[name].append(cpu_seconds("kitty", lambda name=name: KittyCache(model.config, preset(name))))
    finally:
        torch.set_num_threads(threads)
    best = {name: min(times) for name, times in seconds.items()}
    assert best["kitty"] <= 1.6 * best["plain"], best
    assert best["weighted"] <= 1.6 * best["plain"], best
