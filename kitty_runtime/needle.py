"""A small exact test of recall: a number hidden in filler text, asked for at the end, right if every token is."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kitty_runtime.accuracy import Method, method_logits
from kitty_runtime.emulation import teacher_forced_logits
from kitty_runtime.errors import DataError
from kitty_runtime.peers import Peer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kitty_runtime.layer_kl import Progress

DEPTHS = (0.1, 0.3, 0.5, 0.7)
"""Where the needles lie, as shares of the filler: far enough from the end that all are packed when asked for."""

NEEDLE_TOKENS = 1024
"""Tokens of a case, at the most."""

_NAMES = ("Amber", "Basalt", "Cedar", "Dune")


@dataclass(frozen=True)
class NeedleCase:
    """Tokens int64 ``[num_tokens]`` whose last `answer_len` are what the model should say."""

    ids: Tensor
    answer_len: int


@dataclass(frozen=True)
class NeedleScore:
    """Cases whose every answer token was the most likely one."""

    correct: int
    total: int


def needle_cases(
    tokenizer: PreTrainedTokenizerBase, filler: Tensor, num_tokens: int = NEEDLE_TOKENS, seed: int = 0
) -> list[NeedleCase]:
    """One case per depth.

    Args:
        filler: int64 ``[n]``, text around the needles.
        num_tokens: of a case, cut to what the filler fills.
        seed: of the numbers.
    Raises:
        DataError: the filler is too short to hold a needle.
    """
    numbers = random.Random(seed)

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    cases = []
    for name, depth in zip(_NAMES, DEPTHS, strict=True):
        question, answer = encode(f"\n\nThe secret number of {name} is"), encode(f" {numbers.randint(10000, 99999)}")
        needle = torch.cat([question, answer, encode(".\n\n")])
        length = min(len(filler), num_tokens - len(needle) - len(question) - len(answer))
        if length < len(needle):
            raise DataError(f"{len(filler)} tokens are too few to hide a needle in.", "Raise --seq-len.")
        place = int(depth * length)
        ids = torch.cat([filler[:place], needle, filler[place:length], question, answer])
        cases.append(NeedleCase(ids, len(answer)))
    return cases


def needle_scores(
    model: PreTrainedModel,
    cases: Sequence[NeedleCase],
    methods: Mapping[str, Method | Peer],
    progress: Progress | None = None,
) -> tuple[NeedleScore, dict[str, NeedleScore]]:
    """Score the unquantized cache and each method.

    Args:
        model: with ``attn_implementation="kitty"``.
        cases, methods: what is asked, and of whom.
    """
    found: dict[str | None, int] = dict.fromkeys([None, *methods], 0)
    total = len(cases) * len(found)
    for number, case in enumerate(cases):
        for done, name in enumerate(found):
            if progress:
                progress("needles", number * len(found) + done, total)
            if name is None:
                chunks = teacher_forced_logits(model, case.ids, None)
            else:
                chunks = method_logits(model, case.ids, methods[name])
            said = torch.cat([chunk.argmax(-1).cpu() for chunk in chunks])[-case.answer_len - 1 : -1]
            found[name] += bool(torch.equal(said, case.ids[-case.answer_len :]))
    if progress:
        progress("needles", total, total)
    scores = {name: NeedleScore(correct, len(cases)) for name, correct in found.items()}
    return scores[None], {name: scores[name] for name in methods}
