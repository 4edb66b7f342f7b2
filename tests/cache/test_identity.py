"""What a query reads depends on its position alone: chunks, turns, batch and order change no answer (float64)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import left_padded, logits_in_chunks, packed_bytes, random_ids
from transformers import DynamicCache

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import preset
from kitty_runtime.errors import UnsupportedOperationError
from kitty_runtime.models.loading import cache_kwarg

TOLERANCE = 1e-3
PRESETS = ["kitty", "weighted", "tuned", "kivi-2-g128", "kv4"]
LENGTH = 1050


@pytest.fixture(scope="module")
def model(float64_model):
    return float64_model


@pytest.fixture(scope="module")
def one_pass(model):
    """Per preset: logits of one pass over LENGTH tokens, and its cache."""
    found = {}
    for name in PRESETS:
        cache = KittyCache(model.config, preset(name))
        found[name] = logits_in_chunks(model, random_ids(LENGTH), cache, LENGTH), cache
    return found


def check_same(found, expected):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_the_presets_differ(model, one_pass):
    """Guards this file: every preset reads packed pages and leaves its mark far above the tolerance."""
    model.set_attn_implementation("sdpa")
    exact = logits_in_chunks(model, random_ids(LENGTH), DynamicCache(config=model.config), LENGTH)
    model.set_attn_implementation("kitty")
    outs = [exact, *(logits for logits, _ in one_pass.values())]
    for i, a in enumerate(outs):
        for b in outs[:i]:
            assert float((a - b).abs().max()) > 20 * TOLERANCE


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("chunk_size", "length"), [(7, 425), (128, LENGTH), (1000, LENGTH)])
def test_chunk_sizes(model, one_pass, name, chunk_size, length):
    expected, reference = one_pass[name]
    cache = KittyCache(model.config, preset(name))
    found = logits_in_chunks(model, random_ids(LENGTH)[:length], cache, chunk_size)
    check_same(found, expected[:length])
    assert cache.paged.lens == [length]
    assert cache.config.packed_pages(length)[1] >= 2
    assert packed_bytes(cache, 0, length) == packed_bytes(reference, 0, length)
    cache.paged.check_integrity()


@pytest.mark.parametrize("name", PRESETS)
def test_chunks_of_one(one_pass, decoded, name):
    expected, reference = one_pass[name]
    found, cache = decoded(name)
    length = len(found)
    assert cache.paged.lens == [length]
    check_same(found, expected[:length])
    assert packed_bytes(cache, 0, length) == packed_bytes(reference, 0, length)


@pytest.mark.parametrize("name", PRESETS)
def test_three_turns(model, one_pass, name):
    """Prompt, answer token by token, the next prompt: as a chat goes."""
    expected, reference = one_pass[name]
    cache = KittyCache(model.config, preset(name))
    sizes = [155, *[1] * 12, 260, *[1] * 9, 333, *[1] * 6, LENGTH - 775]
    check_same(logits_in_chunks(model, random_ids(LENGTH), cache, sizes), expected)
    assert packed_bytes(cache, 0, LENGTH) == packed_bytes(reference, 0, LENGTH)


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_ragged_batch(model, name):
    """Left-padded rows of 5, 37 and 300 tokens, then 125 tokens of decode: each as if it were alone."""
    tails = random_ids(3, 125, seed=9)
    rows = [random_ids(n, seed=n) for n in (5, 37, 300)]
    inputs = left_padded(rows)
    together = KittyCache(model.config, preset(name))
    arguments = {cache_kwarg(model): together, "use_cache": True}
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = [model(input_ids=inputs["input_ids"], attention_mask=mask, position_ids=positions, **arguments).logits]
    for i in range(125):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], dim=1)
        position_ids = mask.sum(1, keepdim=True) - 1
        step = model(input_ids=tails[:, i : i + 1], attention_mask=mask, position_ids=position_ids, **arguments)
        logits.append(step.logits)
    found = torch.cat(logits, dim=1)
    assert together.paged.lens == [130, 162, 425]
    together.paged.check_integrity()
    for row, prompt in enumerate(rows):
        whole = torch.cat([prompt, tails[row]])
        alone = KittyCache(model.config, preset(name))
        expected = logits_in_chunks(model, whole, alone, len(whole))
        check_same(found[row, 300 - len(prompt) :], expected)
        pages = packed_bytes(together, row, len(whole))
        assert len(pages) >= (0, 0, 2)[row]
        assert pages == packed_bytes(alone, 0, len(whole))


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_a_padded_second_prompt(model, name):
    """Rows whose second turns differ in length: padding in the middle of the columns."""
    cache = KittyCache(model.config, preset(name))
    arguments = {cache_kwarg(model): cache, "use_cache": True}
    turns = [left_padded([random_ids(190, seed=1), random_ids(80, seed=2)])]
    turns.append(left_padded([random_ids(20, seed=3), random_ids(250, seed=4)]))
    masks = [turn["attention_mask"] for turn in turns]
    whole_mask = torch.cat(masks, dim=1)
    positions = (whole_mask.cumsum(1) - 1).clamp_min(0)
    logits = []
    for turn, columns in zip(turns, (slice(0, 190), slice(190, 440)), strict=True):
        seen = whole_mask[:, : columns.stop]
        logits.append(
            model(
                input_ids=turn["input_ids"], attention_mask=seen, position_ids=positions[:, columns], **arguments
            ).logits
        )
    found = torch.cat(logits, dim=1)
    for row, length in enumerate((210, 330)):
        real = whole_mask[row].bool()
        ids = torch.cat([turn["input_ids"][row] for turn in turns])[real]
        alone = KittyCache(model.config, preset(name))
        check_same(found[row, real], logits_in_chunks(model, ids, alone, 500))
        assert cache.paged.lens[row] == length
        assert packed_bytes(cache, row, length) == packed_bytes(alone, 0, length)


@pytest.mark.parametrize("name", PRESETS)
def test_an_unquantized_prefill_is_the_default_path_and_happens_once(model, one_pass, name):
    config, ids = replace(preset(name), prefill="full"), random_ids(LENGTH)
    cache = KittyCache(model.config, config)
    found = logits_in_chunks(model, ids[:500], cache, 500)
    model.set_attn_implementation("sdpa")
    exact = logits_in_chunks(model, ids[:500], DynamicCache(config=model.config), 500)
    model.set_attn_implementation("kitty")
    # A rotation changes last bits, and the model's norms compute in float32.
    assert float((found - exact).abs().max()) <= (1e-6 if config.v_hadamard else 1e-9)
    assert torch.equal(found.argmax(-1), exact.argmax(-1))
    with pytest.raises(UnsupportedOperationError, match="prefill"):
        logits_in_chunks(model, ids[500:510], cache, 10)
    # The first layer's keys do not depend on what attention read: its pages are those of any other route.
    first_layer = len(packed_bytes(cache, 0, 500)) // 2
    assert packed_bytes(cache, 0, 500)[:first_layer] == packed_bytes_of_prefix(one_pass[name][1], 500)
    decoded = logits_in_chunks(model, ids[500:505], cache, 1)
    model.set_attn_implementation("sdpa")
    plain = logits_in_chunks(model, ids[:505], DynamicCache(config=model.config), 505)[500:]
    model.set_attn_implementation("kitty")
    assert float((decoded - plain).abs().max()) > 20 * TOLERANCE  # decode does read the packed pages


def packed_bytes_of_prefix(cache, num_tokens):
    found = packed_bytes(cache, 0, num_tokens)
    return found[: len(found) // 2]
