"""One line of a batch's input: an OpenAI Batch line or a simple one, read into a `BatchRow`.

OpenAI Batch: ``{"custom_id", "method", "url", "body"}`` with chat completions and completions. Simple:
``{"id"?, "prompt" | "messages", ...}`` with the parameters beside the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kitty_runtime.batch import parameters
from kitty_runtime.batch.parameters import GivenSampling, Kind
from kitty_runtime.batch.problems import LineError, RowError, shown

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is no request; it is not even read into memory whole."""

MAX_ID_LEN = 512
"""Characters of a custom_id."""

URLS: Mapping[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
ROLES = ("system", "developer", "user", "assistant")

RowKey = str | int
"""What a row is known by: its custom_id, or the number of a line that has no id that can be read."""

Message = dict[str, str]

_ENVELOPE = ("method", "url", "body")
_WHITESPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BatchRow:
    """A request as its line asks for it.

    Attributes:
        custom_id: unique in the batch; ``line-N`` for a simple line without an id.
        kind: which of OpenAI's two answers it gets.
        messages: of a chat; None for a prompt.
        prompt: text or token ids; None for a chat.
        sampling: what the line says about sampling.
        template_options: variables for the chat template.
    """

    custom_id: str
    kind: Kind
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    sampling: GivenSampling = field(default_factory=GivenSampling)
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """What is known about a line without checking its request.

    Attributes:
        key: the custom_id; the line's number if it has none that can be read.
        model: the model that the line asks for, or "".
        ignored: fields of a simple line that are no parameters.
    """

    key: RowKey
    model: str = ""
    ignored: tuple[str, ...] = ()


def strip_line(raw: bytes) -> bytes:
    """The line without a byte order mark, line ends and blanks around it."""
    return raw.strip(_WHITESPACE).removeprefix(_BOM).strip(_WHITESPACE)


def row_sha256(stripped: bytes) -> str:
    """What tells whether a line was edited."""
    return hashlib.sha256(stripped).hexdigest()


def identify(stripped: bytes, line: int) -> Identity:
    """
    Args:
        stripped: as `strip_line` gives it.
        line: its number, from 1.
    """
    try:
        fields = _read_object(stripped)
        custom_id = _custom_id(fields, line)
    except LineError:
        return Identity(line)
    body = _body(fields)
    model = body.get("model")
    simple = not _is_envelope(fields)
    return Identity(
        custom_id,
        model if isinstance(model, str) else "",
        tuple(name for name in parameters.unknown_names(body) if name not in ("id", "custom_id")) if simple else (),
    )


def parse_row(stripped: bytes, line: int) -> BatchRow:
    """
    Args:
        stripped: as `strip_line` gives it.
        line: its number, from 1.
    Raises:
        LineError: it cannot be read as a request with an id.
        RowError: a request that cannot be answered.
    """
    fields = _read_object(stripped)
    custom_id = _custom_id(fields, line)
    if _is_envelope(fields):
        kind, body = _envelope(fields)
        parameters.check_names(body, strict=True)
    else:
        body = fields
        kind = _simple_kind(body)
        parameters.check_names(body, strict=False)
    return BatchRow(
        custom_id,
        kind,
        messages=_messages(body) if kind == "chat" else None,
        prompt=_prompt(body) if kind == "completions" else None,
        sampling=parameters.given_sampling(body, kind),
        template_options=parameters.template_options(body),
    )


def _read_object(stripped: bytes) -> dict[str, Any]:
    """
    Raises:
        LineError: not UTF-8, not JSON, or not an object.
    """
    if len(stripped) > MAX_LINE_BYTES:
        raise too_large(len(stripped))
    try:
        text = stripped.decode()
    except UnicodeDecodeError as error:
        raise LineError("not_utf8", f"The line is not UTF-8 text (byte {error.start}).") from error
    try:
        value = _DECODER.decode(text)
    except LineError:  # a ValueError too
        raise
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"The line is not JSON: {error.msg} (character {error.pos}).") from error
    except RecursionError as error:
        raise LineError("invalid_json", "The line is nested too deeply.") from error
    except ValueError as error:  # an integer of thousands of digits
        raise LineError("invalid_json", "The line has a number that is too long.") from error
    if not isinstance(value, dict):
        raise LineError("not_an_object", f"The line is {shown(value)}, not an object.")
    return value


