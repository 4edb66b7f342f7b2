"""`kitty batch`: answer a file of requests on paged 2-bit caches; what was done is never lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitty_cli import options, output
from kitty_cli.commands.chat import interruptible
from kitty_cli.open_model import ModelFlags, open_model
from kitty_runtime.config import cache_config
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kitty_runtime.batch.journal import Journal
    from kitty_runtime.batch.requests import BatchModel
    from kitty_runtime.batch.run import Engine as BatchEngine
    from kitty_runtime.batch.source import BatchInput

STREAM = "-"
"""Standard input or output."""

WAITING_PER_SEQ = 4
"""Requests kept ready for the engine, as a multiple of those that run at once."""

_SUFFIXES = (".jsonl", ".ndjson", ".json")
_OUTPUT = "Output"
_ENGINE = "Engine"


def batch(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT", help="Requests, one JSON object per line; - is standard input.", show_default=False
        ),
    ] = None,
    input_file: Annotated[
        str | None, typer.Option("--input-file", "-i", help="The same as INPUT.", show_default=False)
    ] = None,
    output_file: Annotated[
        str | None,
        typer.Option(
            "--output-file",
            "-o",
            help="Answers; - is standard output. Left out: INPUT.out.jsonl beside the input.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an output: each row once.", rich_help_panel=_OUTPUT)
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Resume, and do failed rows again.", rich_help_panel=_OUTPUT)
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output.", rich_help_panel=_OUTPUT)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The summary as a JSON document on stdout.", rich_help_panel=_OUTPUT)
    ] = False,
    model: options.ModelOption = None,
    preset: options.Preset = None,
    bits: options.Bits = None,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    boost: options.Boost = None,
    profile: options.ProfileFile = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer, in tokens.", min=1, rich_help_panel=options.SAMPLING, show_default=False),
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: Annotated[
        int,
        typer.Option(
            help="With its id it gives a row its own seed.", min=0, max=2**63 - 1, rich_help_panel=options.SAMPLING
        ),
    ] = 0,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory to use.", min=0.01, max=1.0, rich_help_panel=_ENGINE)
    ] = 0.9,
    kv_bytes: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values, such as 8GiB, in place of the share.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Rows at once.", min=1, rich_help_panel=_ENGINE)] = 256,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens per step.", min=1, rich_help_panel=_ENGINE)] = 2048,
    compiled: options.Compile = True,
    device: options.Device = "auto",
    dtype: options.DtypeName = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Answer a file of requests: OpenAI Batch lines, or {"prompt": ...} and {"messages": ...}.

    Sampling options hold where a line says nothing.
    """
    asked = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    options.check_sampling(asked)
    config = cache_config(preset, bits, k_bits, v_bits, boost)
    limits = EngineLimits(
        gpu_memory_utilization=gpu_memory_utilization,
        kv_bytes=options.size_in_bytes(kv_bytes),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        compiled=compiled,
    )
    where = ModelFlags(model, config, profile, device, dtype, trust_remote_code)
    source_path, out_path = _paths(source, input_file, output_file)
    resume = resume or retry_failed
    if resume and overwrite:
        raise ConfigError("--overwrite begins anew, --resume goes on.", "Leave one of them out.")
    if out_path is None and (resume or overwrite or as_json):
        raise ConfigError(
            "Standard output cannot be resumed or replaced, and has no room for --json.", "Name a file: -o FILE"
        )
    begun = False

    def load() -> tuple[BatchEngine, BatchModel]:
        nonlocal begun
        opened = _open(where, asked, seed, limits)
        begun = True
        return opened

    with ExitStack() as stack:
        stopped = stack.enter_context(interruptible(lambda: begun, (signal.SIGINT, signal.SIGTERM)))
        from kitty_runtime.batch.journal import open_journal
        from kitty_runtime.batch.source import open_input

        rows = stack.enter_context(open_input(source_path, None if sys.stdin is None else sys.stdin.buffer))
        journal = None if out_path is None else stack.enter_context(open_journal(out_path, resume, overwrite))
        _answer(rows, journal, load, stopped, resume, retry_failed, WAITING_PER_SEQ * max_num_seqs, as_json)


