"""Which channels are boosted."""

from __future__ import annotations

import pytest
import torch

from kitty_runtime.quant.boost import LayerBoost, choose_boosted, magnitude_score, query_score, random_channels


def test_the_best_in_ascending_order():
    scores = torch.tensor([[0.0, 5.0, 1.0, 4.0, 3.0], [9.0, 8.0, 7.0, 6.0, 5.0]])
    assert choose_boosted(scores, 3).tolist() == [[1, 3, 4], [0, 1, 2]]
    assert choose_boosted(scores, 0).shape == (2, 0)


def test_of_equals_the_lower_channel_wins():
    assert choose_boosted(torch.ones(256), 7).tolist() == list(range(7))
    scores = torch.zeros(64)
    scores[[60, 3, 40]] = 1.0
    assert choose_boosted(scores, 2).tolist() == [3, 40]
    assert choose_boosted(scores, 5).tolist() == [0, 1, 3, 40, 60]


def test_magnitude_is_the_mean_absolute_key():
    keys = torch.randn(2, 3, 128, 16, generator=torch.Generator().manual_seed(0))
    keys[..., 5] = -keys[..., 5].abs() * 10
    expected = keys.double().numpy().__abs__().mean(-2)
    assert torch.allclose(magnitude_score(keys).double(), torch.from_numpy(expected))
    assert bool((magnitude_score(keys).argmax(-1) == 5).all())


def test_query_score_is_range_times_energy():
    keys = torch.zeros(128, 4)
    keys[:, 0] = 100.0  # large but constant: no rounding error
    keys[7, 1], keys[8, 1] = 2.0, -1.0
    keys[0, 2], keys[1, 2] = 1.0, 0.5
    assert query_score(keys, torch.tensor([1.0, 2.0, 8.0, 1.0])).tolist() == [0.0, 6.0, 8.0, 0.0]


def test_random_channels_are_fixed_by_the_seed():
    first = random_channels(4, 64, 8, seed=3)
    assert torch.equal(first, random_channels(4, 64, 8, seed=3))
    assert not torch.equal(first, random_channels(4, 64, 8, seed=4))
    assert first.shape == (4, 8)
    for head in first.tolist():
        assert head == sorted(set(head))
        assert head[0] >= 0
        assert head[-1] < 64
    state = torch.get_rng_state()
    random_channels(4, 64, 8, seed=5)
    assert torch.equal(state, torch.get_rng_state())  # leaves the global generator alone


KEYS = torch.randn(3, 2, 128, 32, generator=torch.Generator().manual_seed(1))
ENERGY = torch.rand(3, 2, 32, generator=torch.Generator().manual_seed(2))


def test_policies():
    dynamic = LayerBoost("dynamic", 4).choose(KEYS, None)
    assert torch.equal(dynamic, choose_boosted(magnitude_score(KEYS), 4))
    running = LayerBoost("weighted", 4)
    assert running.needs_running_energy
    assert torch.equal(running.choose(KEYS, ENERGY), choose_boosted(query_score(KEYS, ENERGY), 4))
    profiled = LayerBoost("weighted", 4, query_energy=ENERGY[0])
    assert not profiled.needs_running_energy
    assert torch.equal(profiled.choose(KEYS, None), choose_boosted(query_score(KEYS, ENERGY[0]), 4))
    assert torch.equal(profiled.choose(KEYS, ENERGY * 0), profiled.choose(KEYS, None))  # the profile wins
    channels = torch.tensor([[0, 5, 9, 31], [1, 2, 3, 4]])
    for policy in ("static", "random"):
        chosen = LayerBoost(policy, 4, channels=channels).choose(KEYS, None)
        assert torch.equal(chosen, channels.expand(3, 2, 4))


@pytest.mark.parametrize("policy", ["dynamic", "weighted"])
@pytest.mark.parametrize("count", [0, 32])
def test_none_and_all(policy, count):
    boost = LayerBoost(policy, count)
    chosen = boost.choose(KEYS, ENERGY if boost.needs_running_energy else None)
    assert chosen.tolist() == [[list(range(count))] * 2] * 3
