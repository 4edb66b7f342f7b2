"""What the bench counts is what the engine did, and its figures are those of straightforward computations."""

from __future__ import annotations

import math
import statistics

import numpy
import pytest
from tiny_models import tiny_model

from kitty_runtime.bench import shapes as shapes_module
from kitty_runtime.bench.load import Load, bench_load, make_requests
from kitty_runtime.bench.metrics import RequestTimes, load_metrics, mean_and_sd, percentile
from kitty_runtime.bench.shapes import BenchMethod, Shape, bench_shape
from kitty_runtime.config import preset
from kitty_runtime.engine.engine import Engine
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.errors import DataError, MemoryLimitError

METHODS = {"weighted": BenchMethod(preset("weighted")), "16": BenchMethod(preset("16"))}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_load_metrics():
    requests = [
        RequestTimes(0.0, 10, [1.0, 1.5, 2.5]),
        RequestTimes(1.0, 20, [3.0]),
        RequestTimes(1.0, 99, [], failed=True),
        RequestTimes(2.0, 5, [2.5, 3.0], failed=False),
    ]
    found = load_metrics(requests, 4.0)
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (35, 6)
    assert found["request_throughput"] == 3 / 4
    assert found["output_throughput"] == 6 / 4
    assert found["total_token_throughput"] == 41 / 4
    ttft, tpot, itl, e2el = [1000, 2000, 500], [750, 500], [500, 1000, 500], [2500, 2000, 1000]
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        assert found[f"mean_{name}_ms"] == pytest.approx(statistics.mean(values))
        assert found[f"median_{name}_ms"] == pytest.approx(statistics.median(values))
        for percent in (90, 95, 99):
            assert found[f"p{percent}_{name}_ms"] == pytest.approx(numpy.percentile(values, percent))


def test_percentiles_and_deviations():
    values = sorted(numpy.random.default_rng(0).random(37).tolist())
    for percent in (0, 12.5, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert mean_and_sd([2.0]) == (2.0, 0.0)
    assert mean_and_sd([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))


def test_shapes_count_what_ran(model, monkeypatch):
    """Every prompt is read once a turn and decoding goes on from it: one token behind the first answer's is new."""
    engines = []

    class Watched(Engine):
        def __init__(self, *args):
            super().__init__(*args)
            engines.append(self)

    monkeypatch.setattr(shapes_module, "Engine", Watched)
    turns = []
    shape = Shape(batch_size=3, input_len=200, output_len=7)
    results = bench_shape(model, METHODS, shape, 2, on_turn=lambda: turns.append(1))
    assert [r.method for r in results] == ["weighted", "16"]
    assert len(turns) == 2 * 3
    for engine, result in zip(engines, results, strict=True):
        assert engine.counters.prompt_tokens == 3 * 3 * 200
        assert engine.counters.generation_tokens == 3 * 3 * (1 + 7)
        assert engine.counters.num_preemptions == 0
        assert not engine.scheduler.kept
        assert [label for label, *_ in result.tests] == ["pp200", "tg7 @ d200"]
        assert len(result.prompt_tok_per_s) == len(result.generation_tok_per_s) == 2
        assert min(result.prompt_tok_per_s + result.generation_tok_per_s) > 0
        assert result.kv_bytes == sum(t.nbytes for t in engine.cache.tensors)


def test_a_method_that_does_not_fit(model, monkeypatch):
    """The others are measured; it says why there is nothing."""

    class Full(Engine):
        def __init__(self, model, tokenizer, config, *rest):
            if not config.quantizes:
                raise MemoryLimitError("no room")
            super().__init__(model, tokenizer, config, *rest)

    monkeypatch.setattr(shapes_module, "Engine", Full)
    quantized, dense = bench_shape(model, METHODS, Shape(1, 20, 3), 1)
    assert len(quantized.prompt_tok_per_s) == 1
    assert not quantized.error
    assert (dense.error, dense.tests) == ("no room", [])


def test_a_load(model):
    load = Load(num_prompts=12, input_len=(5, 60), output_len=(2, 9), request_rate=200.0, seed=3)
    requests = make_requests(load, 96)
    assert requests == make_requests(load, 96)
    assert [at for at, _ in requests] == sorted(at for at, _ in requests)
    done = []
    limits = EngineLimits(kv_bytes=20_000_000, max_num_seqs=4, max_batch_tokens=64)
    result = bench_load(model, "weighted", METHODS["weighted"], load, limits, lambda: done.append(1))
    assert len(done) == result.figures["completed"] == 12
    assert result.figures["total_input_tokens"] == sum(len(r.prompt_ids) for _, r in requests)
    assert result.figures["total_output_tokens"] == sum(r.sampling.max_tokens for _, r in requests)
    assert 1 <= result.figures["max_running"] <= 4
    assert 0 < result.figures["prompts_share"] + result.figures["decode_share"] <= 1
    for (arrival, request), times in zip(requests, result.samples, strict=True):
        assert times.arrival == arrival <= times.tokens[0]
        assert len(times.tokens) == request.sampling.max_tokens
        assert times.tokens == sorted(times.tokens)


def test_requests_that_can_never_fit(model):
    limits = EngineLimits(num_pages=1, max_num_seqs=1)
    load = Load(num_prompts=3, input_len=(400, 1200), output_len=(2, 2), seed=1)
    lengths = [len(r.prompt_ids) for _, r in make_requests(load, 96)]
    with pytest.raises(DataError, match="No request of the load fits"):
        bench_load(model, "weighted", METHODS["weighted"], load, limits)
    assert min(lengths) > 351
