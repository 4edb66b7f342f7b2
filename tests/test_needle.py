"""The recall test: where the needles lie, and that a right answer is one whose every token is the most likely."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_ids, tiny_model

from kitty_runtime.accuracy import Method
from kitty_runtime.config import preset
from kitty_runtime.errors import DataError
from kitty_runtime.needle import DEPTHS, NeedleCase, NeedleScore, needle_cases, needle_scores
from kitty_runtime.peers import PEERS


class Letters:
    """A tokenizer with one token per character."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def text_of(ids):
    return "".join(chr(i) for i in ids)


def test_cases_hide_the_answer_at_each_depth():
    filler = torch.full((2000,), ord("-"))
    cases = needle_cases(Letters(), filler, 600)
    assert len(cases) == len(DEPTHS)
    for case, depth in zip(cases, DEPTHS, strict=True):
        text = text_of(case.ids)
        assert len(text) == 600
        answer = text[-case.answer_len :]
        assert int(answer) in range(10000, 100000)
        question = text[text.rindex("\n\nThe secret number of ") : -case.answer_len]
        assert text.count(question + answer) == 2
        hidden = text.index(question)
        filled = text.count("-")
        assert hidden == int(depth * filled)
    assert [case.ids.tolist() for case in cases] == [c.ids.tolist() for c in needle_cases(Letters(), filler, 600)]
    other = needle_cases(Letters(), filler, 600, seed=1)
    assert [case.ids.tolist() for case in cases] != [case.ids.tolist() for case in other]


def test_little_filler():
    with pytest.raises(DataError, match="10 tokens are too few"):
        needle_cases(Letters(), torch.zeros(10, dtype=torch.int64))


def test_scores_are_what_greedy_decoding_says():
    """Cases made of the model's own greedy answers are right at 16 bits; of others wrong."""
    model, methods = tiny_model(), {"16": Method(preset("16")), "fp8": PEERS["fp8"]}
    ids = random_ids(300)
    for _ in range(3):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids[None]).logits[0, -1:].argmax(-1)])
    wrong = ids.clone()
    wrong[-2] = (wrong[-2] + 1) % 96
    calls = []
    reference, scores = needle_scores(
        model, [NeedleCase(ids, 3), NeedleCase(wrong, 3)], methods, lambda *call: calls.append(call)
    )
    assert reference == scores["16"] == NeedleScore(1, 2)
    assert list(scores) == ["16", "fp8"]
    assert calls[0] == ("needles", 0, 6)
    assert calls[-1] == ("needles", 6, 6)
