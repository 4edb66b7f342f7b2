"""`kitty chat`: talk to a model on a paged 2-bit cache, or get one answer in a pipe."""

from __future__ import annotations

import math
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitty_cli import options, output
from kitty_cli.commands.env import backend
from kitty_cli.commands.info import describe
from kitty_cli.model_profile import profile_for
from kitty_runtime.errors import ConfigError, DataError
from kitty_runtime.models.preflight import Dtype

if TYPE_CHECKING:
    from kitty_runtime.chat import ChatSession, Reply
    from kitty_runtime.config import CacheConfig


def _sampling(text: str, **limits: Any) -> Any:
    """An option that leaves the model's own generation config alone when it is not given."""
    return typer.Option(help=text, rich_help_panel="Sampling (default: the model's own)", show_default=False, **limits)


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
    temperature: Annotated[float | None, _sampling("Randomness; 0 is greedy.", min=0.0)] = None,
    top_p: Annotated[float | None, _sampling("Keep the likeliest tokens up to this mass.", min=0.0, max=1.0)] = None,
    top_k: Annotated[int | None, _sampling("Keep this many of the likeliest tokens.", min=0)] = None,
    min_p: Annotated[
        float | None, _sampling("Drop tokens below this share of the likeliest.", min=0.0, max=1.0)
    ] = None,
    repetition_penalty: Annotated[float | None, _sampling("Above 1, repeat less.", min=0.01)] = None,
    seed: Annotated[int | None, _sampling("Same seed, same answer.", min=0, max=2**63 - 1)] = None,
    device: options.Device = "auto",
    dtype: options.DtypeName = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Chat with a model on a paged 2-bit cache; in a pipe, answer once."""
    config = options.cache_config(preset, bits, k_bits, v_bits, boost)
    if model is not None and " " in model and prompt is None and not os.path.exists(os.path.expanduser(model)):
        raise ConfigError(f"{model!r} is not a model.", f"Name the model before a message: kitty chat demo {model!r}")
    if temperature is not None and not math.isfinite(temperature):
        raise ConfigError(f"--temperature is {temperature}.", "Use a number, such as 0.7.")
    generation = {
        "max_new_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    once = _message(prompt)
    session = _open(model, config, profile, generation, system_prompt, raw, device, dtype, trust_remote_code)
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    if once is not None:
        answer(session, once)
    else:
        from kitty_cli.chat_loop import talk

        talk(session)


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


def _open(
    model: str | None,
    config: CacheConfig,
    profile_path: Path | None,
    generation: dict[str, Any],
    system_prompt: str,
    raw: bool,
    device: str,
    dtype: Dtype,
    trust_remote_code: bool,
) -> ChatSession:
    """Load what the flags name, and say on stderr which model, cache, profile and backend run."""
    from kitty_runtime.chat import ChatSession, check_template
    from kitty_runtime.models.geometry import geometry_of
    from kitty_runtime.models.loading import load_config, load_model, load_tokenizer, resolve_model
    from kitty_runtime.profiles import layer_boosts, load_profile

    given = None if profile_path is None else load_profile(profile_path)
    source = resolve_model(model, output.note)
    geometry = geometry_of(load_config(source, trust_remote_code))
    layer_boosts(geometry.layers, config, given)  # a profile that does not fit is refused before weights load
    tokenizer = load_tokenizer(source, trust_remote_code)
    check_template(tokenizer, raw)
    loaded = load_model(
        source, dtype=dtype, device=device, trust_remote_code=trust_remote_code, attn_implementation="kitty"
    )
    profile, name = None, "not used by this preset"
    if config.uses_profile:
        profile, name = profile_for(loaded, geometry, given, profile_path)
    elif given is not None:
        output.warning(f"The {config.policy} policy does not use the profile; use --preset weighted.")
    runs = backend(loaded.device.type, loaded.dtype)
    output.note(f"{source.name} on {loaded.device}, {str(loaded.dtype).removeprefix('torch.')}; backend: {runs}")
    output.note(f"cache: {describe(config)}")
    output.note(f"profile: {name}")

    return ChatSession(loaded, tokenizer, config, profile, generation, system_prompt, raw)


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
    if reply.finish_reason == "interrupted":
        raise KeyboardInterrupt


@contextmanager
def interruptible(begun: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Once `begun`, the first Ctrl-C only makes the yielded function return True; any other raises as usual."""
    pressed = False

    def on_interrupt(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed or not begun():
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def figures(session: ChatSession, reply: Reply) -> str:
    """The dim line after an answer: speed, pages, bytes by part, ratio to 16 bits."""
    paged = session.cache.paged
    used, dense = paged.used_bytes(), paged.dense_bytes()
    prompt_rate = reply.num_prompt_tokens / reply.prompt_s if reply.prompt_s else 0.0
    rate = (reply.num_new_tokens - 1) / reply.generation_s if reply.generation_s else 0.0
    parts = f"pages {output.size(used.pages)} + sink {output.size(used.sinks)} + recent {output.size(used.rings)}"
    if paged.pool.num_used:
        ratio = f"{output.size(used.total)} for {output.size(dense)} at 16 bits, {dense / used.total:.2f}x"
    else:
        ratio = "nothing packed yet: the first page comes after the sink and the recent tokens"
    if session.model.dtype.itemsize > 2:
        parts += f" (unpacked tokens are {str(session.model.dtype).removeprefix('torch.')})"
    limit = " | length limit" if reply.finish_reason == "length" else ""
    return (
        f"prompt {reply.num_prompt_tokens} tok, {prompt_rate:.1f} tok/s | generation {reply.num_new_tokens} tok, "
        f"{rate:.1f} tok/s | {sum(paged.lens)} tokens, {paged.pool.num_used} pages packed | {parts} | "
        f"{ratio}{limit}"
    )
