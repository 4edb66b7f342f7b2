"""An engine and a tokenizer without a model: answers are a function of the request alone. No torch here."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from kitty_runtime.batch.requests import BatchModel
from kitty_runtime.engine.request import Event, Request, SamplingParams, TokenLogprob
from kitty_runtime.errors import ConfigError, DataError, MemoryLimitError

VOCAB_SIZE = 256 + 3
END = 1
CONTEXT = 4000
OUT_OF_MEMORY = "needs too much memory"
"""A prompt with these words fails while it runs."""

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no such talk') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if think %}<think>{% endif %}<assistant>"
)


class ByteTokenizer:
    """A token per byte of UTF-8, after three special ones."""

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        del verbose
        return {"input_ids": [2] * add_special_tokens + [3 + byte for byte in text.encode()]}

    def decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in ids if i >= 3).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        def refuse(message: str) -> None:
            raise ValueError(message)

        return (
            Environment().from_string(self.chat_template).render(messages=messages, raise_exception=refuse, **options)
        )


@dataclass
class FakeCounters:
    num_waiting: int = 0
    num_running: int = 0
    pages_used: int = 0
    pages_total: int = 64
    num_preemptions: int = 0


@dataclass
class _Running:
    request: Request
    tokens: list[int]
    reason: str
    num_done: int = 0


class FakeEngine:
    """One token per running request and step; who runs beside whom changes no answer.

    Args:
        max_num_seqs: requests that run at once.
        step_s: how long a step takes.
    """

    def __init__(self, max_num_seqs: int = 8, step_s: float = 0.0) -> None:
        self.max_num_seqs = max_num_seqs
        self.step_s = step_s
        self.waiting: list[Request] = []
        self.running: list[_Running] = []
        self.most_waiting = 0
        self.seen: list[Request] = []

    def add(self, request: Request) -> None:
        if request.id in {other.id for other in self.waiting} | {other.request.id for other in self.running}:
            raise ConfigError(f"The id {request.id!r} is taken.", "Use another.")
        if len(request.prompt_ids) >= CONTEXT:
            raise DataError(
                f"The prompt has {len(request.prompt_ids)} tokens, the context is {CONTEXT}.", "Shorten the prompt."
            )
        self.waiting.append(request)
        self.seen.append(request)
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def counters(self) -> FakeCounters:
        return FakeCounters(len(self.waiting), len(self.running), 2 * len(self.running))

    def step(self) -> list[Event]:
        time.sleep(self.step_s)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.pop(0)
            self.running.append(_Running(request, *_answer(request)))
        events = [event for one in self.running for event in _advance(one)]
        over = {event.request_id for event in events if event.finish_reason}
        self.running = [one for one in self.running if one.request.id not in over]
        return events


def _advance(one: _Running) -> list[Event]:
    if OUT_OF_MEMORY in ByteTokenizer().decode(list(one.request.prompt_ids)) and one.num_done == 2:
        error = MemoryLimitError("The answer no longer fits in memory.", "Lower --bits.")
        return [Event(one.request.id, finish_reason="error", error=error)]
    token = one.tokens[one.num_done]
    one.num_done += 1
    last = one.num_done == len(one.tokens)
    wanted = one.request.sampling.num_logprobs
    logprob = None
    if wanted is not None:
        logprob = TokenLogprob(token, -0.5, tuple((token + i, -0.5 - i) for i in range(wanted)))
    text = "" if token == END else ByteTokenizer().decode([token])
    return [Event(one.request.id, token, text, logprob, one.reason if last else None)]


def _answer(request: Request) -> tuple[list[int], str]:
    """1 to 24 letters of the request's hash, then an end token unless the limit comes first."""
    digest = hashlib.sha256(repr((request.prompt_ids, request.sampling)).encode()).digest()
    draw = random.Random(digest)
    tokens = [3 + ord("a") + draw.randrange(26) for _ in range(1 + draw.randrange(24))] + [END]
    limit = request.sampling.max_tokens or len(tokens)
    if END not in request.sampling.stop_token_ids:  # ignore_eos
        tokens[-1] = 3 + ord("z")
        return tokens[:limit], "length"
    return tokens[:limit], "stop" if len(tokens) <= limit else "length"


def fake_model(asked: Mapping[str, Any] | None = None, seed: int = 0, settings_sha256: str = "settings") -> BatchModel:
    """What a batch knows of the model that the fake engine stands for."""
    return BatchModel("fake", ByteTokenizer(), VOCAB_SIZE, (END,), _sampling_params, asked or {}, seed, settings_sha256)


def _sampling_params(asked: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**asked)
