"""A load: requests of random lengths that arrive at a rate, each method by itself on the same requests."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kitty_runtime.bench.metrics import RequestTimes, load_metrics
from kitty_runtime.bench.passes import watched
from kitty_runtime.bench.shapes import BenchMethod
from kitty_runtime.engine.engine import Engine
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.request import Request, SamplingParams
from kitty_runtime.engine.scheduler import MAX_PROMPTS
from kitty_runtime.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Load:
    """Requests to make.

    Attributes:
        input_len, output_len: least and most tokens, drawn evenly.
        request_rate: arrivals per second, as a Poisson process; infinity = all at once.
    """

    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    request_rate: float = math.inf
    seed: int = 0


@dataclass(frozen=True)
class LoadResult:
    """What one method did with a load.

    Attributes:
        figures: see `kitty_runtime.bench.metrics.load_metrics`, and ``num_preemptions``, ``max_running``,
            ``prompts_share`` and ``decode_share`` (of the duration, inside passes of the model).
        peak_bytes: most memory of the device, by ``prompts`` and ``decode``; empty where it does not count.
        kv_bytes: of the cache's tensors.
        samples: times of each request in seconds from the start.
    """

    method: str
    figures: dict[str, float | int]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    kv_bytes: int = 0
    samples: Sequence[RequestTimes] = ()


def make_requests(load: Load, vocab_size: int) -> list[tuple[float, Request]]:
    """The requests and when they arrive, in seconds from the start; the same for every method."""
    rng = random.Random(load.seed)
    requests, arrival = [], 0.0
    for number in range(load.num_prompts):
        prompt_ids = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*load.input_len)))
        sampling = SamplingParams(max_tokens=rng.randint(*load.output_len), temperature=0.0)
        requests.append((arrival, Request(str(number), prompt_ids, sampling)))
        arrival += 0.0 if math.isinf(load.request_rate) else rng.expovariate(load.request_rate)
    return requests


def bench_load(
    model: PreTrainedModel,
    name: str,
    method: BenchMethod,
    load: Load,
    limits: EngineLimits,
    on_done: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Run a load on one method, after a few requests that warm up and are not counted.

    Raises:
        DataError: no request fits.
    """
    engine = Engine(model, None, method.config, method.profile, limits)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    requests = make_requests(load, vocab_size)
    _warm_up(engine, requests)
    preempted, times, max_running = engine.counters.num_preemptions, dict[str, RequestTimes](), 0
    with watched(engine) as passes:
        start = time.perf_counter()
        waiting = list(reversed(requests))
        while waiting or engine.has_work:
            now = time.perf_counter() - start
            while waiting and waiting[-1][0] <= now:
                arrival, request = waiting.pop()
                times[request.id] = RequestTimes(arrival, len(request.prompt_ids))
                try:
                    engine.add(request)
                except DataError:
                    times[request.id].failed = True
                    on_done()
            if not engine.has_work:
                time.sleep(max(0.0, min(0.01, waiting[-1][0] - now)) if waiting else 0.0)
                continue
            events = engine.step()
            now = time.perf_counter() - start
            max_running = max(max_running, engine.counters.num_running)
            for event in events:
                entry = times[event.request_id]
                if event.token_id is not None:
                    entry.tokens.append(now)
                if event.finish_reason is not None:
                    entry.failed = event.error is not None
                    on_done()
        duration = time.perf_counter() - start
    samples = list(times.values())
    if all(entry.failed for entry in samples):
        raise DataError(
            f"No request of the load fits: the cache holds {engine.pool_size.longest_sequence} tokens of one sequence.",
            "Give it more memory, or shorten --input-len and --output-len.",
        )
    figures = load_metrics(samples, duration)
    figures["num_preemptions"] = engine.counters.num_preemptions - preempted
    figures["max_running"] = max_running
    figures["prompts_share"] = passes.seconds["prompts"] / duration
    figures["decode_share"] = passes.seconds["decode"] / duration
    return LoadResult(name, figures, passes.peak_bytes, engine.pool_size.total_bytes, samples)


def _warm_up(engine: Engine, requests: Sequence[tuple[float, Request]]) -> None:
    """Kernels compile, for prompts as long as the load's, and the decode step is captured at every batch size that it
    can reach."""
    size = 1
    most = min(len(requests), engine.pool_size.num_slots)
    fits = engine.pool_size.longest_sequence - 2
    while True:
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        for number in range(min(size, most)):
            prompt_ids = requests[number][1].prompt_ids[: fits if size <= MAX_PROMPTS else 8]
            engine.add(Request(f"warm-up-{number}", prompt_ids, sampling))
        while engine.has_work:
            engine.step()
        if size >= most:
            return
        size *= 2
