"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kitty_runtime.cache.paged_cache import CacheBytes
from kitty_runtime.config import DEFAULT_PRESET, CacheConfig, preset
from kitty_runtime.engine.cache import EngineCache
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.pool_size import PoolSize, cache_cost, size_pool
from kitty_runtime.engine.request import Event, FinishReason, Request, TokenLogprob
from kitty_runtime.engine.runner import Runner
from kitty_runtime.engine.sampler import NO_TOKEN, Sampled, SamplingBatch, sample
from kitty_runtime.engine.scheduler import Scheduler
from kitty_runtime.engine.sequence import PENDING, Sequence
from kitty_runtime.engine.text import TextStream
from kitty_runtime.errors import ConfigError, DataError, KittyError, MemoryLimitError, NumericsError
from kitty_runtime.memory import runtime_bytes
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.models.preflight import free_bytes
from kitty_runtime.profiles import BoostProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CPU_KV_SHARE = 0.25
"""Share of the free memory that the cache takes on a CPU, where other programs live too."""


@dataclass
class Counters:
    """What a service would watch; counts since the start unless they say otherwise.

    Attributes:
        num_waiting, num_running, pages_used: now.
        prompt_tokens: tokens read in prompt passes, those read again included; generation_tokens: tokens generated.
    """

    num_steps: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0


@dataclass(frozen=True)
class _Launched:
    """A pass whose tokens the host has not read: ``sequences[i]`` gets its choice as token number ``places[i]``."""

    sequences: list[Sequence]
    places: list[int]
    sampled: Sampled


