"""`kitty chat`: talk to a model on a paged 2-bit cache, or get one answer in a pipe."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitty_cli import options, output
from kitty_cli.open_model import ModelFlags, open_model
from kitty_runtime.config import cache_config
from kitty_runtime.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kitty_runtime.chat import ChatSession, Reply


def chat(
    model: options.Model = None,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Answer this and leave; piped text comes before it.", show_default=False),
    ] = None,
    preset: options.Preset = None,
    bits: options.Bits = None,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    boost: options.Boost = None,
    profile: options.ProfileFile = None,
    system_prompt: Annotated[str, typer.Option(help="First message, from the system.", show_default=False)] = "",
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the model continues the text.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 1024,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same answer.", min=0, max=2**63 - 1, rich_help_panel=options.SAMPLING, show_default=False
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.DtypeName = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Chat with a model on a paged 2-bit cache; in a pipe, answer once."""
    config = cache_config(preset, bits, k_bits, v_bits, boost)
    if model is not None and " " in model and prompt is None and not os.path.exists(os.path.expanduser(model)):
        raise ConfigError(f"{model!r} is not a model.", f"Name the model before a message: kitty chat demo {model!r}")
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": _random_seed() if seed is None else seed,
    }
    options.check_sampling(sampling)
    once = _message(prompt)
    flags = ModelFlags(model, config, profile, device, dtype, trust_remote_code)
    session = _open(flags, sampling, system_prompt, raw)
    if once is not None:
        answer(session, once)
    else:
        from kitty_cli.chat_loop import talk

        talk(session)


def _random_seed() -> int:
    return int.from_bytes(os.urandom(7))


def _message(prompt: str | None) -> str | None:
    """The one message to answer: what is piped in, then the prompt; None in a terminal without a prompt.

    Raises:
        DataError: nothing there, or not UTF-8.
    """
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    piped = ""
    if sys.stdin is not None and (prompt is None or _stdin_has_data()):
        try:
            piped = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"The input is not UTF-8 text (byte {error.start}).", "Convert it first.") from error
    text = "\n\n".join(part for part in (piped, prompt) if part)
    if not text:
        raise DataError("The message is empty.", 'Pipe a message in, or give it: kitty chat MODEL "message"')
    return text


def _stdin_has_data() -> bool:
    """A pipe or a file, not a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a real file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _open(flags: ModelFlags, sampling: dict[str, Any], system_prompt: str, raw: bool) -> ChatSession:
    from kitty_runtime.chat import ChatSession, check_template

    opened = open_model(flags, lambda tokenizer: check_template(tokenizer, raw))
    assert opened.tokenizer is not None
    return ChatSession(opened.model, opened.tokenizer, flags.config, opened.profile, sampling, system_prompt, raw)


def answer(session: ChatSession, message: str) -> None:
    """Stream one answer to stdout, its figures to stderr.

    Raises:
        KeyboardInterrupt: Ctrl-C. After the first token what was said stays in the conversation; before it, while the
            prompt is being read, the message is taken back.
    """
    begun = False

    def on_text(piece: str) -> None:
        nonlocal begun
        begun = True
        output.text(piece, end="")

    with interruptible(lambda: begun) as stopped:
        reply = session.reply(message, on_text, stopped)
    output.text("")
    output.note(figures(session, reply))
    if reply.finish_reason == "aborted":
        raise KeyboardInterrupt


@contextmanager
def interruptible(
    begun: Callable[[], bool], signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
) -> Iterator[Callable[[], bool]]:
    """Once `begun`, the first Ctrl-C only makes the yielded function return True; any other raises as usual.

    Args:
        begun: asked when it is pressed.
        signals: what counts as Ctrl-C.
    """
    pressed = False

    def on_interrupt(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed or not begun():
            raise KeyboardInterrupt
        pressed = True

    before = {each: signal.signal(each, on_interrupt) for each in signals}
    try:
        yield lambda: pressed
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def figures(session: ChatSession, reply: Reply) -> str:
    """The dim line after an answer: speed, pages, bytes by part, ratio to 16 bits."""
    used, dense, num_pages = session.used_bytes(), session.dense_bytes(), session.engine.counters.pages_used
    prompt_rate = reply.num_prompt_tokens / reply.prompt_s if reply.prompt_s else 0.0
    rate = (reply.num_new_tokens - 1) / reply.generation_s if reply.generation_s else 0.0
    parts = f"pages {output.size(used.pages)} + sink {output.size(used.sinks)} + recent {output.size(used.rings)}"
    if num_pages:
        ratio = f"{output.size(used.total)} for {output.size(dense)} at 16 bits, {dense / used.total:.2f}x"
    else:
        ratio = "nothing packed yet: the first page comes after the sink and the recent tokens"
    if session.model.dtype.itemsize > 2:
        parts += f" (unpacked tokens are {str(session.model.dtype).removeprefix('torch.')})"
    limit = " | length limit" if reply.finish_reason == "length" else ""
    return (
        f"prompt {reply.num_prompt_tokens} tok, {prompt_rate:.1f} tok/s | generation {reply.num_new_tokens} tok, "
        f"{rate:.1f} tok/s | {session.num_stored} tokens, {num_pages} pages packed | {parts} | "
        f"{ratio}{limit}"
    )
