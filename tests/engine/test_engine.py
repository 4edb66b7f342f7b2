"""Requests that join, leave, are preempted and fail get the answers that they would get alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engine_case import one_by_one, random_requests, run
from tiny_models import random_ids, tiny_model
from transformers import AutoModelForCausalLM

from kitty_runtime.config import CacheConfig, preset
from kitty_runtime.engine.compiled import compiled_layers, decoder_layers
from kitty_runtime.engine.engine import Engine
from kitty_runtime.engine.graphs import DecodeBuffers
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.request import Request, SamplingParams
from kitty_runtime.errors import ConfigError, DataError, MemoryLimitError, NumericsError, UnsupportedModelError
from kitty_runtime.models.demo import demo_model_dir

GREEDY = SamplingParams(max_tokens=20, temperature=0)


def check_equal_to_one_by_one(engine, model, config, requests, rng):
    tokens, last = run(engine, requests, rng)
    assert {event.finish_reason for event in last.values()} <= {"length", "stop"}
    assert len(last) == len(requests)
    assert engine.scheduler.pool.num_used == 0
    for request in requests:
        assert tokens[request.id] == one_by_one(model, config, request), request.id
    assert engine.counters.generation_tokens == sum(map(len, tokens.values()))


@pytest.mark.parametrize(("name", "run_ahead"), [("weighted", True), ("kitty", False), ("16", True), ("kv4", False)])
def test_mixed_requests(float64_engine_model, make_engine, name, run_ahead):
    config, limits = preset(name), {"max_batch_tokens": 300, "max_model_len": 1400, "run_ahead": run_ahead}
    engine = make_engine(float64_engine_model, config, num_pages=14, **limits)
    requests = random_requests(24, longest=1000, max_new=40, seed=1)
    check_equal_to_one_by_one(engine, float64_engine_model, config, requests, random.Random(2))
    assert engine.counters.prompt_tokens >= sum(len(r.prompt_ids) for r in requests)


@pytest.mark.parametrize(("name", "run_ahead"), [("weighted", True), ("kitty", False)])
def test_preempted_requests(float64_engine_model, make_engine, name, run_ahead):
    """Four answers that outgrow the pool together: the youngest give their pages back and start over."""
    config = preset(name)
    engine = make_engine(float64_engine_model, config, num_pages=2, max_model_len=300, run_ahead=run_ahead)
    sampling = SamplingParams(max_tokens=170, temperature=0)
    requests = [Request(str(i), tuple(random_ids(70 + i, seed=i).tolist()), sampling) for i in range(4)]
    check_equal_to_one_by_one(engine, float64_engine_model, config, requests, None)
    assert engine.counters.num_preemptions > 0


@pytest.mark.slow
def test_two_hundred_requests(float64_engine_model, make_engine):
    """Ten that begin short and grow by two pages share a pool of twelve, among 190 of all lengths."""
    config = CacheConfig()
    engine = make_engine(float64_engine_model, config, num_pages=12, num_slots=10, max_batch_tokens=512, run_ahead=True)
    growing = SamplingParams(max_tokens=290, temperature=0)
    requests = [Request(f"grows-{i}", tuple(random_ids(70, seed=i).tolist()), growing) for i in range(10)]
    requests += random_requests(190, longest=1500, max_new=16, seed=3)
    check_equal_to_one_by_one(engine, float64_engine_model, config, requests, random.Random(4))
    assert engine.counters.num_preemptions > 0


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "cohere2", "qwen3"])
def test_families(make_engine, family):
    """Sliding layers keep a ring of their window; softcap and learned sinks reach every operation."""
    model, config = tiny_model(family, dtype=torch.float64), preset("kitty")
    engine = make_engine(model, config, num_pages=20, max_batch_tokens=150)
    check_equal_to_one_by_one(engine, model, config, random_requests(6, 500, 30, seed=5), random.Random(6))


@pytest.mark.slow
def test_demo_model(make_engine):
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float64).eval()
    config = preset("kitty")
    engine = make_engine(model, config, num_pages=3, num_slots=4, max_model_len=512)
    growing = SamplingParams(max_tokens=16, temperature=0)  # past 160 tokens, where the first page is packed
    requests = [Request(f"grows-{i}", tuple(random_ids(148, seed=i).tolist()), growing) for i in range(4)]
    requests += random_requests(12, longest=400, max_new=8, seed=7, vocab=20000)
    check_equal_to_one_by_one(engine, model, config, requests, None)
    assert engine.counters.num_preemptions > 0


def test_a_later_turn_reads_only_what_is_new(float64_engine_model, make_engine):
    config = CacheConfig()
    engine = make_engine(float64_engine_model, config)
    first = Request("a", tuple(random_ids(300).tolist()), GREEDY, keep=True)
    answer = run(engine, [first])[0]["a"]
    assert engine.scheduler.kept["a"].num_stored == 319
    prompt = (*first.prompt_ids, *answer, 5, 6, 7)
    read = engine.counters.prompt_tokens
    second = run(engine, [Request("b", prompt, GREEDY, continues="a")])[0]["b"]
    assert engine.counters.prompt_tokens - read == 4  # the last token of the answer had not been read
    assert second == one_by_one(float64_engine_model, config, Request("b", prompt, GREEDY))
    assert engine.scheduler.pool.num_used == 0


def test_a_kept_request_gives_way(float64_engine_model, make_engine):
    """Its pages go to those who run; the next turn reads everything again."""
    engine = make_engine(float64_engine_model, CacheConfig(), num_pages=4, num_slots=2)
    first = Request("a", tuple(random_ids(500).tolist()), GREEDY, keep=True)
    answer = run(engine, [first])[0]["a"]
    run(engine, [Request("other", tuple(random_ids(400, seed=1).tolist()), GREEDY)])
    assert not engine.scheduler.kept
    prompt = (*first.prompt_ids, *answer, 5)
    second = run(engine, [Request("b", prompt, GREEDY, continues="a")])[0]["b"]
    assert second == one_by_one(float64_engine_model, CacheConfig(), Request("b", prompt, GREEDY))


def test_a_rewritten_conversation_starts_over(float64_engine_model, make_engine):
    engine = make_engine(float64_engine_model, CacheConfig())
    run(engine, [Request("a", tuple(random_ids(300).tolist()), GREEDY, keep=True)])
    other = Request("a", tuple(random_ids(350, seed=1).tolist()), GREEDY, continues="a")
    assert run(engine, [other])[0]["a"] == one_by_one(float64_engine_model, CacheConfig(), other)


def test_abort(float64_engine_model, make_engine):
    engine = make_engine(float64_engine_model, CacheConfig(), num_pages=4, num_slots=1)
    for name in ("runs", "waits"):
        engine.add(Request(name, tuple(random_ids(200).tolist()), GREEDY))
    engine.step()
    assert engine.abort("runs").finish_reason == "aborted"
    assert engine.abort("waits").finish_reason == "aborted"
    assert engine.abort("waits") is None
    assert not engine.has_work
    assert engine.scheduler.pool.num_used == 0
    engine.check_integrity()


def test_refused_requests(float64_engine_model, make_engine):
    engine = make_engine(float64_engine_model, CacheConfig(), num_pages=3)
    engine.add(Request("a", (5, 6), GREEDY))
    with pytest.raises(ConfigError, match="there already"):
        engine.add(Request("a", (5, 6), GREEDY))
    engine.abort("a")
    with pytest.raises(DataError, match="no tokens"):
        engine.add(Request("b", (), GREEDY))
    for wrong in (96, 10**6, -1):
        with pytest.raises(DataError, match=f"has the token {wrong}, the model has 96"):
            engine.add(Request("b", (5, wrong, 6), GREEDY))
    with pytest.raises(DataError, match="the context is 4096"):
        engine.add(Request("b", (5,) * 4096, GREEDY))
    with pytest.raises(DataError, match=r"grow to 1002 tokens, the cache holds 607"):
        engine.add(Request("b", (5, 6), replace(GREEDY, max_tokens=1000)))
    with pytest.raises(ConfigError, match="tokenizer"):
        engine.add(Request("b", (5, 6), replace(GREEDY, stop=("x",))))
    tokens, last = run(engine, [Request("b", (5, 6), replace(GREEDY, max_tokens=None))])
    assert len(tokens["b"]) == 605  # all that the pool holds
    assert last["b"].finish_reason == "length"


@pytest.mark.parametrize("run_ahead", [False, True])
def test_stop_and_minimum(float64_engine_model, make_engine, run_ahead):
    free = Request("free", tuple(random_ids(50).tolist()), GREEDY)
    tokens = one_by_one(float64_engine_model, CacheConfig(), free)
    end = tokens[4]
    first = tokens.index(end)
    engine = make_engine(float64_engine_model, CacheConfig(), run_ahead=run_ahead)
    stopping = Request("stops", free.prompt_ids, replace(GREEDY, stop_token_ids=(end,)))
    late = Request("late", free.prompt_ids, replace(GREEDY, stop_token_ids=(end,), min_tokens=first + 3))
    found, last = run(engine, [stopping, late])
    assert found["stops"] == tokens[: first + 1]
    assert last["stops"].finish_reason == "stop"
    assert end not in found["late"][: first + 3]
    assert len(found["late"]) > first + 1


@pytest.mark.parametrize(
    ("error", "run_ahead"), [(NumericsError("layer 0 is NaN"), False), (torch.OutOfMemoryError("no memory"), True)]
)
def test_a_failing_request_fails_alone(float64_engine_model, make_engine, monkeypatch, error, run_ahead):
    """A pass with one request in it fails, whatever else is in it: the others are answered as if alone."""
    engine = make_engine(float64_engine_model, CacheConfig(), run_ahead=run_ahead)
    requests = [Request(str(i), tuple(random_ids(100, seed=i).tolist()), GREEDY) for i in range(4)]
    bad = requests[2].prompt_ids
    read_prompts = engine.runner.read_prompts

    def fails(prompts):
        if any(tuple(s.ids) == bad for s, _ in prompts):
            raise error
        return read_prompts(prompts)

    monkeypatch.setattr(engine.runner, "read_prompts", fails)
    tokens, last = run(engine, requests)
    assert last["2"].finish_reason == "error"
    assert isinstance(last["2"].error, NumericsError | MemoryLimitError)
    for i in (0, 1, 3):
        assert tokens[str(i)] == one_by_one(float64_engine_model, CacheConfig(), requests[i])
    assert engine.counters.num_failed == 1
    assert engine.scheduler.pool.num_used == 0


def test_nan_weights_are_an_error_of_the_request(make_engine):
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    engine = make_engine(model, CacheConfig())
    last = run(engine, [Request("a", (5, 6), GREEDY)])[1]
    assert last["a"].finish_reason == "error"
    assert "NaN" in str(last["a"].error)


def test_running_ahead_is_one_step_late(float64_engine_model, make_engine):
    engine = make_engine(float64_engine_model, CacheConfig(), run_ahead=True)
    request = Request("a", tuple(random_ids(30).tolist()), replace(GREEDY, max_tokens=3))
    engine.add(request)
    events = []
    while engine.has_work:
        events.append([event.token_id for event in engine.step()])
    tokens = one_by_one(float64_engine_model, CacheConfig(), request)
    assert events == [[], *([token] for token in tokens)]  # and no pass for a fourth token
    assert engine.counters.num_steps == 4


def test_an_answer_that_ended_while_running_ahead_goes_on(float64_engine_model, make_engine):
    """Its last pass was one too many; what that stored is true all the same."""
    free = Request("free", tuple(random_ids(150).tolist()), GREEDY)
    tokens = one_by_one(float64_engine_model, CacheConfig(), free)
    engine = make_engine(float64_engine_model, CacheConfig(), run_ahead=True)
    first = replace(free, sampling=replace(GREEDY, stop_token_ids=(tokens[7],)), keep=True)
    answer = run(engine, [first])[0]["free"]
    assert answer == tokens[: tokens.index(tokens[7]) + 1]
    kept = engine.scheduler.kept["free"]
    assert (kept.num_stored, kept.ids) == (150 + len(answer), [*free.prompt_ids, *answer])
    again = Request("again", (*kept.ids, 5), GREEDY, continues="free")
    assert run(engine, [again])[0]["again"] == one_by_one(float64_engine_model, CacheConfig(), again)


def test_what_needs_the_tokens_waits_for_them(float64_engine_model, make_engine):
    """A repetition penalty looks at all tokens: beside it nobody runs ahead, and answers are the same."""
    penalized = replace(GREEDY, repetition_penalty=1.7)
    requests = [Request(str(i), tuple(random_ids(40, seed=i).tolist()), (GREEDY, penalized)[i % 2]) for i in range(4)]
    ahead, behind = (
        run(make_engine(float64_engine_model, CacheConfig(), run_ahead=run_ahead), requests, random.Random(8))[0]
        for run_ahead in (True, False)
    )
    assert ahead == behind
    assert ahead["0"] == one_by_one(float64_engine_model, CacheConfig(), requests[0])
    assert ahead["1"] != one_by_one(float64_engine_model, CacheConfig(), requests[1])


def test_compiled_layers_compute_the_same(make_engine):
    """One compilation for a batch of one and one for all others, whatever the layer and the capture."""
    model = tiny_model(dtype=torch.float64, num_hidden_layers=3)
    torch._dynamo.utils.counters.clear()
    engine = make_engine(model, CacheConfig())
    for size in (1, 2, 5):
        rows = torch.tensor([[7] * size, [0] * size, list(range(size))])
        with torch.inference_mode():
            expected = engine.runner._decode(DecodeBuffers(rows, None, 1)).clone()
            with compiled_layers(model, engine.cache, backend="eager"):
                found = engine.runner._decode(DecodeBuffers(rows, None, 1))
        torch.testing.assert_close(found, expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 2 <= graphs <= 2 * 6  # per layer of a kind a few pieces, not per layer
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))


def test_a_step_on_the_buffers_of_a_graph(float64_engine_model, make_engine):
    """Filler rows, the whole width of the page table and packing on the device change no logits and no page."""
    engine = make_engine(float64_engine_model, CacheConfig(), num_pages=20)
    lengths = (3, 96, 223, 351)  # the last three complete pages at their next token, or not yet
    for i, n in enumerate(lengths):
        engine.add(Request(str(i), tuple(random_ids(n, seed=i).tolist()), GREEDY))
    while any(not s.decodes for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    runner, sequences = engine.runner, engine.scheduler.schedule().decodes
    before = [t.clone() for t in engine.cache.tensors]
    with torch.inference_mode():
        expected = runner.decode(sequences).clone()
        after = [t.clone() for t in engine.cache.tensors]
        for tensor, old in zip(engine.cache.tensors, before, strict=True):
            tensor.copy_(old)
        rows = [(s.ids[-1], s.num_stored, s.slot) for s in sequences] + [runner._filler] * 4
        found = runner._decode(DecodeBuffers(torch.tensor(rows).T.contiguous(), None, 1))
    assert torch.equal(found[: len(sequences)], expected)
    filler = runner._filler[2]
    for tensor, wanted in zip(engine.cache.tensors, after, strict=True):
        if tensor.dtype == torch.uint8:
            assert torch.equal(tensor, wanted)
        else:  # sinks, rings and sums have a row per slot
            assert torch.equal(tensor[:filler], wanted[:filler])


def test_limits_and_layers_are_checked(float64_engine_model):
    with pytest.raises(MemoryLimitError, match="one sequence needs"):
        Engine(float64_engine_model, None, limits=EngineLimits(kv_bytes=1000))
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineLimits(gpu_memory_utilization=1.5)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineLimits(max_num_seqs=0)
    with pytest.raises(ConfigError, match="prefill"):
        Engine(float64_engine_model, None, CacheConfig(prefill="full"))


def test_recurrent_layers_are_refused():
    from kitty_runtime.engine.layers import check_layers
    from kitty_runtime.models.geometry import LayerGeometry

    layers = [LayerGeometry(0, False, "recurrent state instead of keys and values", 0, 0, None)]
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        check_layers(layers)