def _answer(
    rows: BatchInput,
    journal: Journal | None,
    load: Callable[[], tuple[BatchEngine, BatchModel]],
    stopped: Callable[[], bool],
    resume: bool,
    retry_failed: bool,
    max_waiting: int,
    as_json: bool,
) -> None:
    """Load the model, do what is left, say how it went.

    Raises:
        KeyboardInterrupt: rows are left.
        typer.Exit: a record is an error.
    """
    from kitty_cli import batch_report
    from kitty_runtime.batch.resume import check_same_batch, plan_resume
    from kitty_runtime.batch.run import run_batch

    stored = journal.stored() if journal is not None and resume else ()
    check_same_batch(rows.entries, stored)
    engine, model = load()
    batch_report.note_input(rows, model.name)
    plan = plan_resume(rows.entries, stored, model.settings_sha256, retry_failed)
    if journal is not None:
        journal.start(plan.keep, plan.replaced)
        if stored:
            batch_report.note_plan(plan, len(rows.entries), journal.name, journal.stale_path.name)
        else:
            output.note(f"{batch_report.count_rows(len(rows.entries))} to {journal.name}")
    try:
        with batch_report.live() as (on_step, on_failure):
            summary = run_batch(
                engine,
                rows,
                plan.todo,
                model,
                _deliver if journal is None else journal.write,
                max_waiting=max_waiting,
                num_failed_kept=plan.num_failed_kept,
                on_step=on_step,
                on_failure=on_failure,
                should_stop=stopped,
            )
    except BaseException:  # Ctrl-C twice, a device that is gone, a full disk: what is written stays
        _note_resume(journal)
        raise
    batch_report.show_summary(summary)
    if journal is not None:
        journal.close()
        if as_json:
            output.json_document(batch_report.summary_document(summary, rows.name, journal.name, model.name))
        else:
            output.note(f"Wrote {journal.name}")
    if summary.interrupted:
        _note_resume(journal)
        raise KeyboardInterrupt
    if summary.num_failed + summary.num_failed_kept:
        if summary.num_failed_kept:
            output.note("--retry-failed does the failed rows again.")
        raise typer.Exit(1)


def _note_resume(journal: Journal | None) -> None:
    if journal is not None:
        output.note("The same command with --resume does the rest.")


def _deliver(line: bytes) -> None:
    """
    Raises:
        DataError: nobody reads standard output any more.
    """
    try:
        output.data(line)
    except BrokenPipeError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise DataError(
            "The reader of standard output has left; the other answers are not delivered.",
            "Write to a file, which can be resumed: -o FILE",
        ) from error


def _paths(source: str | None, input_file: str | None, output_file: str | None) -> tuple[Path | None, Path | None]:
    """Input and output; None is a stream.

    Raises:
        ConfigError: no input or two, or one file for both.
    """
    from kitty_runtime.batch.source import same_file

    if source is not None and input_file is not None:
        raise ConfigError("The input is named twice.", "Give INPUT or --input-file.")
    name = input_file if source is None else source
    if not name:
        raise ConfigError("There is no input.", "Name a file of requests, or - for standard input: kitty batch FILE")
    source_path = None if name == STREAM else Path(os.path.expanduser(name))
    if output_file == "":
        raise ConfigError("--output-file is empty.", "Name a file, or - for standard output.")
    if output_file == STREAM or (output_file is None and source_path is None):
        return source_path, None
    if output_file is None and _is_pipe(source_path):
        raise ConfigError(f"{source_path} is no plain file: nothing can be beside it.", "Name the output: -o FILE")
    out_path = Path(os.path.expanduser(output_file)) if output_file else _beside(source_path or Path())
    if source_path is not None and same_file(source_path, out_path):
        raise ConfigError(f"{out_path} is the input.", "Name another output: -o FILE")
    return source_path, out_path


def _is_pipe(path: Path | None) -> bool:
    return path is not None and os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _beside(source: Path) -> Path:
    """``requests.out.jsonl`` for ``requests.jsonl``."""
    stem = source.stem if source.suffix in _SUFFIXES else source.name
    return source.with_name(f"{stem}.out.jsonl")


def _open(where: ModelFlags, asked: dict[str, Any], seed: int, limits: EngineLimits) -> tuple[BatchEngine, BatchModel]:
    """Load what the flags name, and say on stderr which model, cache, profile, backend and sampling run."""
    from kitty_cli.batch_report import describe_sampling
    from kitty_runtime.batch.model import batch_model
    from kitty_runtime.engine.engine import Engine

    opened = open_model(where)
    assert opened.tokenizer is not None
    model = batch_model(
        opened.name, opened.model, opened.tokenizer, opened.geometry, where.config, opened.profile, asked, seed
    )
    output.note(f"sampling where a line says nothing: {describe_sampling(model.sampling(model.asked), seed)}")
    return Engine(opened.model, opened.tokenizer, where.config, opened.profile, limits), model
