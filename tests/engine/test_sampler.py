"""Sampling against straightforward computations, and against transformers where it has the same."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kitty_runtime.engine import sampler
from kitty_runtime.engine.request import Request, SamplingParams
from kitty_runtime.engine.sampler import NO_TOKEN, SamplingBatch, _filter
from kitty_runtime.engine.sequence import Sequence
from kitty_runtime.errors import ConfigError

VOCAB = 50


def sequence(number=0, ids=(3, 4, 4), **sampling):
    return Sequence(Request(str(number), tuple(ids), SamplingParams(**sampling)), number, list(ids), 100)


def batch_of(*sequences, vocab=VOCAB):
    return SamplingBatch.of(sequences, vocab, torch.device("cpu"))


def sample(logits, batch):
    """Tokens and log-probabilities."""
    return sampler.sample(logits, batch).read()


def logits_of(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_rows_beside_sampled_ones():
    logits = logits_of(3)
    tokens, _ = sample(logits, batch_of(sequence(0, temperature=0), sequence(1), sequence(2, temperature=0)))
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[2] == int(logits[2].argmax())


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 1e-9},
        {"min_p": 1.0},
    ],
)
def test_filters_equal_those_of_transformers(settings):
    logits = logits_of(4, seed=1)
    found = _filter(logits, batch_of(*[sequence(i, **settings) for i in range(4)]))
    expected = logits
    warpers = {
        "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }  # fmt: skip
    for name, warper in warpers.items():
        if name in settings:
            expected = warper(settings[name])(None, expected)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found.softmax(-1), expected.softmax(-1))


def test_each_row_has_its_own_settings():
    logits = logits_of(1, seed=2).expand(3, -1)
    found = _filter(logits, batch_of(sequence(0, top_k=2), sequence(1), sequence(2, top_p=0.5)))
    assert int((~found[0].isinf()).sum()) == 2
    assert not found[1].isinf().any()
    assert 0 < int((~found[2].isinf()).sum()) < VOCAB


def test_repetition_penalty_equals_that_of_transformers():
    logits = logits_of(2, seed=3)
    ids = [3, 4, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits[:1].clone())
    tokens, _ = sample(
        logits, batch_of(sequence(0, ids, temperature=0, repetition_penalty=1.7), sequence(1, temperature=0))
    )
    assert tokens == [int(expected.argmax()), int(logits[1].argmax())]
    strong = sequence(0, range(VOCAB - 1), temperature=0, repetition_penalty=1e9)
    assert sample(logits[:1].abs() + 1, batch_of(strong))[0] == [VOCAB - 1]


def test_draws_follow_the_distribution():
    """20000 requests with other seeds: chi-square of the drawn tokens, and of two draws in a row together."""
    n, vocab = 20000, 8
    logits = logits_of(1, seed=4, vocab=vocab).div(3).expand(n, -1)
    sequences = [sequence(i, seed=i) for i in range(n)]
    first = torch.tensor(sample(logits, batch_of(*sequences, vocab=vocab))[0])
    for s, token in zip(sequences, first.tolist(), strict=True):
        s.ids.append(token)
    second = torch.tensor(sample(logits, batch_of(*sequences, vocab=vocab))[0])
    p = logits[0].softmax(-1)
    for counts, expected in (
        (first.bincount(minlength=vocab), n * p),
        ((first * vocab + second).bincount(minlength=vocab**2), n * torch.outer(p, p).flatten()),
    ):
        degrees = len(expected) - 1
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


def test_a_seed_decides_whatever_else_runs():
    logits = logits_of(1, seed=5)
    alone = sample(logits, batch_of(sequence(0, seed=11)))[0]
    crowd = [sequence(i, temperature=2.0, top_k=3) for i in range(1, 5)]
    assert sample(logits.expand(5, -1), batch_of(*crowd, sequence(9, seed=11)))[0][-1:] == alone
    others = {sample(logits, batch_of(sequence(0, seed=seed)))[0][0] for seed in range(60)}
    assert len(others) > 5
    unseeded = {sample(logits, batch_of(sequence(number)))[0][0] for number in range(60)}
    assert len(unseeded) > 5
    for seed in (-1, 2**63 - 1, -(2**63)):
        assert 0 <= sample(logits, batch_of(sequence(0, seed=seed)))[0][0] < VOCAB


def test_logprobs_are_of_the_model_itself():
    logits = logits_of(3, seed=6)
    expected = logits.log_softmax(-1)
    sequences = sequence(0, temperature=0, num_logprobs=3), sequence(1), sequence(2, temperature=5.0, num_logprobs=0)
    tokens, found = sample(logits, batch_of(*sequences))
    assert found[1] is None
    assert found[0].token_id == tokens[0]
    assert found[0].logprob == pytest.approx(float(expected[0, tokens[0]]))
    top = expected[0].topk(3)
    assert [t for t, _ in found[0].top] == top.indices.tolist()
    assert [x for _, x in found[0].top] == pytest.approx(top.values.tolist())
    assert found[2].top == ()
    assert found[2].logprob == pytest.approx(float(expected[2, tokens[2]]))


def test_no_end_before_the_minimum():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    ending = sequence(0, temperature=0, stop_token_ids=(7,), min_tokens=1)
    assert sample(logits, batch_of(ending))[0] != [7]
    ending.ids.append(8)
    assert sample(logits, batch_of(ending))[0] == [7]


def test_nan_is_no_token():
    logits = logits_of(2)
    logits[1, 3] = float("nan")
    assert sample(logits, batch_of(sequence(0, temperature=0), sequence(1)))[0] == [int(logits[0].argmax()), NO_TOKEN]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("temperature", -1), ("temperature", float("nan")), ("top_k", -1),
        ("top_p", 0), ("top_p", 1.1), ("min_p", 2), ("repetition_penalty", 0), ("seed", 2**63), ("seed", "1"),
        ("stop", ("",)), ("stop", "ab"), ("min_tokens", -1), ("num_logprobs", 21), ("temperature", True),
    ],
)  # fmt: skip
def test_settings_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is"):
        SamplingParams(**{name: value})
