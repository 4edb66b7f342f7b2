"""Fixed shapes: reading prompts (`pp`) and decoding at a depth (`tg`), methods interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kitty_runtime.bench.metrics import mean_and_sd
from kitty_runtime.bench.passes import Passes, watched
from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.engine import Engine
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.request import Request, SamplingParams
from kitty_runtime.errors import MemoryLimitError
from kitty_runtime.profiles import BoostProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class BenchMethod:
    """One way to store the cache."""

    config: CacheConfig
    profile: BoostProfile | None = None


@dataclass(frozen=True)
class Shape:
    """Sequences at once, prompt tokens and generated tokens of each."""

    batch_size: int
    input_len: int
    output_len: int


@dataclass
class ShapeResult:
    """What one method did on one shape.

    Attributes:
        prompt_tok_per_s, generation_tok_per_s: of all sequences together, one value per repetition.
        prompt_peak_bytes, generation_peak_bytes: most memory of the device; None where it does not count.
        kv_bytes: of the cache's tensors.
        error: why there are no figures.
    """

    method: str
    shape: Shape
    prompt_tok_per_s: list[float] = field(default_factory=list)
    generation_tok_per_s: list[float] = field(default_factory=list)
    prompt_peak_bytes: int | None = None
    generation_peak_bytes: int | None = None
    kv_bytes: int = 0
    error: str = ""

    @property
    def tests(self) -> list[tuple[str, float, float, list[float]]]:
        """Label, mean and standard deviation of tokens per second, and the samples; labels as in llama-bench."""
        shape = self.shape
        named = (
            (f"pp{shape.input_len}", self.prompt_tok_per_s),
            (f"tg{shape.output_len} @ d{shape.input_len}", self.generation_tok_per_s),
        )
        return [(label, *mean_and_sd(samples), samples) for label, samples in named if samples]


def bench_shape(
    model: PreTrainedModel,
    methods: Mapping[str, BenchMethod],
    shape: Shape,
    repetitions: int,
    limits: EngineLimits | None = None,
    on_turn: Callable[[], None] = lambda: None,
) -> list[ShapeResult]:
    """Measure every method on one shape, in turns; the first turn of each warms up and is not counted.

    Methods whose caches do not fit beside one another are measured one after the other; one that does not fit at all
    has an `error`.

    Args:
        limits: pages and sequences are those of the shape.
        on_turn: called after each method's turn, ``len(methods) * (repetitions + 1)`` times if all fit.
    """
    try:
        engines = {name: _open(model, method, shape, limits or EngineLimits()) for name, method in methods.items()}
    except (MemoryLimitError, torch.OutOfMemoryError) as problem:
        if len(methods) == 1:
            return [ShapeResult(name, shape, error=str(problem).splitlines()[0]) for name in methods]
        alone = [{name: method} for name, method in methods.items()]
        return [r for one in alone for r in bench_shape(model, one, shape, repetitions, limits, on_turn)]
    results = {name: ShapeResult(name, shape, kv_bytes=e.pool_size.total_bytes) for name, e in engines.items()}
    for turn in range(repetitions + 1):
        for name, engine in engines.items():
            if not results[name].error:
                _take_turn(engine, results[name], turn)
            on_turn()
    return list(results.values())


def _open(model: PreTrainedModel, method: BenchMethod, shape: Shape, limits: EngineLimits) -> Engine:
    """An engine with just the pages and slots of the shape, and the page ahead that admission asks for."""
    longest = shape.input_len + shape.output_len + 1
    num_pages = max(1, shape.batch_size * (method.config.packed_pages(longest)[0] + 1))
    limits = replace(limits, num_pages=num_pages, kv_bytes=None, max_num_seqs=shape.batch_size)
    return Engine(model, None, method.config, method.profile, limits)


def _take_turn(engine: Engine, result: ShapeResult, turn: int) -> None:
    """Read all prompts, then decode from them; the warm-up's figures are dropped."""
    shape = result.shape
    generator = torch.Generator().manual_seed(turn)
    vocab_size = engine.model.config.get_text_config(decoder=True).vocab_size
    prompts = torch.randint(0, vocab_size, (shape.batch_size, shape.input_len), generator=generator).tolist()
    try:
        with watched(engine) as prompt_passes:
            first, prompt_s = _run(engine, prompts, 1, keep=True)
        begun = [[*prompt, *new] for prompt, new in zip(prompts, first, strict=True)]
        with watched(engine) as passes:
            _, generation_s = _run(engine, begun, shape.output_len, keep=False)
    except MemoryLimitError as problem:
        result.error = problem.message
        engine.abandon()
        return
    if turn == 0:
        return
    result.prompt_tok_per_s.append(shape.batch_size * shape.input_len / prompt_s)
    result.generation_tok_per_s.append(shape.batch_size * shape.output_len / generation_s)
    result.prompt_peak_bytes = _peak(result.prompt_peak_bytes, prompt_passes, "prompts")
    result.generation_peak_bytes = _peak(result.generation_peak_bytes, passes, "decode")


def _run(engine: Engine, prompts: Sequence[list[int]], num_new: int, keep: bool) -> tuple[list[list[int]], float]:
    """Greedy tokens after each prompt, `num_new` of each, and seconds: no token ends an answer, and what a request of
    the same number has kept is not read again."""
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), tuple(prompt), sampling, keep, continues=str(number)))
    tokens: list[list[int]] = [[] for _ in prompts]
    start = time.perf_counter()
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            if event.token_id is not None:
                tokens[int(event.request_id)].append(event.token_id)
    return tokens, time.perf_counter() - start  # the tokens are on the host, so all has ended


def _peak(before: int | None, passes: Passes, what: str) -> int | None:
    now = passes.peak_bytes.get(what)
    return before if now is None else max(now, before or 0)
