"""A conversation with a model on the engine: one sequence whose tokens stay stored over turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from kitty_runtime.cache.paged_cache import CacheBytes
from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.defaults import sampling_params
from kitty_runtime.engine.engine import Engine
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.request import Event, FinishReason, Request, SamplingParams
from kitty_runtime.errors import DataError, KittyError, MemoryLimitError
from kitty_runtime.memory import sequence_bytes
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.profiles import BoostProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, str]


@dataclass(frozen=True)
class Reply:
    """One answer and what it took.

    Attributes:
        text: the answer.
        finish_reason: ``aborted`` if `should_stop` ended it.
        num_prompt_tokens: tokens read before the first new one; tokens already in the cache are not read again.
        num_new_tokens: tokens generated.
        prompt_s, generation_s: seconds to the first token, and from there to the last.
    """

    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_new_tokens: int
    prompt_s: float
    generation_s: float


class ChatSession:
    """Messages, the tokens they became, and the engine that stores them.

    Args:
        model: its attention becomes the engine's.
        tokenizer: with a chat template unless `raw`.
        config, profile: settings of the cache.
        sampling: values over the model's generation config, by the names of `SamplingParams`.
        system_prompt: first message; empty for the template's own.
        raw: no chat template; the model continues the text of all messages.
    Raises:
        DataError: no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: CacheConfig,
        profile: BoostProfile | None = None,
        sampling: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        raw: bool = False,
    ) -> None:
        check_template(tokenizer, raw)
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling_params(model, tokenizer, sampling or {})
        self.engine = Engine(model, tokenizer, config, profile, EngineLimits(max_num_seqs=1))
        self.system_prompt = system_prompt
        self.raw = raw
        self.messages: list[Message] = []
        self._turns = itertools.count()
        self._turn = ""
        """Id of the request that holds the conversation's tokens."""
        self.clear()

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        self.forget_tokens()

    def forget_tokens(self) -> None:
        """Drop the stored tokens; the next reply reads the whole conversation again."""
        self.engine.drop_kept(self._turn)
        self._ids: list[int] = []
        self._text = ""

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values are in the cache."""
        kept = self.engine.scheduler.kept.get(self._turn)
        return 0 if kept is None else kept.num_stored

    def used_bytes(self) -> CacheBytes:
        """Bytes that the stored tokens take."""
        return self.engine.used_bytes()

    def dense_bytes(self) -> int:
        """Bytes of the same tokens at 16 bits."""
        return sequence_bytes(layers_of(self.model.config), self.engine.config, self.num_stored).dense

    def reply(
        self, content: str, on_text: Callable[[str], None], should_stop: Callable[[], bool] = lambda: False
    ) -> Reply:
        """Answer a message; the message and the answer join the conversation.

        Args:
            content: the user's message.
            on_text: called with each piece of the answer as it is decoded.
            should_stop: asked after every token; True ends the answer there.
        Raises:
            DataError: the conversation has outgrown the model's context, or the message is no text.
            MemoryLimitError, NumericsError: the model failed.
        """
        try:
            content.encode()
        except UnicodeEncodeError as error:  # bytes that a terminal or a command line could not decode
            raise DataError("The message is not UTF-8 text.", "Write it anew.") from error
        self.messages.append({"role": "user", "content": content})
        try:
            return self._answer(on_text, should_stop)
        except BaseException as problem:
            self.messages.pop()
            if not isinstance(problem, DataError):  # those are refused before the model runs
                self.engine.abandon()
                self.forget_tokens()
            raise

    def _answer(self, on_text: Callable[[str], None], should_stop: Callable[[], bool]) -> Reply:
        ids, prompt_text = self._prompt()
        if not ids:
            raise DataError("The message has no tokens.", "Write something.")
        limit = min(self.engine.max_model_len, self.engine.pool_size.longest_sequence)
        if len(ids) >= limit:
            what = "model's context is" if limit == self.engine.max_model_len else "cache's memory holds"
            raise DataError(
                f"The conversation has {len(ids)} tokens, the {what} {limit}.",
                "Start over with /clear, or send a shorter message.",
            )
        num_stored, turn = self.num_stored, f"turn-{next(self._turns)}"
        started = time.perf_counter()
        self.engine.add(Request(turn, tuple(ids), self._capped(limit - len(ids)), keep=True, continues=self._turn))
        self._turn = turn
        first, new_ids, pieces = started, list[int](), list[str]()
        reason: FinishReason | None = None
        while reason is None:
            for event in self._next_events(bool(new_ids) and should_stop()):
                if event.error is not None:
                    raise _explained(event.error)
                if event.token_id is not None:
                    first = time.perf_counter() if not new_ids else first
                    new_ids.append(event.token_id)
                if event.text:
                    pieces.append(event.text)
                    on_text(event.text)
                reason = event.finish_reason
        finished = time.perf_counter()
        ended = reason == "stop" and new_ids[-1] in self.sampling.stop_token_ids
        self._ids, self._text = ids + (new_ids[:-1] if ended else new_ids), prompt_text + "".join(pieces)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        return Reply(
            text="".join(pieces),
            finish_reason=reason,
            num_prompt_tokens=len(ids) - num_stored,
            num_new_tokens=len(new_ids),
            prompt_s=first - started,
            generation_s=finished - first,
        )

    def _next_events(self, stop: bool) -> list[Event]:
        aborted = self.engine.abort(self._turn) if stop else None
        return self.engine.step() if aborted is None else [aborted]

    def _capped(self, room: int) -> SamplingParams:
        """The settings, with no more tokens than there is room for: an answer ends there, it is not refused."""
        return replace(self.sampling, max_tokens=min(room, self.sampling.max_tokens or room))

    def _prompt(self) -> tuple[list[int], str]:
        """Token ids and text of the conversation; ids that are stored stay as they were generated."""
        text = self._conversation()
        if not (self._text and text.startswith(self._text)):
            if self._ids:  # the template rewrote an earlier turn, as some do with thoughts
                self.forget_tokens()
            return self.tokenizer(text, add_special_tokens=self.raw)["input_ids"], text
        added = self.tokenizer(text[len(self._text) :], add_special_tokens=False)["input_ids"]
        return self._ids + added, text

    def _conversation(self) -> str:
        if self.raw:
            return "".join(message["content"] for message in self.messages)
        try:
            return str(self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:  # such as a template without a system role
            raise DataError(
                f"The model's chat template refuses the conversation: {error}",
                "Start over with /clear, leave the system prompt out, or use --raw.",
            ) from error

    def regenerate(self) -> str:
        """Take back the last answer and its question, which is returned; the cache starts over.

        Raises:
            DataError: nothing has been answered.
        """
        if [message["role"] for message in self.messages[-2:]] != ["user", "assistant"]:
            raise DataError("There is no answer to generate again.", "Send a message first.")
        self.messages.pop()
        question = self.messages.pop()["content"]
        self.forget_tokens()
        return question


def check_template(tokenizer: PreTrainedTokenizerBase, raw: bool) -> None:
    """
    Raises:
        DataError: no chat template, and the text is not to be continued `raw`.
    """
    if not raw and not tokenizer.chat_template:
        raise DataError(
            "The model has no chat template.",
            "Use an instruction-tuned model, or --raw to let it continue the text.",
        )


def _explained(error: KittyError) -> KittyError:
    if isinstance(error, MemoryLimitError):
        return MemoryLimitError(
            "The conversation no longer fits in memory.", "Start over with /clear, or lower --bits."
        )
    return error
