"""Where the time of a run goes and the most memory it takes: on CUDA from its events and counters, else wall time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kitty_runtime.engine.engine import Engine


@dataclass
class Passes:
    """Seconds inside prompt passes and decode passes of an engine; peak bytes of the device during each.

    Attributes:
        seconds: by ``prompts`` and ``decode``.
        peak_bytes: likewise; empty where the device does not count.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"prompts": 0.0, "decode": 0.0})
    peak_bytes: dict[str, int] = field(default_factory=dict)


@contextmanager
def watched(engine: Engine) -> Iterator[Passes]:
    """Measure the engine's passes inside the block; events are read when it ends, so nothing waits for them."""
    passes, events = Passes(), list[tuple[str, torch.cuda.Event, torch.cuda.Event]]()
    on_cuda = engine.model.device.type == "cuda"

    @contextmanager
    def observe(what: str) -> Iterator[None]:
        if not on_cuda:
            start = time.perf_counter()
            yield
            passes.seconds[what] += time.perf_counter() - start
            return
        torch.cuda.reset_peak_memory_stats()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        events.append((what, begin, end))
        passes.peak_bytes[what] = max(passes.peak_bytes.get(what, 0), torch.cuda.max_memory_allocated())

    before, engine.observe = engine.observe, observe
    try:
        yield passes
    finally:
        engine.observe = before
        if on_cuda:
            torch.cuda.synchronize()
        for what, begin, end in events:
            passes.seconds[what] += begin.elapsed_time(end) / 1e3