def too_large(num_bytes: int) -> LineError:
    """For a line of so many bytes."""
    return LineError("line_too_large", f"The line has {num_bytes} bytes, {MAX_LINE_BYTES} are the limit.")


def _no_constant(name: str) -> NoReturn:
    raise LineError("invalid_json", f"The line has {name}, which is not JSON.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise LineError("duplicate_key", f"The line gives {shown(double)} twice in one object.")
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)


def _is_envelope(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in _ENVELOPE)


def _body(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters, as far as there are any."""
    body = fields.get("body") if _is_envelope(fields) else fields
    return body if isinstance(body, dict) else {}


def _custom_id(fields: Mapping[str, Any], line: int) -> str:
    """
    Raises:
        LineError: there is none that can be used.
    """
    found = fields.get("custom_id")
    if found is None and not _is_envelope(fields):
        found = fields.get("id")
        if found is None:
            return f"line-{line}"
        if isinstance(found, int) and not isinstance(found, bool):  # tables have numbers
            found = str(found)
    if not isinstance(found, str) or not 0 < len(found) <= MAX_ID_LEN:
        value = "missing" if found is None else shown(found)
        raise LineError("invalid_custom_id", f"The line's id is {value}. Use a string of 1 to {MAX_ID_LEN} characters.")
    if any("\ud800" <= character <= "\udfff" for character in found):  # half a character cannot be written as UTF-8
        raise LineError("invalid_custom_id", f"The line's id is {shown(found)}. Use whole characters.")
    return found


def _envelope(fields: Mapping[str, Any]) -> tuple[Kind, Mapping[str, Any]]:
    """
    Raises:
        RowError: not a request that kitty answers.
    """
    method, url, body = (fields.get(name) for name in _ENVELOPE)
    if method is not None and method != "POST":
        raise RowError(f"method is {shown(method)}. Use POST.", "method")
    if not isinstance(url, str) or url not in URLS:
        raise RowError(f"url is {shown(url)}. Use {' or '.join(URLS)}.", "url", "invalid_url")
    if not isinstance(body, dict):
        raise RowError(f"body is {shown(body)}. Use an object.", "body", "invalid_type")
    return URLS[url], body


def _simple_kind(body: Mapping[str, Any]) -> Kind:
    given = [name for name in ("prompt", "messages") if body.get(name) is not None]
    if len(given) != 1:
        raise RowError("The line needs a prompt or messages, one of them.", "prompt", "missing_parameter")
    return "completions" if given == ["prompt"] else "chat"


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    """
    Raises:
        RowError: no text and no token ids.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(item, (str, list)) for item in prompt):
        if len(prompt) > 1:
            raise RowError(f"prompt is a list of {len(prompt)} prompts. Use one prompt per line.", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        parameters.check_text("prompt", prompt)
        return prompt
    if isinstance(prompt, list):
        return parameters.token_ids("prompt", prompt)
    code = "missing_parameter" if prompt is None else "invalid_type"
    raise RowError(f"prompt is {shown(prompt)}. Use a string or a list of token ids.", "prompt", code)


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """
    Raises:
        RowError: not a conversation in text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        code = "missing_parameter" if messages is None else "invalid_type"
        raise RowError(f"messages is {shown(messages)}. Use a list of messages.", "messages", code)
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"{name} is {shown(message)}. Use an object.", name, "invalid_type")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"{name}.role is {shown(role)}. Use {', '.join(ROLES)}.", f"{name}.role")
    for tool in ("tool_calls", "function_call"):
        if message.get(tool):
            raise RowError(f"{name}.{tool}: tools are not supported.", f"{name}.{tool}", "unsupported_parameter")
    content = _content(message.get("content"), f"{name}.content")
    # templates know the older of the two names
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(content: object, name: str) -> str:
    """Text, or the text of all parts."""
    if isinstance(content, list):
        for i, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise RowError(f"{name}[{i}] is {shown(kind)}: not text.", f"{name}[{i}]", "unsupported_content")
            if not isinstance(part.get("text"), str):
                raise RowError(f"{name}[{i}].text is missing.", f"{name}[{i}].text", "invalid_type")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowError(f"{name} is {shown(content)}. Use a string or text parts.", name, "invalid_type")
    parameters.check_text(name, content)
    return content
