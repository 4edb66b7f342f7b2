"""What is measured of a load, by the names and definitions of vLLM's serving benchmark. No torch here.

Times are seconds on one clock. TTFT: from a request's arrival to its first token. TPOT: mean time per token after the
first, per request. ITL: every time between two tokens. E2EL: from arrival to the last token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTILES = (90, 95, 99)


@dataclass
class RequestTimes:
    """One request's times.

    Attributes:
        arrival: when it was there to be served.
        tokens: when each of its tokens came.
    """

    arrival: float
    num_prompt_tokens: int
    tokens: list[float] = field(default_factory=list)
    failed: bool = False


def load_metrics(requests: Sequence[RequestTimes], duration_s: float) -> dict[str, float | int]:
    """Figures of a load.

    Args:
        requests: at least one; failed ones count in `failed` alone.
        duration_s: from the first arrival to the last token.
    Returns:
        ``completed, failed, duration_s, total_input_tokens, total_output_tokens, request_throughput,
        output_throughput, total_token_throughput`` (per second), and where there is a sample
        ``{mean,median,p90,p95,p99}_{ttft,tpot,itl,e2el}_ms``.
    """
    done = [r for r in requests if r.tokens and not r.failed]
    num_in, num_out = sum(r.num_prompt_tokens for r in done), sum(len(r.tokens) for r in done)
    figures: dict[str, float | int] = {
        "completed": len(done),
        "failed": len(requests) - len(done),
        "duration_s": duration_s,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
    }
    samples = {
        "ttft": [r.tokens[0] - r.arrival for r in done],
        "tpot": [(r.tokens[-1] - r.tokens[0]) / (len(r.tokens) - 1) for r in done if len(r.tokens) > 1],
        "itl": [later - earlier for r in done for earlier, later in zip(r.tokens, r.tokens[1:], strict=False)],
        "e2el": [r.tokens[-1] - r.arrival for r in done],
    }
    for name, values in samples.items():
        if values:
            milliseconds = sorted(1e3 * value for value in values)
            figures[f"mean_{name}_ms"] = statistics.fmean(milliseconds)
            figures[f"median_{name}_ms"] = statistics.median(milliseconds)
            for percent in PERCENTILES:
                figures[f"p{percent}_{name}_ms"] = percentile(milliseconds, percent)
    return figures


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, linear between two of them, as numpy has it."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; 0 for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
