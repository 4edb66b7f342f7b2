"""From what was measured at each token to the figures of an accuracy check: means with errors, quantiles, perplexity.

Pure functions of small CPU tensors. Errors are clustered by window: neighboring tokens share their context, so a window
is one observation. With a single window there is no error, which is None.

Source: the KL statistics of llama.cpp's perplexity tool. Differs: exact log-probabilities instead of 16-bit ones, and
errors clustered by window instead of by token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE

_LARGEST_LOG = 700.0
"""exp() of more is no double; a ruined model gets a finite perplexity too."""


@dataclass(frozen=True)
class TokenValues:
    """What one method did to the predictions of one window, against the reference.

    Attributes:
        kl: fp32 ``[num_scored]``, KL divergence of the next-token distributions, in nats.
        same_top1: bool ``[num_scored]``, whether the most likely token is the same.
        nll, reference_nll: fp32 ``[num_predicted]``, negative log-likelihood of the next token of the text, in nats;
            the last token of a window has none.
    """

    kl: Tensor
    same_top1: Tensor
    nll: Tensor
    reference_nll: Tensor


class Estimate(NamedTuple):
    """A mean and its standard error; None where there is only one window."""

    mean: float
    se: float | None


@dataclass(frozen=True)
class PositionKL:
    """Mean KL of the positions start .. stop - 1 of all windows."""

    start: int
    stop: int
    kl_mean: float


@dataclass(frozen=True)
class Statistics:
    """One method against the reference; KL in nats.

    Attributes:
        kl_mean, kl_se: mean KL and its standard error.
        kl_median, kl_p90, kl_p95, kl_p99, kl_p999, kl_max: quantiles over tokens.
        ppl: perplexity; ppl_ratio, ppl_ratio_se: over that of the reference.
        dp_rms: root mean square of the change in the probability of the next token.
        same_top1, same_top1_se: share of tokens whose most likely successor is the same.
        kl_by_position: one entry per page of positions.
        windows: mean KL of each window, what two runs are compared by.
    """

    kl_mean: float
    kl_se: float | None
    kl_median: float
    kl_p90: float
    kl_p95: float
    kl_p99: float
    kl_p999: float
    kl_max: float
    ppl: float
    ppl_ratio: float
    ppl_ratio_se: float | None
    dp_rms: float
    same_top1: float
    same_top1_se: float | None
    kl_by_position: tuple[PositionKL, ...]
    windows: tuple[float, ...]


def statistics_of(windows: Sequence[TokenValues], first_scored: int) -> Statistics:
    """The figures of one method.

    Args:
        windows: at least one, each with at least one predicted token.
        first_scored: position in its window of the first value of `TokenValues.kl`.
    """
    kl = clustered_mean([w.kl for w in windows])
    top1 = clustered_mean([w.same_top1 for w in windows])
    log_ratio = clustered_mean([w.nll.double() - w.reference_nll.double() for w in windows])
    ratio = _exp(log_ratio.mean)
    change = torch.cat([(-w.nll.double()).exp() - (-w.reference_nll.double()).exp() for w in windows])
    ordered = torch.cat([w.kl for w in windows]).double().sort().values
    return Statistics(
        kl_mean=kl.mean,
        kl_se=kl.se,
        kl_median=quantile(ordered, 0.5),
        kl_p90=quantile(ordered, 0.9),
        kl_p95=quantile(ordered, 0.95),
        kl_p99=quantile(ordered, 0.99),
        kl_p999=quantile(ordered, 0.999),
        kl_max=ordered[-1].item(),
        ppl=perplexity([w.nll for w in windows]),
        ppl_ratio=ratio,
        # the error of a logarithm is the relative error of the number
        ppl_ratio_se=None if log_ratio.se is None else min(ratio * log_ratio.se, sys.float_info.max),
        dp_rms=change.square().mean().sqrt().item(),
        same_top1=top1.mean,
        same_top1_se=top1.se,
        kl_by_position=kl_by_position(windows, first_scored),
        windows=tuple(w.kl.double().mean().item() for w in windows),
    )


def clustered_mean(clusters: Sequence[Tensor]) -> Estimate:
    """Mean over all values, and its standard error when only clusters are independent.

    ``se^2 = n / (n - 1) * sum_c (sum_i (x_ci - mean))^2 / N^2`` for n clusters of N values in all; with
    clusters of equal size that is the standard error of the mean of their means.

    Args:
        clusters: any numeric dtype, one dimension each.
    Source: the linearized variance of a ratio of cluster totals (Cochran, Sampling Techniques, section 9A).
    """
    sums = [(cluster.double().sum().item(), len(cluster)) for cluster in clusters]
    count = sum(size for _, size in sums)
    mean = math.fsum(total for total, _ in sums) / count
    n = len(sums)
    if n < 2:
        return Estimate(mean, None)
    squares = math.fsum((total - size * mean) ** 2 for total, size in sums)
    return Estimate(mean, math.sqrt(n / (n - 1) * squares) / count)


def quantile(ordered: Tensor, share: float) -> float:
    """The value below which `share` of the ascending `ordered` lie, interpolated linearly between neighbors."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below].item(), ordered[above].item()
    return low + (high - low) * (place - below)


def perplexity(nll: Sequence[Tensor]) -> float:
    """Of the tokens of all windows, from their negative log-likelihoods in nats."""
    return _exp(clustered_mean(nll).mean)


def kl_by_position(windows: Sequence[TokenValues], first_scored: int) -> tuple[PositionKL, ...]:
    """Mean KL per 128 positions, counted from the first one scored; the last entry may cover fewer."""
    longest = max(len(w.kl) for w in windows)
    edges = [*range(0, longest, PAGE_SIZE), longest]
    found = []
    for start, stop in pairwise(edges):
        mean = torch.cat([w.kl[start:stop] for w in windows]).double().mean().item()
        found.append(PositionKL(first_scored + start, first_scored + stop, mean))
    return tuple(found)


def _exp(log: float) -> float:
    return math.exp(min(log, _LARGEST_LOG))
