"""What the engine is asked for and what it answers: requests, sampling settings, events. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kitty_runtime.errors import ConfigError, KittyError

FinishReason = Literal["stop", "length", "aborted", "error"]
"""stop: an end token or stop string. length: the token limit, the context or the pool. aborted: by the caller.
error: see `Event.error`."""

MAX_LOGPROBS = 20
"""Alternatives per token that can be asked for, as in the OpenAI API."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen; applied in the order temperature, top_k, top_p, min_p.

    Attributes:
        max_tokens: new tokens at the most; None = as many as the context and the pool hold.
        temperature: divides the logits; 0, or so little that they would overflow, is greedy.
        top_k: keep this many of the likeliest tokens; 0 = all.
        top_p: keep the likeliest tokens up to this mass.
        min_p: drop tokens below this share of the likeliest.
        repetition_penalty: above 1, tokens of the prompt and the answer become less likely.
        seed: same seed and same tokens, same choice, whatever else runs; None = one from the request's number.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer: the model's end tokens and the request's own.
        min_tokens: no end token is chosen before so many new tokens.
        suppress_tokens: tokens that are never chosen.
        num_logprobs: alternatives to report per token, 0 = only the chosen token's; None = no logprobs.
    Raises:
        ConfigError: a value out of range; its message begins with the attribute's name.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(name: str, good: bool, what: str) -> None:
            if not good:
                raise ConfigError(f"{name} is {getattr(self, name)!r}.", f"Use {what}.")

        def is_int(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def is_number(value: object) -> bool:
            return is_int(value) or (isinstance(value, float) and math.isfinite(value))

        def are_texts(values: object) -> bool:
            return isinstance(values, tuple | list) and all(isinstance(text, str) and text for text in values)

        need("max_tokens", self.max_tokens is None or (is_int(self.max_tokens) and self.max_tokens >= 1), "1 or more")
        need("temperature", is_number(self.temperature) and self.temperature >= 0, "a number, 0 or more")
        need("top_k", is_int(self.top_k) and self.top_k >= 0, "a number of tokens, 0 for all")
        need("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a share above 0, up to 1")
        need("min_p", is_number(self.min_p) and 0 <= self.min_p <= 1, "a share from 0 to 1")
        need("repetition_penalty", is_number(self.repetition_penalty) and self.repetition_penalty > 0, "above 0")
        need("seed", self.seed is None or (is_int(self.seed) and -(2**63) <= self.seed < 2**63), "a 64-bit integer")
        need("stop", are_texts(self.stop), "a tuple of texts that are not empty")
        need("min_tokens", is_int(self.min_tokens) and self.min_tokens >= 0, "0 or more")
        good = self.num_logprobs is None or (is_int(self.num_logprobs) and 0 <= self.num_logprobs <= MAX_LOGPROBS)
        need("num_logprobs", good, f"0 to {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        id: unique among the requests that the engine holds.
        prompt_ids: at least one token.
        keep: whether the cache keeps the tokens afterwards, for a request that names this one in `continues`.
        continues: id of a kept request whose tokens `prompt_ids` begins with; what is stored is not read again.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    keep: bool = False
    continues: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of probabilities before temperature: of the chosen token, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """What one step brought one request.

    Attributes:
        token_id: the new token; None if the request ended without one.
        text: text that is now certain; what might become a stop string or half a character is held back.
        logprob: of the token, if asked for.
        finish_reason: set once, on the request's last event.
        error: why, if the reason is ``error``.
    """

    request_id: str
    token_id: int | None = None
    text: str = ""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    error: KittyError | None = None
