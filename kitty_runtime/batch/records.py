"""The lines of a batch's output: OpenAI's answers, and errors in place of them.

Besides OpenAI's fields each record has ``kitty``: the line's number, its hash and that of the settings, by which a
resumed batch knows what is done.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kitty_runtime.batch.parameters import Kind
from kitty_runtime.batch.problems import LineError, RowError
from kitty_runtime.batch.source import RowEntry
from kitty_runtime.engine.request import FinishReason, TokenLogprob
from kitty_runtime.errors import KittyError, MemoryLimitError, NumericsError, PoolError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON cannot write."""

_LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""Characters that JSON may leave as they are and many readers take for line ends."""


@dataclass
class Answer:
    """What the engine has brought one row so far."""

    entry: RowEntry
    kind: Kind
    num_prompt_tokens: int
    num_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None


def answer_record(answer: Answer, model: str, tokenizer: PreTrainedTokenizerBase, settings_sha256: str) -> Record:
    """The record of an answer that ended by itself or by a limit."""
    chat, text = answer.kind == "chat", "".join(answer.pieces)
    logprobs: Record | None = None
    if answer.logprobs is not None and chat:
        logprobs = {"content": [_chat_logprob(each, tokenizer) for each in answer.logprobs]}
    elif answer.logprobs is not None:
        logprobs = _completion_logprobs(answer.logprobs, tokenizer)
    choice: Record = {"index": 0}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice |= {"logprobs": logprobs, "finish_reason": answer.finish_reason}
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": answer.num_tokens,
            "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        },
    }
    return _record(answer.entry, settings_sha256, response=_response(200, body))


def row_error_record(entry: RowEntry, error: RowError, settings_sha256: str) -> Record:
    """A request that is wrong: status 400."""
    body = _error_body(error.message, "invalid_request_error", error.param, error.code)
    return _record(entry, settings_sha256, response=_response(400, body))


def engine_error_record(entry: RowEntry, error: KittyError, settings_sha256: str) -> Record:
    """A request that the engine could not finish: status 500."""
    codes = {MemoryLimitError: "out_of_memory", PoolError: "out_of_memory", NumericsError: "numerics_error"}
    code = next((codes[kind] for kind in codes if isinstance(error, kind)), "engine_error")
    message = f"{error.message} {error.hint}".strip()
    return _record(entry, settings_sha256, response=_response(500, _error_body(message, "server_error", None, code)))


def line_error_record(entry: RowEntry, error: LineError, settings_sha256: str) -> Record:
    """A line that cannot be read: no response."""
    problem = {"code": error.code, "line": entry.line, "message": error.message}
    return _record(entry, settings_sha256, error=problem)


def failed(record: Mapping[str, Any]) -> bool:
    """Whether a record is an error."""
    response = record.get("response")
    return not isinstance(response, dict) or response.get("status_code") != 200


def encoded(record: Record) -> bytes:
    """The record as one line of UTF-8 with its line end."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        if not any(end in text for end in _LINE_ENDS):
            return text.encode() + b"\n"
    except UnicodeEncodeError:  # an id with half a surrogate pair
        pass
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _record(
    entry: RowEntry, settings_sha256: str, response: Record | None = None, error: Record | None = None
) -> Record:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": entry.custom_id,
        "response": response,
        "error": error,
        "kitty": {"line": entry.line, "row_sha256": entry.row_sha256, "settings_sha256": settings_sha256},
    }


def _response(status_code: int, body: Record) -> Record:
    return {"status_code": status_code, "request_id": f"req_{uuid.uuid4().hex}", "body": body}


def _error_body(message: str, kind: str, param: str | None, code: str) -> Record:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _chat_logprob(logprob: TokenLogprob, tokenizer: PreTrainedTokenizerBase) -> Record:
    top = [_token(token_id, value, tokenizer) for token_id, value in logprob.top]
    return {**_token(logprob.token_id, logprob.logprob, tokenizer), "top_logprobs": top}


def _token(token_id: int, logprob: float, tokenizer: PreTrainedTokenizerBase) -> Record:
    text = _text(token_id, tokenizer)
    # a token can be part of a character: then its bytes are not those of the text
    return {"token": text, "logprob": _finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _completion_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> Record:
    tokens = [_text(each.token_id, tokenizer) for each in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(each.logprob) for each in logprobs],
        "top_logprobs": [{_text(i, tokenizer): _finite(value) for i, value in each.top} for each in logprobs],
        "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
    }


def _text(token_id: int, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([token_id]))


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)
