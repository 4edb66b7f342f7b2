"""The sampling parameters of a request: OpenAI's names, and those that vLLM adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kitty_runtime.batch.problems import RowError, shown
from kitty_runtime.engine.request import MAX_LOGPROBS, SamplingParams
from kitty_runtime.errors import ConfigError

Kind = Literal["chat", "completions"]

MAX_STOPS = 16
"""Stop strings of one request."""

_MAX_INT = 2**31 - 1
_MAX_TEMPERATURE = 100.0

_INTS = ("max_tokens", "top_k", "min_tokens")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
SUPPORTED = frozenset(
    {
        *_INTS,
        *_NUMBERS,
        "max_completion_tokens",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
        "prompt",
        "messages",
    }
)

IGNORED = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
        "stream_options",
        "priority",
        "request_id",
    }
)
"""Parameters that change no answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "images": ([],),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "documents": ([],),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
}
"""Parameters that are not supported, with the values that ask for nothing."""

_TEMPLATE_ARGUMENTS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "tokenize",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of ``apply_chat_template`` that are not variables of the template."""


@dataclass(frozen=True)
class GivenSampling:
    """What a request says itself about sampling; the rest comes from the batch's defaults.

    Attributes:
        values: fields of `SamplingParams`.
        ignore_eos: whether the model's end tokens do not end the answer.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False


def check_names(body: Mapping[str, Any], strict: bool) -> None:
    """
    Args:
        strict: whether a name that kitty does not know is an error.
    Raises:
        RowError: a parameter that is not supported would change the answer, or is unknown.
    """
    for name, value in body.items():
        if name in SUPPORTED or name in IGNORED or value is None:
            continue
        if name in NEUTRAL:
            if not any(_equal(value, neutral) for neutral in NEUTRAL[name]):
                allowed = " or ".join(map(repr, NEUTRAL[name]))
                hint = f"Use {allowed}, or leave it out." if allowed else "Leave it out."
                raise RowError(f"{name} is {shown(value)}: not supported. {hint}", name, "unsupported_parameter")
        elif strict:
            raise RowError(f"There is no parameter {shown(name)}.", shown(name).strip("'"), "unknown_parameter")


def unknown_names(body: Mapping[str, Any]) -> list[str]:
    """Names that are no parameters: in a simple line, columns of the user's own."""
    return [name for name in body if name not in SUPPORTED and name not in IGNORED and name not in NEUTRAL]


def given_sampling(body: Mapping[str, Any], kind: Kind) -> GivenSampling:
    """
    Raises:
        RowError: a value of the wrong type or out of range.
    """
    body = {name: value for name, value in body.items() if value is not None}
    values: dict[str, Any] = {}
    for name in (*_INTS, "max_completion_tokens", "seed"):
        if name in body:
            values[name] = _int(name, body[name])
    _merge_max_tokens(values)
    for name in _NUMBERS:
        if name in body:
            values[name] = _number(name, body[name])
    if values.get("top_k") == -1:  # vLLM's word for all
        values["top_k"] = 0
    if values.get("temperature", 0) > _MAX_TEMPERATURE:
        raise RowError(f"temperature is {values['temperature']}. Use 0 to {_MAX_TEMPERATURE:.0f}.", "temperature")
    if "stop" in body:
        values["stop"] = _stops(body["stop"])
    if "stop_token_ids" in body:
        values["stop_token_ids"] = token_ids("stop_token_ids", body["stop_token_ids"])
    num_logprobs = _num_logprobs(body, kind)
    if num_logprobs is not None:
        values["num_logprobs"] = num_logprobs
    sampling_params(values)
    return GivenSampling(values, _bool("ignore_eos", body.get("ignore_eos", False)))


def sampling_params(
    values: Mapping[str, Any],
    make: Callable[[Mapping[str, Any]], SamplingParams] = lambda values: SamplingParams(**values),
) -> SamplingParams:
    """
    Args:
        make: what turns the values into settings, such as a model with defaults of its own.
    Raises:
        RowError: a value out of range.
    """
    try:
        params = make(values)
    except ConfigError as error:  # its message begins with the attribute's name
        raise RowError(f"{error.message} {error.hint}", error.message.partition(" ")[0]) from error
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RowError(f"min_tokens is {params.min_tokens}, max_tokens {params.max_tokens}.", "min_tokens")
    return params


def template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables for the chat template, such as ``{"enable_thinking": false}``.

    Raises:
        RowError: not an object, or a name that is no variable of a template.
    """
    options = body.get("chat_template_kwargs")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise _wrong_type("chat_template_kwargs", options, "an object")
    for name in options:
        if name in _TEMPLATE_ARGUMENTS:
            raise RowError(f"chat_template_kwargs cannot set {name}.", "chat_template_kwargs")
    return options


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """
    Raises:
        RowError: not a list of token ids.
    """
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= _MAX_INT for item in value):
        raise _wrong_type(name, value, "a list of token ids")
    return tuple(value)


def _merge_max_tokens(values: dict[str, Any]) -> None:
    """Chat completions call it max_completion_tokens by now; both names mean the same here."""
    newer = values.pop("max_completion_tokens", None)
    if newer is not None and values.setdefault("max_tokens", newer) != newer:
        raise RowError(f"max_completion_tokens is {newer}, max_tokens {values['max_tokens']}.", "max_completion_tokens")


def _num_logprobs(body: Mapping[str, Any], kind: Kind) -> int | None:
    """Alternatives asked for: chat says ``logprobs: true, top_logprobs: 5``, completions ``logprobs: 5``."""
    if kind == "completions":
        if "top_logprobs" in body:
            raise RowError("top_logprobs belongs to messages. Use logprobs: 5.", "top_logprobs")
        name, wanted = "logprobs", body.get("logprobs")
        if wanted is None or wanted is False:
            return None
    else:
        name, wanted = "top_logprobs", body.get("top_logprobs", 0)
        if not _bool("logprobs", body.get("logprobs", False)):
            if wanted != 0:
                raise RowError("top_logprobs needs logprobs: true.", "top_logprobs")
            return None
    number = _int(name, wanted)
    if not 0 <= number <= MAX_LOGPROBS:
        raise RowError(f"{name} is {number}. Use 0 to {MAX_LOGPROBS}.", name)
    return number


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong_type("stop", value, "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise RowError(f"stop has {len(stops)} strings. Use up to {MAX_STOPS}.", "stop")
    for stop in stops:
        check_text("stop", stop)
    return tuple(stops)


def check_text(name: str, text: str) -> None:
    """
    Raises:
        RowError: half a surrogate pair, which JSON can write and no tokenizer reads.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{name} has half a surrogate pair at character {error.start}: no text."
        raise RowError(message, name, "invalid_unicode") from error


def _int(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():  # tables write integers so
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, value, "an integer")
    if name != "seed" and abs(value) > _MAX_INT:
        raise RowError(f"{name} is {shown(value)}. Use {_MAX_INT} at the most.", name)
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong_type(name, value, "a number")
    if abs(value) > _MAX_INT:  # also infinity, and integers that no float holds
        raise RowError(f"{name} is {shown(value)}: too large.", name)
    return float(value)


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")
    return value


def _wrong_type(name: str, value: object, wanted: str) -> RowError:
    return RowError(f"{name} is {shown(value)}. Use {wanted}.", name, "invalid_type")


def _equal(value: object, neutral: object) -> bool:
    """Equal, where true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
