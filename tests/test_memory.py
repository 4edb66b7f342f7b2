"""Bytes from the config alone are the bytes of a real cache; sizes as people write them; the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny_models import logits_in_chunks, random_ids, tiny_config, tiny_model

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import PRESETS, preset
from kitty_runtime.errors import ConfigError
from kitty_runtime.memory import GIB, mean_sequence_cost, page_bits, parse_bytes, plan_memory, sequence_bytes
from kitty_runtime.models.geometry import geometry_of, layers_of
from kitty_runtime.profiles import BoostProfile, LayerProfile, Provenance


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def profile_of(kls) -> BoostProfile:
    generator = torch.Generator().manual_seed(0)
    provenance = Provenance("m", "", "c", "w", "query", "d", "t", 1, 1, 0, "kitty profile")
    layers = {
        index: LayerProfile(torch.rand(2, 32, generator=generator), torch.rand(2, 32, generator=generator), kl)
        for index, kl in kls.items()
    }
    return BoostProfile(layers, (0.0, 0.5), provenance)


def check_bytes(model, config, length, profile=None):
    cache = KittyCache(model.config, config, profile)
    logits_in_chunks(model, random_ids(length), cache, 512)
    used = cache.used_bytes()
    expected = sequence_bytes(layers_of(model.config), config, length, profile, dtype=torch.float32)
    assert (used.pages, used.sinks, used.rings, used.statistics) == (
        expected.pages,
        expected.sinks,
        expected.rings,
        expected.statistics,
    )
    return expected


@pytest.mark.parametrize("length", [1, 160, 500])
@pytest.mark.parametrize("name", PRESETS)
def test_formula_is_the_real_cache(model, name, length):
    found = check_bytes(model, preset(name), length)
    assert found.dense == 2 * 2 * length * 2 * 32 * 2
    assert found.kept_layers == 0
    assert found.total == found.pages + found.sinks + found.rings + found.statistics


def test_formula_with_budgets_and_a_skipped_layer(model):
    uneven = profile_of({0: (1.0, 0.1), 1: (1e-6, 1e-7)})
    budgets = uneven.budgets(0.25)
    assert budgets[0] > budgets[1]
    check_bytes(model, replace(preset("weighted"), boost_ratio=0.25), 500, uneven)
    skipped = check_bytes(model, preset("weighted"), 500, profile_of({1: (1.0, 0.1)}))
    assert skipped.kept_layers == 2 * 500 * 2 * 32 * 4


def test_sliding_layers_stop_at_their_window():
    layers = layers_of(tiny_config("gemma2"))
    for length, visible in ((20, 20), (48, 48), (500, 48)):
        assert sequence_bytes(layers, preset("kitty"), length).kept_layers == 2 * visible * 2 * 32 * 2


@pytest.mark.parametrize("name", PRESETS)
def test_mean_cost_averages_a_page_of_phases(name):
    layers, config = layers_of(tiny_config()), preset(name)
    found = mean_sequence_cost(layers, config, 1000)
    each = [sequence_bytes(layers, config, length) for length in range(936, 1064)]
    assert found.bytes_per_token == pytest.approx(sum(b.total for b in each) / 128 / 999.5)
    assert found.dense_bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert found.effective_bits == pytest.approx(16 * sum(b.total for b in each) / sum(b.dense for b in each))


def test_the_phase_does_not_matter():
    """Every token more costs the same: a 128th of a page."""
    layers, config = layers_of(tiny_config()), preset("kitty")
    page = sequence_bytes(layers, config, 1128).total - sequence_bytes(layers, config, 1000).total
    lengths = range(1000, 1130, 13)
    totals = [mean_sequence_cost(layers, config, n).bytes_per_token * (n - 0.5) for n in lengths]
    assert all(b - a == pytest.approx(13 * page / 128) for a, b in pairwise(totals))


def test_page_bits():
    layers = layers_of(tiny_config())
    assert page_bits(layers, preset("16")) == 16.0
    # 2 bits; scales and zero points of 32 key channels and 128 values; for four channels 2 bits more and their ids
    plain = 2 + 8 * (4 * 32 + 4 * 128) / (2 * 128 * 32)
    assert page_bits(layers, preset("kivi-2-g128")) == plain
    assert page_bits(layers, preset("kitty")) == plain + 8 * (4 * 32 + 16) / (2 * 128 * 32)
    uneven = profile_of({1: (1.0, 0.1)})
    assert page_bits(layers, preset("weighted"), uneven) == plain + 8 * (4 * 32 + 16) / (2 * 128 * 32)
    assert page_bits(layers_of(tiny_config("gemma2")), preset("kivi-2-g128")) == plain


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("1.5g", 1_500_000_000),
        ("512m", 512 * 10**6),
        ("2TiB", 2 * 2**40),
        ("1000000", 1000000),
        ("1000 b", 1000),
        (" 7KB ", 7000),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "80G B", "eighty", "80GBB", "-1", "0", "nan", "inf", "9e18GB", "1,5GB"])
def test_not_sizes(text):
    with pytest.raises(ConfigError, match="is not a size of memory"):
        parse_bytes(text)


def test_plan_grows_with_the_memory():
    geometry = geometry_of(tiny_config(max_position_embeddings=2**20))
    plans = [plan_memory(geometry, preset("kitty"), int(1.06 * GIB) + n * 2**20) for n in range(0, 200, 8)]
    for name in ("kv_bytes", "num_tokens", "longest_context", "largest_batch", "dense_batch"):
        values = [getattr(plan, name) for plan in plans]
        assert values == sorted(values), name
        assert values[0] < values[-1], name


def test_plan_adds_up():
    geometry = geometry_of(tiny_config(max_position_embeddings=2**20))
    for config in PRESETS.values():
        plan = plan_memory(geometry, config, 3 * GIB)
        assert plan.weights_bytes == 2 * sum(p.numel() for p in tiny_model().parameters())
        assert plan.memory_bytes == plan.weights_bytes + plan.runtime_bytes + plan.kv_bytes
        assert sequence_bytes(geometry.layers, config, plan.longest_context).total <= plan.kv_bytes
        longer = sequence_bytes(geometry.layers, config, plan.longest_context + 128).total
        assert longer > plan.kv_bytes or plan.longest_context == 2**20
        one = sequence_bytes(geometry.layers, config, plan.batch_seq_len)
        assert plan.largest_batch * one.total <= plan.kv_bytes < (plan.largest_batch + 1) * one.total
        assert plan.dense_batch * one.dense <= plan.kv_bytes < (plan.dense_batch + 1) * one.dense


def test_nothing_left_for_the_cache():
    plan = plan_memory(geometry_of(tiny_config()), preset("kitty"), GIB)
    assert (plan.kv_bytes, plan.num_tokens, plan.longest_context, plan.largest_batch) == (0, 0, 0, 0)