class Engine:
    """Continuous batching of a model on one page pool.

    Args:
        model: its attention becomes the engine's.
        tokenizer: None gives events without text, and no stop strings.
        config, profile: settings of the cache.
        limits: memory and batch sizes.
    Raises:
        UnsupportedModelError: a layer that the engine cannot run.
        MemoryLimitError: the memory does not hold one sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: CacheConfig | None = None,
        profile: BoostProfile | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        self.config, self.limits = config or preset(DEFAULT_PRESET), limits or EngineLimits()
        if self.config.prefill != "paged":
            raise ConfigError("prefill is 'full'.", "The engine reads prompts in chunks: use prefill='paged'.")
        self.model, self.tokenizer = model, tokenizer
        text_config = model.config.get_text_config(decoder=True)
        layers = layers_of(model.config)
        of_model = getattr(text_config, "max_position_embeddings", None)
        known = [n for n in (of_model, self.limits.max_model_len) if n is not None]
        self.max_model_len = min(known, default=2**24)
        cost = cache_cost(layers, self.config, profile, model.dtype)
        if self.limits.num_pages is None:
            self.pool_size = size_pool(
                self.config, cost, self._kv_bytes(), self.limits.max_num_seqs, self.max_model_len
            )
        else:
            num_slots = self.limits.max_num_seqs
            self.pool_size = PoolSize.of(self.config, cost, self.limits.num_pages, num_slots, self.max_model_len)
        self.cache = EngineCache(model.config, layers, self.config, profile, self.pool_size, model.dtype, model.device)
        self.scheduler = Scheduler(
            self.config, self.pool_size.num_pages, self.pool_size.num_slots, self.limits.max_batch_tokens
        )
        max_pages = min(self.pool_size.num_pages, self.scheduler.pages_for(self.max_model_len))
        self.runner = Runner(model, self.cache, max_pages, self.limits.capture, self.limits.compiled)
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[str, TextStream] = {}
        self._special_ids = set() if tokenizer is None else set(tokenizer.all_special_ids)
        self._arrivals = itertools.count()
        self.observe: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Entered around every pass, with ``prompts`` or ``decode``: for those who measure."""
        self._sampling: SamplingBatch | None = None
        self._launched: list[_Launched] = []
        self._runs_ahead = model.device.type == "cuda" if self.limits.run_ahead is None else self.limits.run_ahead
        self._counters = Counters(pages_total=self.pool_size.num_pages)

    def _kv_bytes(self) -> int:
        if self.limits.kv_bytes is not None:
            return self.limits.kv_bytes
        device = self.model.device
        free = free_bytes(device)
        if device.type != "cuda":
            return int(CPU_KV_SHARE * (free or 4 * 2**30))
        total = torch.cuda.get_device_properties(device).total_memory
        runtime = runtime_bytes(total)
        return max(0, int(self.limits.gpu_memory_utilization * total) - (total - (free or total)) - runtime)

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launched)

    @property
    def counters(self) -> Counters:
        scheduler, counters = self.scheduler, self._counters
        counters.num_waiting, counters.num_running = len(scheduler.waiting), len(scheduler.running)
        counters.num_preemptions, counters.pages_used = scheduler.num_preemptions, scheduler.pool.num_used
        return counters

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: its id is taken, or it asks for what the engine lacks.
            DataError: the prompt is empty, has a token that the model lacks, or can never fit in the context or the
                pool.
        """
        if request.id in self._sequences or (request.id in self.scheduler.kept and request.continues != request.id):
            raise ConfigError(f"Request {request.id!r} is there already.", "Give every request its own id.")
        if request.sampling.stop and self.tokenizer is None:
            raise ConfigError("A stop string without a tokenizer.", "Open the engine with the model's tokenizer.")
        max_tokens = self._room(request)
        kept = self.scheduler.kept.pop(request.continues, None) if request.continues is not None else None
        ids = list(request.prompt_ids)
        sequence = Sequence(request, next(self._arrivals), ids, len(ids) + max_tokens)
        if kept is not None:
            if kept.ids[: kept.num_stored] == sequence.ids[: kept.num_stored] and kept.num_stored < len(sequence.ids):
                sequence.slot, sequence.table, sequence.capacity = kept.slot, kept.table, kept.capacity
                sequence.num_stored = kept.num_stored
            else:
                self.scheduler.kept[kept.id] = kept
                self.scheduler.drop_kept(kept.id)
        self._sequences[request.id] = sequence
        if self.tokenizer is not None:
            self._texts[request.id] = TextStream(self.tokenizer, self._context(sequence.ids), request.sampling.stop)
        self.scheduler.add(sequence)

    def _room(self, request: Request) -> int:
        """New tokens that the request may have."""
        n, asked = len(request.prompt_ids), request.sampling.max_tokens
        if n == 0:
            raise DataError("The prompt has no tokens.", "Write something.")
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"The prompt has the token {wrong}, the model has {self._vocab_size}.", "Use the model's own tokenizer."
            )
        room = self.max_model_len - n
        if room < 1:
            raise DataError(f"The prompt has {n} tokens, the context is {self.max_model_len}.", "Shorten the prompt.")
        if asked is not None:
            room = min(room, asked)
        num_pages = self.pool_size.num_pages
        if self.scheduler.pages_for(n + room) > num_pages:
            fits = self.pool_size.longest_sequence
            if asked is not None or n + 1 > fits:
                raise DataError(
                    f"The request may grow to {n + room} tokens, the cache holds {fits} of one sequence.",
                    "Lower max_tokens, shorten the prompt, or give the cache more memory.",
                )
            room = fits - n
        return room

    def _context(self, ids: list[int]) -> list[int]:
        """The last prompt tokens that the answer's text goes on from: none from before a special token."""
        tail = ids[-TextStream.max_context :]
        last = max((at for at, token in enumerate(tail) if token in self._special_ids), default=-1)
        return tail[last + 1 :]

    def abort(self, request_id: str) -> Event | None:
        """End a request now; None if there is none of that id."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, "aborted")

    def abandon(self) -> None:
        """Forget every request after a step was cut off, by an interrupt say: what is stored of it is not known."""
        self.runner.reset()
        self._launched = []
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "aborted")
            self.drop_kept(sequence.id)

    def drop_kept(self, request_id: str) -> None:
        """Forget a kept request's tokens, if they are still there."""
        if request_id in self.scheduler.kept:
            self.scheduler.drop_kept(request_id)

    # --- one step ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Schedule, run and sample once; what each request got.

        When the engine runs ahead, that is what the step before chose: its tokens are read while this step computes. A
        sequence that they end has then been run once too often, which is forgotten.
        """
        events = [] if self._runs_ahead and not self._needs_tokens() else self._read_tokens()
        plan = self.scheduler.schedule()
        self._counters.num_steps += 1
        launched: list[_Launched] = []
        if plan.prompts:
            events += self._launch("prompts", [s for s, _ in plan.prompts], [n for _, n in plan.prompts], launched)
        if plan.decodes:
            events += self._launch("decode", plan.decodes, [1] * len(plan.decodes), launched)
        events += self._read_tokens()
        self._launched = launched
        return events if self._runs_ahead else events + self._read_tokens()

    def _needs_tokens(self) -> bool:
        """Whether choosing the next tokens takes all those before on the host."""
        return any(s.sampling.repetition_penalty != 1.0 for s in self.scheduler.running)

    def _launch(
        self, what: str, sequences: list[Sequence], counts: list[int], launched: list[_Launched]
    ) -> list[Event]:
        """Run a pass that reads the next ``counts[i]`` tokens of each sequence, and choose a token for those that have
        no more: added to `launched`."""
        try:
            with self.observe(what):
                if what == "prompts":
                    logits = self.runner.read_prompts(list(zip(sequences, counts, strict=True)))
                else:
                    logits = self.runner.decode(sequences)
            rows = [row for row, s in enumerate(sequences) if s.num_unstored == counts[row]]
            ready = [sequences[row] for row in rows]
            if ready:
                sampled = self._sample(logits if len(rows) == len(logits) else logits[rows], ready)
        except (NumericsError, torch.OutOfMemoryError) as problem:
            return self._failed(sequences, problem)
        for sequence, n in zip(sequences, counts, strict=True):
            sequence.num_stored += n
        if what == "prompts":
            self._counters.prompt_tokens += sum(counts)
            for sequence in sequences:
                sequence.alone = False
        if ready:
            launched.append(_Launched(ready, [len(s.ids) for s in ready], sampled))
        for sequence in ready:
            sequence.ids.append(PENDING)
        return []

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> Sampled:
        if self._sampling is None or self._sampling.sequences != tuple(sequences):
            self._sampling = SamplingBatch.of(sequences, logits.shape[-1], logits.device)
        sampled = sample(logits, self._sampling)
        self.runner.remember(sequences, sampled.tokens)
        return sampled

    def _read_tokens(self) -> list[Event]:
        """The events of what was launched before."""
        events = []
        for launched in self._launched:
            for sequence, place, token, logprob in zip(
                launched.sequences, launched.places, *launched.sampled.read(), strict=True
            ):
                if self._sequences.get(sequence.id) is sequence:
                    events.append(self._take(sequence, place, token, logprob))
        self._launched = []
        return events

    def _take(self, sequence: Sequence, place: int, token: int, logprob: TokenLogprob | None) -> Event:
        """A sequence gets a token: its text, and whether that ends it."""
        if token == NO_TOKEN:
            return self._finish(sequence, "error", error=_not_a_number())
        sequence.ids[place] = token
        self._counters.generation_tokens += 1
        if token in sequence.sampling.stop_token_ids:
            return self._finish(sequence, "stop", token, logprob)
        stream = self._texts.get(sequence.id)
        text = "" if stream is None else stream.add(token)
        if stream is not None and stream.stopped:
            return self._finish(sequence, "stop", token, logprob, text)
        if place + 1 >= sequence.max_len:
            return self._finish(sequence, "length", token, logprob, text)
        return Event(sequence.id, token, text, logprob)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        text: str = "",
        error: KittyError | None = None,
    ) -> Event:
        while sequence.ids[-1] == PENDING:
            sequence.ids.pop()
        self.scheduler.finish(sequence)
        del self._sequences[sequence.id]
        stream = self._texts.pop(sequence.id, None)
        if stream is not None and not stream.stopped:
            text += stream.finish()
        self._counters.num_finished += 1
        self._counters.num_failed += reason == "error"
        return Event(sequence.id, token, text, logprob, reason, error)

    def _failed(self, sequences: list[Sequence], problem: Exception) -> list[Event]:
        """A pass failed. One request alone has failed with it; of several each is read again by itself."""
        self.runner.reset()
        if isinstance(problem, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        logger.info("a pass of %d sequences failed: %s", len(sequences), problem)
        if len(sequences) > 1:
            for sequence in sequences:
                self.scheduler.preempt(sequence)
                sequence.alone = True
            return []
        error = problem if isinstance(problem, KittyError) else _out_of_memory()
        return [self._finish(sequences[0], "error", error=error)]

    def used_bytes(self) -> CacheBytes:
        """Of the pages in use, and of the sinks, rings and statistics of the sequences stored."""
        scheduler = self.scheduler
        num_slots = len(scheduler.running) + sum(s.slot is not None for s in scheduler.kept.values())
        return self.cache.bytes_of(scheduler.pool.num_used, num_slots)

    def check_integrity(self) -> None:
        """Verify the bookkeeping between two steps.

        Raises:
            PoolError: names what is wrong.
        """
        self.scheduler.check_integrity()


def _not_a_number() -> NumericsError:
    return NumericsError(
        "The model computed NaN logits.",
        "It overflows in this dtype or its weights are damaged: try --dtype float32 or bfloat16.",
    )


def _out_of_memory() -> MemoryLimitError:
    return MemoryLimitError(
        "The device ran out of memory.", "Lower --gpu-memory-utilization, --max-batch-tokens or --max-num-seqs."
    )
