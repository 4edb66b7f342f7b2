"""What `kitty batch` tells people while it runs and when it is done; all of it on stderr, or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from kitty_cli import output
from kitty_runtime.batch.resume import Plan, Reason
from kitty_runtime.batch.run import BatchProgress, BatchSummary
from kitty_runtime.batch.source import BatchInput, RowEntry
from kitty_runtime.engine.request import SamplingParams

LINE_EVERY_S = 10.0
"""Between two lines of progress where nobody watches a bar."""

_REFRESH_S = 0.1
_NUM_FAILURES = 5

_REASONS: dict[Reason, tuple[str, str]] = {
    "edited": ("row was edited since", "rows were edited since"),
    "settings": (
        "row was answered with another model or settings",
        "rows were answered with another model or settings",
    ),
    "failed": ("row had failed", "rows had failed"),
    "gone": ("record answers no row of the input", "records answer no row of the input"),
    "double": ("record answers a row once more", "records answer a row once more"),
}


def count_rows(number: int) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} row{'s' * (number != 1)}"


def describe_sampling(defaults: SamplingParams, seed: int) -> str:
    """What holds where a line says nothing."""
    said = ["greedy"] if defaults.greedy else [f"temperature {defaults.temperature:g}"]
    if not defaults.greedy:
        said += [f"top_k {defaults.top_k}"] if defaults.top_k else []
        said += [f"top_p {defaults.top_p:g}"] if defaults.top_p < 1 else []
        said += [f"min_p {defaults.min_p:g}"] if defaults.min_p else []
    said += [f"repetition_penalty {defaults.repetition_penalty:g}"] if defaults.repetition_penalty != 1 else []
    limit = "up to the context's end" if defaults.max_tokens is None else f"up to {defaults.max_tokens} tokens"
    return f"{', '.join(said)}, {limit}, seed {seed}"


def note_input(source: BatchInput, model_name: str) -> None:
    """Models and fields that lines name and that have no effect."""
    others = [name for name in source.models if name != model_name]
    if others:
        output.note(f"Lines ask for {', '.join(map(ascii, others))}; {model_name} answers all of them.")
    if source.ignored:
        output.note(f"Fields that are no parameters are left alone: {', '.join(map(ascii, source.ignored))}.")


def note_plan(plan: Plan, num_rows: int, path: Path, stale_name: str) -> None:
    """What a resumed batch found in its output."""
    failed = f", {plan.num_failed_kept} of them failed" if plan.num_failed_kept else ""
    output.note(f"{path} has {len(plan.keep)} of {count_rows(num_rows)}{failed}; {len(plan.todo)} to do.")
    for reason, count in plan.reasons:
        again = "taken out" if reason in ("gone", "double") else "done again"
        output.note(f"{count} {_REASONS[reason][count > 1]}: {again}.")
    if plan.replaced:
        output.note(f"The answers that are no longer in it were moved to {stale_name} beside it.")


def _failures(console: Console | None = None) -> Callable[[RowEntry, str], None]:
    """Names the first rows that fail, and says once that others are in the output."""
    count = 0

    def report(entry: RowEntry, message: str) -> None:
        nonlocal count
        count += 1
        if count <= _NUM_FAILURES:
            name = f"line {entry.line}" if entry.custom_id is None else f"line {entry.line}, {entry.custom_id!a}"
            output.warning(f"{name}: {' '.join(message.split())[:300]}", console)
        elif count == _NUM_FAILURES + 1:
            output.note("Further failures are named in the output only.", console)

    return report


@contextmanager
def live() -> Iterator[tuple[Callable[[BatchProgress], None], Callable[[RowEntry, str], None]]]:
    """A bar while people watch, a line every ten seconds where they do not; and what names the rows that fail."""
    if not sys.stderr.isatty():
        yield _lines(), _failures()
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=output.stderr(), transient=True) as bar:
        task = bar.add_task("")
        shown_at = 0.0

        def report(progress: BatchProgress) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at >= _REFRESH_S:
                shown_at = time.monotonic()
                bar.update(task, completed=progress.done, total=progress.total, description=_state(progress))

        yield report, _failures(bar.console)


def _lines() -> Callable[[BatchProgress], None]:
    shown_at = time.monotonic()

    def report(progress: BatchProgress) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= LINE_EVERY_S:
            shown_at = time.monotonic()
            output.note(_state(progress))

    return report


def _state(progress: BatchProgress) -> str:
    parts = [f"{progress.done}/{progress.total} rows"]
    parts += [f"{progress.failed} failed"] if progress.failed else []
    parts += [f"{progress.tok_per_s:,.0f} tok/s", f"{progress.running} running, {progress.waiting} waiting"]
    parts += [f"pages {progress.pages_used}/{progress.pages_total}"]
    parts += [f"{_duration(progress.left_s)} left"] if progress.left_s is not None else []
    return " | ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_summary(summary: BatchSummary) -> None:
    """One line: rows, tokens, time."""
    kept = f", {summary.num_kept} from before" if summary.num_kept else ""
    kept += f" ({summary.num_failed_kept} failed)" if summary.num_failed_kept else ""
    preempted = f" | {summary.num_preemptions} preemptions" if summary.num_preemptions else ""
    output.note(
        f"{count_rows(summary.num_rows)}: {summary.num_ok} ok, {summary.num_failed} failed{kept} | "
        f"prompt {summary.prompt_tokens:,} tok | generation {summary.generation_tokens:,} tok in "
        f"{summary.elapsed_s:.1f} s, {summary.tok_per_s:,.1f} tok/s{preempted}"
    )


def summary_document(summary: BatchSummary, name: str, path: Path, model_name: str) -> dict[str, Any]:
    """The summary for machines."""
    return {
        "input": name,
        "output": str(path),
        "model": model_name,
        "num_rows": summary.num_rows,
        "num_ok": summary.num_ok,
        "num_failed": summary.num_failed,
        "num_kept": summary.num_kept,
        "num_failed_kept": summary.num_failed_kept,
        "prompt_tokens": summary.prompt_tokens,
        "generation_tokens": summary.generation_tokens,
        "generation_tok_per_s": summary.tok_per_s,
        "num_preemptions": summary.num_preemptions,
        "elapsed_s": summary.elapsed_s,
        "interrupted": summary.interrupted,
    }
