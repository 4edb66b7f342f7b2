"""KittyCache under transformers' own generate(): eleven families, beams, sampling, turns, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import FAMILIES, left_padded, logits_in_chunks, random_ids, tiny_model
from transformers import DynamicCache

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import CacheConfig, preset
from kitty_runtime.errors import ConfigError, UnsupportedOperationError
from kitty_runtime.models.loading import cache_kwarg

NEW_TOKENS = 8


def generate(model, inputs, cache=None, **changes):
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, **changes}
    if cache is not None:
        options[cache_kwarg(model)] = cache
    return model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)


def with_cache(model, inputs, config, **changes):
    cache = KittyCache(model.config, config)
    model.set_attn_implementation("kitty")
    return generate(model, inputs, cache, **changes), cache


def default_path(model, inputs, **changes):
    model.set_attn_implementation("eager")  # PyTorch's own has no softcap and no learned sinks
    return generate(model, inputs, **changes)


def check_equal(found, expected, tolerance=1e-4):
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert len(found.logits) == len(expected.logits) > 0
    for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert float((a - b).abs().max()) <= tolerance, step
    assert float(expected.logits[0].std()) > 0.1  # a flat model would hide errors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["16", "kitty"])
def test_equals_the_default_path(family, name):
    """At 16 bits with pages (150 tokens), at 2 bits with nothing packed yet."""
    model = tiny_model(family)
    first = 150 if name == "16" else 70
    inputs = left_padded([random_ids(first, seed=1), random_ids(21, seed=2)])
    found, cache = with_cache(model, inputs, preset(name))
    assert cache.paged.lens == [first + NEW_TOKENS - 1, 21 + NEW_TOKENS - 1]
    assert [len(table) for table in cache.paged.tables] == [1 if name == "16" else 0, 0]
    assert len(cache.paged.layers) == sum(type(layer).__name__ == "KittyLayer" for layer in cache.layers) > 0
    cache.paged.check_integrity()
    check_equal(found, default_path(model, inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_bits_do_change_the_logits(family):
    """Guards the test above: the same call with packed pages is seen in the logits."""
    model, inputs = tiny_model(family), {"input_ids": random_ids(1, 300)}
    found, cache = with_cache(model, inputs, preset("kitty"), max_new_tokens=2, min_new_tokens=2)
    assert cache.paged.config.packed_pages(301) == (2, 1)
    expected = default_path(model, inputs, max_new_tokens=2, min_new_tokens=2)
    assert float((found.logits[0] - expected.logits[0]).abs().max()) > 1e-3
    assert bool(torch.stack(found.logits).isfinite().all())


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 159, 160, 161])
def test_boundary_prompts(length):
    model, inputs = tiny_model(), {"input_ids": random_ids(1, length)}
    found, _ = with_cache(model, inputs, preset("16"))
    expected = default_path(model, inputs)
    check_equal(found, expected)
    if length + NEW_TOKENS < 160:
        check_equal(with_cache(model, inputs, preset("kitty"))[0], expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("name", ["16", "kitty"])
def test_three_beams(family, name):
    model = tiny_model(family)
    inputs = left_padded([random_ids(125 if name == "16" else 60, seed=3), random_ids(40, seed=4)])
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 14, "output_scores": True}
    found, cache = with_cache(model, inputs, preset(name), **options)
    expected = default_path(model, inputs, **options)
    check_equal(found, expected)
    assert float((found.sequences_scores - expected.sequences_scores).abs().max()) <= 1e-4
    assert len({tuple(row) for row in found.sequences[:3].tolist()}) == 3
    if family == "llama":  # the beams did part and reorder, so this test means something
        assert len(set(map(tuple, expected.beam_indices.tolist()))) > 2
    cache.paged.check_integrity()


def test_beams_share_pages():
    model, inputs = tiny_model(), {"input_ids": random_ids(1, 300)}
    options = {"num_beams": 3, "max_new_tokens": 6, "min_new_tokens": 6}
    _, cache = with_cache(model, inputs, preset("kitty"), **options)
    assert cache.paged.lens == [305] * 3
    assert cache.paged.pool.num_used < 6  # two pages each, some of them shared since the first reordering
    cache.paged.check_integrity()


def test_sampling_with_a_seed():
    model, inputs = tiny_model(), left_padded([random_ids(140, seed=5), random_ids(9, seed=6)])
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 20}
    torch.manual_seed(7)
    found, _ = with_cache(model, inputs, preset("16"), **options)
    torch.manual_seed(7)
    check_equal(found, default_path(model, inputs, **options))
    torch.manual_seed(8)
    other, _ = with_cache(model, inputs, preset("16"), **options)
    assert other.sequences.tolist() != found.sequences.tolist()


def test_assisted_decoding_is_refused_before_the_first_token():
    model, ids = tiny_model(), random_ids(1, 50)
    cache, calls = KittyCache(model.config, preset("kitty")), []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(UnsupportedOperationError) as error:
        generate(model, {"input_ids": ids}, cache, prompt_lookup_num_tokens=3)
    assert "prompt_lookup_num_tokens" in error.value.hint
    assert calls == []


def test_an_assistant_model_is_refused_before_the_first_token():
    model, assistant = tiny_model(), tiny_model(attention="eager", seed=1)
    cache, calls = KittyCache(model.config, preset("kitty")), []
    for each in (model, assistant):
        each.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(UnsupportedOperationError):
        generate(model, {"input_ids": random_ids(1, 50)}, cache, assistant_model=assistant)
    assert calls == []


def test_crop_is_refused():
    cache = KittyCache(tiny_model().config, preset("kitty"))
    with pytest.raises(UnsupportedOperationError, match="crop"):
        cache.crop(-1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_two_calls_leave_the_config_alone(family):
    model, inputs = tiny_model(family), {"input_ids": random_ids(1, 40)}
    before, generation = copy.deepcopy(model.config.to_dict()), model.generation_config.to_dict()
    implementation = model.config._attn_implementation
    outs = [with_cache(model, inputs, preset("weighted"))[0] for _ in range(2)]
    assert outs[0].sequences.tolist() == outs[1].sequences.tolist()
    assert model.config.to_dict() == before
    assert model.generation_config.to_dict() == generation
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_attention_is_refused_with_the_line_to_write(family, attention):
    model, ids = tiny_model(family, attention=attention), random_ids(1, 20)
    cache = KittyCache(model.config, preset("kitty"))
    with pytest.raises(ConfigError) as error:
        generate(model, {"input_ids": ids}, cache)
    assert repr(attention) in error.value.message
    assert 'set_attn_implementation("kitty")' in error.value.hint
    # and having written it, the same cache would be half filled where a native layer came first; a new one works
    found, _ = with_cache(model, {"input_ids": ids}, preset("kitty"))
    check_equal(found, default_path(model, {"input_ids": ids}))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_second_turn_on_the_same_cache(family):
    model = tiny_model(family)
    turns = [left_padded([random_ids(90, seed=1), random_ids(30, seed=2)])]
    more = random_ids(2, 40, seed=3)
    cache = KittyCache(model.config, preset("16"))
    first = generate(model, turns[0], cache)
    ids = torch.cat([first.sequences, more], dim=1)
    mask = torch.cat([turns[0]["attention_mask"], torch.ones(2, NEW_TOKENS + 40, dtype=torch.int64)], dim=1)
    second = generate(model, {"input_ids": ids, "attention_mask": mask}, cache)
    assert cache.paged.lens == [90 + 40 + 2 * NEW_TOKENS - 1, 30 + 40 + 2 * NEW_TOKENS - 1]
    assert [len(table) for table in cache.paged.tables] == [1, 0]
    check_equal(second, default_path(model, {"input_ids": ids, "attention_mask": mask}))


def test_right_padding_is_understood():
    model = tiny_model()
    rows = [random_ids(150, seed=1), random_ids(60, seed=2)]
    ids, mask = torch.zeros(2, 150, dtype=torch.int64), torch.zeros(2, 150, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    cache = KittyCache(model.config, preset("16"))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=True, **{cache_kwarg(model): cache}).logits
    assert cache.paged.lens == [150, 60]
    for row, tokens in enumerate(rows):
        alone = logits_in_chunks(model, tokens, KittyCache(model.config, preset("16")), 200)
        assert float((logits[row, : len(tokens)] - alone).abs().max()) <= 1e-4


def test_reset_forgets():
    model, ids = tiny_model(), random_ids(200)
    cache = KittyCache(model.config, preset("kitty"))
    first = logits_in_chunks(model, ids, cache, 130)
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(UnsupportedOperationError):
        _ = cache.paged
    assert torch.equal(logits_in_chunks(model, ids, cache, 130), first)


def test_a_copied_cache_goes_its_own_way():
    """The prefix-caching recipe of transformers' documentation: one prompt, copied per continuation."""
    model, prefix = tiny_model(dtype=torch.float64), random_ids(300)
    tails = [random_ids(60, seed=seed) for seed in (1, 2)]
    prompt_cache = KittyCache(model.config, preset("weighted"))
    logits_in_chunks(model, prefix, prompt_cache, 300)
    for tail in tails:
        mine = copy.deepcopy(prompt_cache)
        found = logits_in_chunks(model, tail, mine, 13)
        whole = logits_in_chunks(model, torch.cat([prefix, tail]), KittyCache(model.config, preset("weighted")), 400)
        assert float((found - whole[300:]).abs().max()) <= 1e-9
        assert mine.get_seq_length() == 360
    assert prompt_cache.get_seq_length() == 300
    assert prompt_cache.paged.lens == [300]


