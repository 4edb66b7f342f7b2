"""From tokens to text while they come: whole characters only, and nothing that may yet be a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
"""What a tokenizer decodes bytes to that are no whole character yet."""

_MAX_PENDING = 8
"""Tokens after which bytes are no character that is still coming; the longest has four bytes."""


class TextStream:
    """The text of one answer.

    Args:
        context: the last tokens before the answer: how a tokenizer writes the first word depends on them.
        stop: texts that end the answer.
    """

    max_context = 8

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: list[int], stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._context, self._read = 0, len(self._ids)
        self._held = ""
        self._stop = stop
        self.stopped = False

    def add(self, token_id: int) -> str:
        """Text that is certain after one more token; sets `stopped` when a stop string is complete."""
        self._ids.append(token_id)
        return self._release(self._decoded())

    def finish(self) -> str:
        """The rest, when the answer has ended for another reason."""
        rest = self._decoded(final=True)
        text = self._release(rest)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decoded(self, final: bool = False) -> str:
        """Text that the tokens not yet read add to those before them."""
        before = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        incomplete = text.endswith(_REPLACEMENT) and len(self._ids) - self._read < _MAX_PENDING
        if len(text) <= len(before) or (incomplete and not final):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _release(self, text: str) -> str:
        """Take back what a stop string needs; hold what may begin one."""
        if self.stopped or not self._stop:
            return "" if self.stopped else text
        text, self._held = self._held + text, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        longest = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        if longest:
            text, self._held = text[:-longest], text[-longest:]
        return text
