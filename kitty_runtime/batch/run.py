"""The loop of a batch: rows go to the engine as it has room, records are written as they finish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kitty_runtime.batch import records
from kitty_runtime.batch.lines import parse_row, too_large
from kitty_runtime.batch.problems import LineError, RowError
from kitty_runtime.batch.records import Answer
from kitty_runtime.batch.requests import BatchModel, request_of
from kitty_runtime.batch.source import BatchInput, RowEntry
from kitty_runtime.engine.request import Event, Request
from kitty_runtime.errors import DataError, KittyError

FEED_PER_STEP = 32
"""Rows made into requests between two steps, so that the engine does not wait for many."""

RATE_WINDOW_S = 10.0
"""The rate shown while a batch runs is that of the last so many seconds."""


class Counters(Protocol):
    """What the engine counts: requests, pages, preemptions since it was made."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def pages_used(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


class Engine(Protocol):
    """What a batch needs of an engine."""

    @property
    def counters(self) -> Counters: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Event]: ...


@dataclass(frozen=True)
class BatchProgress:
    """Where a batch is.

    Attributes:
        done, total: rows with a record, of all; those of earlier runs count.
        failed: errors among them.
        prompt_tokens, generation_tokens: of this run; prompts count when their answer is whole.
        tok_per_s: generated, in the last seconds.
        running, waiting: requests in the engine.
        pages_used, pages_total: of the engine's pool.
        num_preemptions: requests that lost their pages to others.
        elapsed_s: of this run.
        left_s: at the pace of this run; None before the first row is done.
    """

    done: int
    total: int
    failed: int
    prompt_tokens: int
    generation_tokens: int
    tok_per_s: float
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    num_preemptions: int
    elapsed_s: float
    left_s: float | None


@dataclass(frozen=True)
class BatchSummary:
    """How a run ended.

    Attributes:
        num_rows: of the input.
        num_ok, num_failed: records that this run wrote.
        num_kept, num_failed_kept: records of earlier runs, and the errors among them.
        prompt_tokens: of the answers written.
        generation_tokens: of this run, those of answers that an interrupt cut off included.
        num_preemptions: requests that lost their pages to others.
        elapsed_s: of the loop, without loading.
        interrupted: whether rows are left.
    """

    num_rows: int
    num_ok: int
    num_failed: int
    num_kept: int
    num_failed_kept: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    elapsed_s: float
    interrupted: bool

    @property
    def tok_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generation_tokens / self.elapsed_s if self.elapsed_s else 0.0


