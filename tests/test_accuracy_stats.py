"""The figures of a check against plain loops over the same numbers."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
import torch

from kitty_runtime.accuracy_stats import (
    TokenValues,
    clustered_mean,
    kl_by_position,
    perplexity,
    quantile,
    statistics_of,
)

FIRST = 384


def random_values(seed: int, num_scored: int) -> TokenValues:
    generator = torch.Generator().manual_seed(seed)

    def exponential(n: int) -> torch.Tensor:
        return -torch.rand(n, generator=generator).clamp_min(1e-6).log()

    reference = exponential(num_scored - 1) * 2
    return TokenValues(
        kl=exponential(num_scored) * 0.1 * (1 + seed),
        same_top1=torch.rand(num_scored, generator=generator) < 0.8,
        nll=reference + exponential(num_scored - 1) * 0.2 - 0.1,
        reference_nll=reference,
    )


@pytest.fixture(scope="module")
def windows():
    return [random_values(seed, 300) for seed in range(4)]


@pytest.fixture(scope="module")
def found(windows):
    return statistics_of(windows, FIRST)


def standard_error(means: list[float]) -> float:
    return statistics.stdev(means) / math.sqrt(len(means))


def test_kl(windows, found):
    values = sorted(x for w in windows for x in w.kl.tolist())
    assert found.kl_mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.kl_median == pytest.approx(statistics.median(values), rel=1e-12)
    assert found.kl_max == values[-1]
    percentiles = statistics.quantiles(values, n=1000, method="inclusive")
    for name, share in (("kl_p90", 900), ("kl_p95", 950), ("kl_p99", 990), ("kl_p999", 999)):
        assert getattr(found, name) == pytest.approx(percentiles[share - 1], rel=1e-9), name


def test_errors_are_those_of_the_windows_means(windows, found):
    kl = [statistics.fmean(w.kl.tolist()) for w in windows]
    assert found.windows == pytest.approx(tuple(kl), rel=1e-12)
    assert found.kl_se == pytest.approx(standard_error(kl), rel=1e-9)
    top1 = [sum(w.same_top1.tolist()) / 300 for w in windows]
    assert found.same_top1 == pytest.approx(statistics.fmean(top1), rel=1e-12)
    assert found.same_top1_se == pytest.approx(standard_error(top1), rel=1e-9)


def test_perplexity(windows, found):
    nll, reference = ([x for w in windows for x in getattr(w, name).tolist()] for name in ("nll", "reference_nll"))
    assert found.ppl == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-9)
    reference_ppl = math.exp(sum(reference) / len(reference))
    assert perplexity([w.reference_nll for w in windows]) == pytest.approx(reference_ppl, rel=1e-9)
    assert found.ppl_ratio == pytest.approx(found.ppl / reference_ppl, rel=1e-9)
    logs = [
        statistics.fmean(a - b for a, b in zip(w.nll.tolist(), w.reference_nll.tolist(), strict=True)) for w in windows
    ]
    assert found.ppl_ratio_se == pytest.approx(found.ppl_ratio * standard_error(logs), rel=1e-9)


def test_change_in_probability(windows, found):
    changes = [
        math.exp(-a) - math.exp(-b)
        for w in windows
        for a, b in zip(w.nll.tolist(), w.reference_nll.tolist(), strict=True)
    ]
    assert found.dp_rms == pytest.approx(math.sqrt(statistics.fmean(x * x for x in changes)), rel=1e-9)


def test_kl_by_position(windows, found):
    assert [(p.start, p.stop) for p in found.kl_by_position] == [(384, 512), (512, 640), (640, 684)]
    for p in found.kl_by_position:
        values = [x for w in windows for x in w.kl.tolist()[p.start - FIRST : p.stop - FIRST]]
        assert p.kl_mean == pytest.approx(statistics.fmean(values), rel=1e-12)


@pytest.mark.parametrize("num_scored", [2, 128, 129])
def test_positions_end_with_the_window(num_scored):
    found = kl_by_position([random_values(0, num_scored)], 10)
    assert found[0].start == 10
    assert found[-1].stop == 10 + num_scored
    assert all(a.stop == b.start for a, b in pairwise(found))


def test_one_window_has_no_error():
    found = statistics_of([random_values(0, 50)], FIRST)
    assert (found.kl_se, found.ppl_ratio_se, found.same_top1_se) == (None, None, None)
    assert math.isfinite(found.kl_mean)
    assert len(found.windows) == 1


def test_clusters_of_different_sizes():
    """Against the definition: every value's deviation, summed per cluster."""
    clusters = [torch.tensor(x) for x in ([1.0, 2.0, 6.0], [4.0], [0.0, 1.0])]
    mean = 14 / 6
    deviations = [sum(x - mean for x in cluster.tolist()) for cluster in clusters]
    expected = math.sqrt(3 / 2 * sum(d * d for d in deviations)) / 6
    found = clustered_mean(clusters)
    assert found.mean == pytest.approx(mean)
    assert found.se == pytest.approx(expected)
    assert clustered_mean([torch.ones(3), torch.ones(5)]) == (1.0, 0.0)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.9, 7.0 * 0.7 + 3.0 * 0.3), (1.0, 7.0)])
def test_quantile_between_neighbors(share, expected):
    assert quantile(torch.tensor([1.0, 2.0, 3.0, 7.0], dtype=torch.float64), share) == pytest.approx(expected)
    assert quantile(torch.tensor([5.0]), share) == 5.0


def test_a_ruined_model_stays_finite():
    ruined = TokenValues(torch.full((3,), 2e4), torch.zeros(3, dtype=torch.bool), torch.full((2,), 3e4), torch.ones(2))
    found = statistics_of([ruined, random_values(0, 3)], FIRST)
    numbers = [x for x in vars(found).values() if isinstance(x, float)]
    assert all(math.isfinite(x) for x in numbers)
    assert found.ppl > 1e300
