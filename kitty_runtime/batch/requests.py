"""From a row to the engine's request: the chat template, tokens, and the batch's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitty_runtime.batch.lines import BatchRow, Message
from kitty_runtime.batch.parameters import sampling_params
from kitty_runtime.batch.problems import RowError
from kitty_runtime.batch.settings import row_seed
from kitty_runtime.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BatchModel:
    """What a batch knows of the model.

    Attributes:
        name: in the answers.
        tokenizer: of transformers.
        vocab_size: token ids that the model has embeddings for.
        end_tokens: ids that end an answer.
        sampling: settings out of what is asked for, by the names of `SamplingParams`; the rest is the model's own.
        asked: what the batch asks for where a line says nothing.
        seed: of the batch; with a row's id it gives the row's seed: same file, same answers, in whatever order.
        settings_sha256: see `settings.settings_sha256`.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    end_tokens: tuple[int, ...]
    sampling: Callable[[Mapping[str, Any]], SamplingParams]
    asked: Mapping[str, Any]
    seed: int
    settings_sha256: str


def request_of(row: BatchRow, model: BatchModel) -> Request:
    """
    Raises:
        RowError: no chat template or one that refuses the messages, no tokens, or tokens that the model lacks.
    """
    param = "messages" if row.messages is not None else "prompt"
    ids = _prompt_ids(row, model.tokenizer)
    if not ids:
        raise RowError(f"{param} has no tokens.", param)
    _check_ids(param, ids, model.vocab_size)
    return Request(row.custom_id, ids, _sampling(row, model))


def _prompt_ids(row: BatchRow, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if row.messages is not None:
        text, special = _conversation(row, row.messages, tokenizer), False  # the template writes them
    elif isinstance(row.prompt, str):
        text, special = row.prompt, True
    else:
        return row.prompt or ()
    # verbose=False: the engine says what is too long
    return tuple(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _conversation(row: BatchRow, messages: tuple[Message, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        message = "The model has no chat template. Use a prompt, or an instruction-tuned model."
        raise RowError(message, "messages", "no_chat_template")
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **row.template_options
            )
        )
    except Exception as error:  # a template is a program of its own: whatever it raises is the row's error
        message = f"The chat template refuses the messages: {error or type(error).__name__}"
        raise RowError(message, "messages", "chat_template_error") from error


def _check_ids(param: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """An id without an embedding would be read beyond the table's end."""
    if ids and max(ids) >= vocab_size:
        raise RowError(f"{param} has the token {max(ids)}, the model has {vocab_size}.", param, "invalid_token")


def _sampling(row: BatchRow, model: BatchModel) -> SamplingParams:
    asked = {**model.asked, **row.sampling.values}
    asked.setdefault("seed", row_seed(model.seed, row.custom_id))
    own = tuple(asked.get("stop_token_ids", ()))
    _check_ids("stop_token_ids", own, model.vocab_size)
    end = () if row.sampling.ignore_eos else model.end_tokens
    asked["stop_token_ids"] = tuple(dict.fromkeys((*own, *end)))
    return sampling_params(asked, model.sampling)
