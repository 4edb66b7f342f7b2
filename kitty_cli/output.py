"""The only writer: data goes to stdout; progress, notes, warnings and errors go to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.markup import escape

from kitty_runtime.errors import KittyError

if TYPE_CHECKING:
    from kitty_runtime.layer_kl import Progress

SCHEMA_VERSION = 1
_PIPED_WIDTH = 100


def stdout() -> Console:
    """Console for data; made anew so that it follows a redirected stream."""
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def stderr() -> Console:
    """Console for everything that is not data."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def show(renderable: RenderableType) -> None:
    """A table or other rich renderable, as data."""
    stdout().print(renderable)


def text(line: str, end: str = "\n") -> None:
    """Plain text as data, exactly as it is, flushed."""
    sys.stdout.write(line + end)
    sys.stdout.flush()


def data(line: bytes) -> None:
    """UTF-8 as data, whatever the terminal's encoding, flushed."""
    sys.stdout.buffer.write(line)
    sys.stdout.flush()


def json_document(document: Mapping[str, Any]) -> None:
    """One JSON document, written plainly: rich would wrap it and read markup in it.

    Raises:
        ValueError: a number in it is NaN or infinite.
    """
    text(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=2, allow_nan=False))


def note(line: str, console: Console | None = None) -> None:
    """Something worth knowing, dim; above the bar if it is the bar's console."""
    (console or stderr()).print(escape(line), style="dim")


def warning(line: str, console: Console | None = None) -> None:
    (console or stderr()).print(f"[yellow]Warning:[/yellow] {escape(line)}")


def error(problem: KittyError) -> None:
    """What went wrong, and the next step on a line of its own."""
    console = stderr()
    console.print(f"[bold red]Error:[/bold red] {escape(problem.message)}")
    if problem.hint:
        console.print(escape(problem.hint), style="dim")


def set_up_logging(verbose: int) -> None:
    """Warnings to stderr; -v adds kitty's own progress, -vv everything, transformers included."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("kitty_runtime")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
    if verbose < 2:  # set before transformers is imported; both tell users about their own internals
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on stderr while people watch; nothing in a pipe."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for other in tasks.values():
                    bar.update(other, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


def size(num_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