def run_batch(
    engine: Engine,
    source: BatchInput,
    todo: Sequence[RowEntry],
    model: BatchModel,
    write: Callable[[bytes], None],
    *,
    max_waiting: int,
    num_failed_kept: int = 0,
    on_step: Callable[[BatchProgress], None] = lambda progress: None,
    on_failure: Callable[[RowEntry, str], None] = lambda entry, message: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> BatchSummary:
    """Answer rows; each has its record when this returns, unless it was stopped.

    Args:
        source: the input.
        todo: rows of it to answer.
        write: gets each record as one line, as soon as it is whole.
        max_waiting: requests to keep ready for the engine; what is beyond stays on the disk.
        num_failed_kept: errors among the rows not to do, for the progress.
        on_step: told after each step where the batch is.
        on_failure: told of each row that failed, and why.
        should_stop: asked after each step; True leaves what is running.
    Raises:
        KittyError: the engine can do no more; records written so far are whole.
        OSError: a record cannot be written.
    """
    run = _Run(engine, source, todo, model, write, on_failure, num_failed_kept)
    return run.run(max_waiting, on_step, should_stop)


class _Run:
    """The answers that are under way, and the counts of a run."""

    def __init__(
        self,
        engine: Engine,
        source: BatchInput,
        todo: Sequence[RowEntry],
        model: BatchModel,
        write: Callable[[bytes], None],
        on_failure: Callable[[RowEntry, str], None],
        num_failed_kept: int,
    ) -> None:
        self.engine = engine
        self.source = source
        self.todo = todo
        self.model = model
        self.write = write
        self.on_failure = on_failure
        self.num_failed_kept = num_failed_kept
        self.answers: dict[str, Answer] = {}
        self.num_ok = self.num_failed = self.prompt_tokens = self.generation_tokens = 0
        self.preemptions_before = engine.counters.num_preemptions
        self.started = time.monotonic()
        self.rates: deque[tuple[float, int]] = deque([(self.started, 0)])

    def run(
        self, max_waiting: int, on_step: Callable[[BatchProgress], None], should_stop: Callable[[], bool]
    ) -> BatchSummary:
        waiting = iter(self.todo)
        interrupted = False
        on_step(self.progress())
        while True:
            self.feed(waiting, max_waiting)
            if self.engine.has_work:
                for event in self.engine.step():
                    self.take(event)
            elif self.answers:
                raise RuntimeError(f"the engine is idle without having answered {list(self.answers)[:5]}")
            on_step(self.progress())
            if len(self.todo) == self.num_ok + self.num_failed:
                break
            if should_stop():
                interrupted = True
                break
        return BatchSummary(
            num_rows=len(self.source.entries),
            num_ok=self.num_ok,
            num_failed=self.num_failed,
            num_kept=len(self.source.entries) - len(self.todo),
            num_failed_kept=self.num_failed_kept,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            num_preemptions=self.engine.counters.num_preemptions - self.preemptions_before,
            elapsed_s=time.monotonic() - self.started,
            interrupted=interrupted,
        )

    def feed(self, waiting: Iterator[RowEntry], max_waiting: int) -> None:
        """Hand the engine rows while it has few waiting."""
        for _ in range(FEED_PER_STEP):
            if self.engine.counters.num_waiting >= max_waiting:
                return
            entry = next(waiting, None)
            if entry is None:
                return
            self.begin(entry)

    def begin(self, entry: RowEntry) -> None:
        """Add a row to the engine, or write what is wrong with it."""
        try:
            if entry.too_large:
                raise too_large(entry.num_bytes)
            row = parse_row(self.source.read(entry), entry.line)
            request = request_of(row, self.model)
            try:
                self.engine.add(request)
            except DataError as error:  # too long for the context or the pool
                param = "messages" if row.messages is not None else "prompt"
                raise RowError(f"{error.message} {error.hint}".strip(), param, "context_length_exceeded") from error
        except LineError as error:
            self.fail(entry, error, records.line_error_record(entry, error, self.model.settings_sha256))
        except RowError as error:
            self.fail(entry, error, records.row_error_record(entry, error, self.model.settings_sha256))
        else:
            wants_logprobs = request.sampling.num_logprobs is not None
            answer = Answer(entry, row.kind, len(request.prompt_ids), logprobs=[] if wants_logprobs else None)
            self.answers[request.id] = answer

    def take(self, event: Event) -> None:
        """Add what a step brought to its answer; write the answer if that was the last of it."""
        answer = self.answers[event.request_id]
        if event.token_id is not None:
            answer.num_tokens += 1
            self.generation_tokens += 1
        if event.text:
            answer.pieces.append(event.text)
        if event.logprob is not None and answer.logprobs is not None:
            answer.logprobs.append(event.logprob)
        if event.finish_reason is None:
            return
        del self.answers[event.request_id]
        answer.finish_reason = event.finish_reason
        if event.finish_reason in ("error", "aborted"):
            error = event.error or KittyError(f"The request was {event.finish_reason}.")
            record = records.engine_error_record(answer.entry, error, self.model.settings_sha256)
            self.fail(answer.entry, error, record)
            return
        record = records.answer_record(answer, self.model.name, self.model.tokenizer, self.model.settings_sha256)
        self.write(records.encoded(record))
        self.num_ok += 1
        self.prompt_tokens += answer.num_prompt_tokens

    def fail(self, entry: RowEntry, error: KittyError, record: records.Record) -> None:
        self.write(records.encoded(record))
        self.num_failed += 1
        self.on_failure(entry, error.message)

    def progress(self) -> BatchProgress:
        now, counters = time.monotonic(), self.engine.counters
        while len(self.rates) > 1 and now - self.rates[0][0] > RATE_WINDOW_S:
            self.rates.popleft()
        if now - self.rates[-1][0] >= RATE_WINDOW_S / 20:
            self.rates.append((now, self.generation_tokens))
        since, tokens = self.rates[0]
        finished = self.num_ok + self.num_failed
        kept = len(self.source.entries) - len(self.todo)
        elapsed = now - self.started
        return BatchProgress(
            done=kept + finished,
            total=len(self.source.entries),
            failed=self.num_failed_kept + self.num_failed,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            tok_per_s=(self.generation_tokens - tokens) / (now - since) if now > since else 0.0,
            running=counters.num_running,
            waiting=counters.num_waiting,
            pages_used=counters.pages_used,
            pages_total=counters.pages_total,
            num_preemptions=counters.num_preemptions - self.preemptions_before,
            elapsed_s=elapsed,
            left_s=elapsed / finished * (len(self.todo) - finished) if finished else None,
        )
