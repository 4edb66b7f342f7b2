"""The Typer app: registers the commands and turns errors into exit codes.

Exit codes: 0 done, 1 runtime error, 2 usage, 3 a check's gate failed, 130 interrupted.
`KITTY_DEBUG=1` shows tracebacks.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kitty_cli import output
from kitty_cli.commands.batch import batch
from kitty_cli.commands.bench import bench
from kitty_cli.commands.chat import chat
from kitty_cli.commands.check import check
from kitty_cli.commands.env import env, version_lines
from kitty_cli.commands.info import info
from kitty_cli.commands.profile import profile
from kitty_runtime.errors import ConfigError, DataError, KittyError

INTERRUPTED = 130

_FULL_DISK = DataError("The output cannot be written: no space left on the device.", "Free some space.")

app = typer.Typer(
    name="kitty",
    help="2-bit KV caches for HuggingFace LLMs: measure key sensitivity, write a boost profile, check accuracy, "
    "chat on 2-bit pages, answer files of requests, measure speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First steps: kitty info, kitty profile, kitty check, kitty chat, kitty batch. Exit codes: 0 done, 1 error, "
    "2 usage, 3 check failed, 130 interrupted. "
    "KITTY_HOME: folder of models and profiles; KITTY_MODEL: default model; KITTY_DEBUG=1: tracebacks.",
)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with deliberate errors shown as text and mapped to an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:  # the reader left, as `head` does
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            raise typer.Exit(0) from None
        except OSError as problem:
            if problem.errno != errno.ENOSPC or os.environ.get("KITTY_DEBUG"):
                raise
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            output.error(_FULL_DISK)
            raise typer.Exit(1) from None
        except (Exception, KeyboardInterrupt) as problem:
            if _interrupted(problem):
                output.note("Interrupted.")
                raise typer.Exit(INTERRUPTED) from None
            if not isinstance(problem, KittyError) or os.environ.get("KITTY_DEBUG"):
                raise
            output.error(problem)
            raise typer.Exit(2 if isinstance(problem, ConfigError) else 1) from None

    return run


def _interrupted(problem: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: during imports transformers turns that into an import error."""
    while problem is not None:
        if isinstance(problem, KeyboardInterrupt):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


for _command in (info, profile, check, chat, batch, bench, env):
    app.command()(guarded(_command))


def _show_version(wanted: bool) -> None:
    if wanted:
        guarded(_print_version)()
        raise typer.Exit


def _print_version() -> None:
    for line in version_lines():
        output.text(line)


@app.callback()
def options(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more; -vv logs everything.")] = 0,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Versions of kitty and what it runs on."),
    ] = False,
) -> None:
    output.set_up_logging(verbose)
    # Threads that spin while they wait multiply the CPU time on shared cores; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Entry point of `kitty` and `kitty-kv`."""
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  closed by the caller: messages go nowhere
    if sys.stdout is None:
        output.error(DataError("There is no output: stdout is closed.", "Leave it open, or redirect it."))
        raise SystemExit(1)
    try:
        app()
    except OSError as problem:  # of help, which no command guards
        if problem.errno != errno.ENOSPC or os.environ.get("KITTY_DEBUG"):
            raise
        output.error(_FULL_DISK)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