def test_batch_changes():
    model = tiny_model(dtype=torch.float64)
    ids, tail = random_ids(3, 200), random_ids(4, 60, seed=5)
    cache = KittyCache(model.config, preset("kitty"))
    arguments = {cache_kwarg(model): cache, "use_cache": True}
    with torch.no_grad():
        model(input_ids=ids, **arguments)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        found = model(input_ids=tail, **arguments).logits
    cache.paged.check_integrity()
    for row, source in enumerate([2, 2, 0, 0]):
        whole = torch.cat([ids[source], tail[row]])
        alone = logits_in_chunks(model, whole, KittyCache(model.config, preset("kitty")), 300)
        assert float((found[row] - alone[200:]).abs().max()) <= 1e-9


def test_another_batch_size_is_refused():
    model = tiny_model()
    cache = KittyCache(model.config, preset("kitty"))
    arguments = {cache_kwarg(model): cache, "use_cache": True}
    with torch.no_grad():
        model(input_ids=random_ids(2, 10), **arguments)
        with pytest.raises(UnsupportedOperationError, match="batch of 3"):
            model(input_ids=random_ids(3, 10), **arguments)


def test_after_a_refused_pass_the_cache_goes_on():
    """A refused pass takes nothing: the next token reads what it would have read."""
    config = CacheConfig(policy="dynamic", prefill="full")
    model, ids = tiny_model(dtype=torch.float64), random_ids(260)
    caches = [KittyCache(model.config, config) for _ in range(2)]
    for cache in caches:
        logits_in_chunks(model, ids[:250], cache, 250)
    with pytest.raises(UnsupportedOperationError, match="prefill"):
        logits_in_chunks(model, ids[:5], caches[0], 5)
    assert caches[0].get_seq_length() == 250
    found, expected = (logits_in_chunks(model, ids[250:], cache, 1) for cache in caches)
    assert torch.equal(found, expected)


