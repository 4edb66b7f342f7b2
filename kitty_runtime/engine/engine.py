"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kitty_runtime.cache.paged_cache import CacheBytes
from kitty_runtime.config import CacheConfig
from kitty_runtime.engine.cache import EngineCache
from kitty_runtime.engine.pool_size import PoolSize, cache_cost, size_pool
from kitty_runtime.engine.request import Event, FinishReason, Request, TokenLogprob
from kitty_runtime.engine.runner import Runner
from kitty_runtime.engine.sampler import NO_TOKEN, SamplingBatch, sample
from kitty_runtime.engine.scheduler import Scheduler
from kitty_runtime.engine.sequence import Sequence
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


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What the engine may take.

    Attributes:
        gpu_memory_utilization: share of the GPU's memory for weights, cache and all else.
        kv_bytes: bytes of the cache instead.
        num_pages: pages of the pool instead, beside `max_num_seqs` slots.
        max_num_seqs: sequences stored at once; fewer if the memory is small.
        max_batch_tokens: tokens that a step reads at the most.
        max_model_len: longest sequence in tokens; None = what the model was made for.
        capture: replay decode steps as CUDA graphs.
    """

    gpu_memory_utilization: float = 0.9
    kv_bytes: int | None = None
    num_pages: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    max_model_len: int | None = None
    capture: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}.", "Use a share above 0, up to 1."
            )
        for name in ("max_num_seqs", "max_batch_tokens", "kv_bytes", "num_pages", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}.", "Use 1 or more.")


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
        self.config, self.limits = config or CacheConfig(), limits or EngineLimits()
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
        self.runner = Runner(model, self.cache, max_pages, self.limits.capture)
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[str, TextStream] = {}
        self._special_ids = set() if tokenizer is None else set(tokenizer.all_special_ids)
        self._arrivals = itertools.count()
        self.observe: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Entered around every pass, with ``prompts`` or ``decode``: for those who measure."""
        self._sampling: SamplingBatch | None = None
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
        return self.scheduler.has_work

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
        """Schedule, run and sample once; what each request got."""
        plan = self.scheduler.schedule()
        self._counters.num_steps += 1
        events: list[Event] = []
        if plan.prompts:
            events += self._read_prompts(plan.prompts)
        if plan.decodes:
            events += self._decode(plan.decodes)
        return events

    def _read_prompts(self, prompts: list[tuple[Sequence, int]]) -> list[Event]:
        try:
            with self.observe("prompts"):
                logits = self.runner.read_prompts(prompts)
            self._counters.prompt_tokens += sum(n for _, n in prompts)
            rows = [row for row, (s, n) in enumerate(prompts) if s.num_unstored == n]
            ready = [prompts[row][0] for row in rows]
            sampled = self._sample(logits[rows], ready) if ready else []
        except (NumericsError, torch.OutOfMemoryError) as problem:
            return self._failed([s for s, _ in prompts], problem)
        for sequence, n in prompts:
            sequence.num_stored += n
            sequence.alone = False
        return [self._take(*choice) for choice in sampled]

    def _decode(self, sequences: list[Sequence]) -> list[Event]:
        try:
            with self.observe("decode"):
                logits = self.runner.decode(sequences)
            sampled = self._sample(logits, sequences)
        except (NumericsError, torch.OutOfMemoryError) as problem:
            return self._failed(sequences, problem)
        for sequence in sequences:
            sequence.num_stored += 1
        return [self._take(*choice) for choice in sampled]

    def _sample(self, logits: Tensor, sequences: Rows[Sequence]) -> list[tuple[Sequence, int, TokenLogprob | None]]:
        if self._sampling is None or self._sampling.sequences != tuple(sequences):
            self._sampling = SamplingBatch.of(sequences, logits.shape[-1], logits.device)
        tokens, logprobs = sample(logits, self._sampling)
        return list(zip(sequences, tokens, logprobs, strict=True))

    def _take(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Event:
        """A sequence gets a token: its text, and whether that ends it."""
        if token == NO_TOKEN:
            return self._finish(sequence, "error", error=_not_a_number())
        sequence.ids.append(token)
        self._counters.generation_tokens += 1
        if token in sequence.sampling.stop_token_ids:
            return self._finish(sequence, "stop", token, logprob)
        stream = self._texts.get(sequence.id)
        text = "" if stream is None else stream.add(token)
        if stream is not None and stream.stopped:
            return self._finish(sequence, "stop", token, logprob, text)
        if len(sequence.ids) >= sequence.max_len:
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
