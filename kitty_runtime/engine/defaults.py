"""A model's own generation settings as the engine's, with what a user asks for on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kitty_runtime.engine.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "suppress_tokens")
_ASKS_TO_SAMPLE = ("temperature", "top_k", "top_p", "min_p")


def sampling_params(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, asked: Mapping[str, Any]
) -> SamplingParams:
    """Settings of a request.

    Args:
        model: its generation config gives what is not asked for, and the end tokens. A model that does not sample by
            itself stays greedy until a temperature or filter is asked for.
        asked: values by the names of `SamplingParams`; None = the model's own.
    Raises:
        ConfigError: a value out of range, or a name that there is not.
    """
    own = model.generation_config
    given = {name: value for name, value in asked.items() if value is not None}
    values = {name: getattr(own, name, None) for name in _FROM_MODEL}
    values = {name: value for name, value in values.items() if value is not None} | given
    samples = own.do_sample or any(name in given for name in _ASKS_TO_SAMPLE)
    if not samples:
        values["temperature"] = 0.0
    if "stop_token_ids" not in given:
        values["stop_token_ids"] = end_tokens(model, tokenizer)
    values["suppress_tokens"] = tuple(values.get("suppress_tokens", ()))
    return SamplingParams(**values)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Tokens that end an answer: those of the generation config and the tokenizer's."""
    own = model.generation_config.eos_token_id
    found = [] if own is None else [own] if isinstance(own, int) else list(own)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))