def test_a_custom_additive_mask_is_refused():
    """Its zeros mean visible: read as booleans it would hide exactly what it shows."""
    model = tiny_model()
    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad(), pytest.raises(UnsupportedOperationError, match="mask"):
        model(
            input_ids=random_ids(1, 5),
            attention_mask=mask,
            use_cache=True,
            **{cache_kwarg(model): KittyCache(model.config, preset("kitty"))},
        )


def test_layers_given_as_none_stay_native():
    model, ids = tiny_model(dtype=torch.float64), random_ids(300)
    cache = KittyCache(model.config, preset("16"), boosts=[None, KittyCache(model.config, preset("16"))._boosts[1]])
    found = logits_in_chunks(model, ids, cache, 90)
    assert [layer.index for layer in cache.paged.layers] == [1]
    model.set_attn_implementation("sdpa")
    expected = logits_in_chunks(model, ids, DynamicCache(config=model.config), 90)
    assert float((found - expected).abs().max()) <= 1e-9


def test_no_graph_grows_and_no_mask_is_misread():
    model = tiny_model("llama")
    model.set_attn_implementation("kitty")
    arguments = {"use_cache": True}
    cache = KittyCache(model.config, preset("weighted"))
    ids = torch.randint(0, model.config.vocab_size, (1, 40))
    model(input_ids=ids, **arguments, **{cache_kwarg(model): cache})
    assert not any(t.requires_grad for layer in cache.paged.layers for t in layer.state.tensors)
    bidirectional = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with pytest.raises(UnsupportedOperationError, match="later ones"):
        model(
            input_ids=ids,
            attention_mask=bidirectional,
            **arguments,
            **{cache_kwarg(model): KittyCache(model.config, preset("weighted"))},
        )


def test_a_cache_made_in_inference_mode_works_outside():
    model = tiny_model("llama")
    ids = random_ids(1, 300)
    cache = KittyCache(model.config)
    with torch.inference_mode():
        model(input_ids=ids[:, :200], use_cache=True, **{cache_kwarg(model): cache})
    with torch.no_grad():
        rest = model(input_ids=ids[:, 200:], use_cache=True, **{cache_kwarg(model): cache}).logits
        whole = model(input_ids=ids, use_cache=True, **{cache_kwarg(model): KittyCache(model.config)}).logits
    assert (rest - whole[:, 200:]).abs().max() < 1e-4


@pytest.mark.parametrize("wrong", [{"cache_config": "kitty"}, {"profile": "profile.safetensors"}])
def test_names_in_place_of_objects_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"kitty|profile"):
        KittyCache(tiny_model("llama").config, **wrong)
