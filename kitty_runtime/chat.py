"""A conversation with a model on one cache that carries over turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextStreamer

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import CacheConfig
from kitty_runtime.errors import DataError, MemoryLimitError
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.profiles import BoostProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFILL_CHUNK = 2048
"""Tokens per forward pass of a prompt: bounds the attention mask, changes no answer."""

Message = dict[str, str]


@dataclass(frozen=True)
class Reply:
    """One answer and what it took.

    Attributes:
        text: the answer.
        finish_reason: ``stop``, ``length`` or ``interrupted``.
        num_prompt_tokens: tokens read before the first new one; tokens already in the cache are not read again.
        num_new_tokens: tokens generated.
        prompt_s, generation_s: seconds to the first token, and from there to the last.
    """

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_new_tokens: int
    prompt_s: float
    generation_s: float


class ChatSession:
    """Messages, the tokens they became, and the cache that holds them.

    Args:
        model: with ``attn_implementation="kitty"``.
        tokenizer: with a chat template unless `raw`.
        config, profile: as `KittyCache` takes them.
        generation: values over the model's generation config; ``temperature`` 0 is greedy.
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
        generation: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        raw: bool = False,
    ) -> None:
        check_template(tokenizer, raw)
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.profile = profile
        self.generation = _generation_config(model, generation or {})
        self.system_prompt = system_prompt
        self.raw = raw
        self.messages: list[Message] = []
        self.clear()

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        self.forget_cache()

    def forget_cache(self) -> None:
        """Drop the cached tokens; the next reply reads the whole conversation again."""
        self.cache = KittyCache(self.model.config, self.config, self.profile)
        self._ids: list[int] = []
        self._text = ""

    @property
    def max_len(self) -> int | None:
        """Tokens the model was made for, or None."""
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return None if limit is None else int(limit)

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
            if not isinstance(problem, DataError):  # refused before the model ran
                self.forget_cache()  # layers may have stored different numbers of tokens
            if isinstance(problem, torch.OutOfMemoryError):
                raise MemoryLimitError(
                    "The conversation no longer fits in memory.", "Start over with /clear, or lower --bits."
                ) from problem
            raise

    def _answer(self, on_text: Callable[[str], None], should_stop: Callable[[], bool]) -> Reply:
        ids, prompt_text = self._prompt()
        if not ids:
            raise DataError("The message has no tokens.", "Write something.")
        room = None if self.max_len is None else self.max_len - len(ids)
        if room is not None and room <= 0:
            raise DataError(
                f"The conversation has {len(ids)} tokens, the model's context is {self.max_len}.",
                "Start over with /clear, or send a shorter message.",
            )
        config = GenerationConfig(**self.generation.to_dict())
        config.max_new_tokens = min(config.max_new_tokens, room) if room else config.max_new_tokens
        cached = self.cache.get_seq_length()
        streamer = _Streamer(self.tokenizer, _end_tokens(config), on_text, should_stop)
        input_ids = torch.tensor([ids], device=self.model.device)
        started = time.perf_counter()
        self._prefill(input_ids[:, cached:-1])
        out = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([streamer.stopping]),
            **{cache_kwarg(self.model): self.cache},
        )
        finished = time.perf_counter()
        new_ids = out[0, len(ids) :].tolist()
        ended = bool(new_ids) and new_ids[-1] in _end_tokens(config)
        kept = new_ids[:-1] if ended else new_ids
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        self._ids, self._text = ids + kept, prompt_text + text
        self.messages.append({"role": "assistant", "content": text})
        interrupted = streamer.stopping.stopped and not ended
        first = streamer.first_token_at or finished
        return Reply(
            text=text,
            finish_reason="stop" if ended else "interrupted" if interrupted else "length",
            num_prompt_tokens=len(ids) - cached,
            num_new_tokens=len(new_ids),
            prompt_s=first - started,
            generation_s=finished - first,
        )

    @torch.no_grad()
    def _prefill(self, input_ids: torch.Tensor) -> None:
        """Read all but a prompt's last token; ``generate()`` of transformers 5.17 cannot continue a cache in chunks."""
        for chunk in input_ids.split(PREFILL_CHUNK, dim=1):
            if chunk.shape[1]:
                arguments = {cache_kwarg(self.model): self.cache, "use_cache": True, "logits_to_keep": 1}
                self.model(input_ids=chunk, **arguments)

    def _prompt(self) -> tuple[list[int], str]:
        """Token ids and text of the conversation; ids that are cached stay as they were generated."""
        text = self._conversation()
        if not (self._text and text.startswith(self._text)):
            if self._ids:  # the template rewrote an earlier turn, as some do with thoughts
                self.forget_cache()
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
        self.forget_cache()
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


def _generation_config(model: PreTrainedModel, given: Mapping[str, Any]) -> GenerationConfig:
    """The model's generation config with the values given; transformers is told greedy or sampling."""
    of_model, asked = (
        {k: v for k, v in some.items() if v is not None} for some in (model.generation_config.to_dict(), given)
    )
    values = of_model | asked
    temperature = given.get("temperature")
    if temperature == 0:
        values["do_sample"] = False
        for name in ("temperature", "top_p", "top_k", "min_p"):
            values.pop(name, None)
    elif any(given.get(name) is not None for name in ("temperature", "top_p", "top_k", "min_p")):
        values["do_sample"] = True
    values.pop("max_length", None)
    return GenerationConfig(**values)


def _end_tokens(config: GenerationConfig) -> list[int]:
    end = config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


class _Stopping(StoppingCriteria):  # type: ignore[misc]
    """Ends generation after the token during which `should_stop` became true."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self.stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.stopped = self.stopped or self._should_stop()
        return torch.full((input_ids.shape[0],), self.stopped, device=input_ids.device, dtype=torch.bool)


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Hands decoded text on, without the end token, and notes when the first token came."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: list[int],
        on_text: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.first_token_at: float | None = None
        self.stopping = _Stopping(should_stop)
        self._end_tokens = end_tokens
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.first_token_at = self.first_token_at or time.perf_counter()
            if int(value) in self._end_tokens:  # some tokenizers do not know theirs as special
                return
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)
