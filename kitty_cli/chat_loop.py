"""The interactive chat: line editing, history, slash commands."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kitty_cli import output
from kitty_cli.commands.chat import answer
from kitty_runtime.errors import DataError, KittyError
from kitty_runtime.home import kitty_home

if TYPE_CHECKING:
    from kitty_runtime.chat import ChatSession

HELP = """\
/help            this list
/clear           forget the conversation
/system TEXT     set the system prompt and start over
/read FILE       send a file as a message
/save FILE       save the conversation as JSON
/load FILE       continue a saved conversation
/regen           answer the last message again
/stats           the cache in bytes
/bye             leave (also Ctrl-D)
\"\"\"              begin and end a message of several lines
Ctrl-C           stop the answer, not the session"""

_FENCE = '"""'
_CONVERSATION_VERSION = 1


def talk(session: ChatSession) -> None:
    """Read messages until /bye or Ctrl-D."""
    save_history = _use_history()
    output.note("/help lists the commands, /bye leaves.")
    try:
        while True:
            try:
                message = read_message()
            except EOFError:
                output.text("")
                return
            except KeyboardInterrupt:
                output.note("\nUse /bye or Ctrl-D to leave.")
                continue
            if not handle(session, message):
                return
    finally:
        save_history()


def read_message() -> str:
    """One line, or several between lines of three quotes.

    Raises:
        EOFError: Ctrl-D at the prompt.
    """
    line = input(">>> ")
    if not line.lstrip().startswith(_FENCE):
        return line.strip()
    lines = [line.lstrip()[len(_FENCE) :]]
    while not lines[-1].rstrip().endswith(_FENCE):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip()[: -len(_FENCE)]
    return "\n".join(lines).strip()


def handle(session: ChatSession, message: str) -> bool:
    """Do what a message asks; False ends the session. Errors are shown, the session goes on."""
    if not message:
        return True
    if message in ("/bye", "/exit", "/quit"):
        return False
    try:
        if message.startswith("/"):
            command, _, argument = message.partition(" ")
            _command(command)(session, argument.strip())
        else:
            answer(session, message)
    except KittyError as problem:
        output.error(problem)
    except KeyboardInterrupt:
        output.note("Stopped.")
    return True


def _command(name: str) -> Callable[[ChatSession, str], None]:
    commands: dict[str, Callable[[ChatSession, str], None]] = {
        "/help": lambda session, argument: output.note(HELP),
        "/clear": _clear,
        "/system": _system,
        "/read": _read,
        "/save": _save,
        "/load": _load,
        "/regen": lambda session, argument: answer(session, session.regenerate()),
        "/stats": lambda session, argument: output.note(stats(session)),
    }
    if name not in commands:
        raise DataError(f"There is no command {name}.", "/help lists the commands.")
    return commands[name]


def _clear(session: ChatSession, argument: str) -> None:
    session.clear()
    output.note("Forgot the conversation.")


def _system(session: ChatSession, argument: str) -> None:
    session.system_prompt = argument
    session.clear()
    output.note("Set the system prompt and forgot the conversation.")


def _read(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/read")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {_reason(error)}.", "Check the path.") from error
    answer(session, text)


def _save(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/save")
    document = {"schema_version": _CONVERSATION_VERSION, "messages": session.messages}
    try:
        path.write_text(json.dumps(document, ensure_ascii=False, indent=2), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {_reason(error)}.", "Choose another place.") from error
    output.note(f"Saved {len(session.messages)} messages to {path}.")


def _load(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/load")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        messages = [{"role": m["role"], "content": m["content"]} for m in document["messages"]]
        if not all(isinstance(value, str) for m in messages for value in m.values()):
            raise ValueError("a message is not text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a saved conversation: {_reason(error)}.", "Save one with /save FILE."
        ) from error
    session.messages = messages
    session.forget_tokens()
    output.note(f"Loaded {len(messages)} messages; the next answer reads them again.")


def _path(argument: str, command: str) -> Path:
    try:
        words = shlex.split(argument)
    except ValueError:
        words = [argument]
    if len(words) != 1:
        raise DataError(
            f"{command} takes one file, not {argument!r}.", f"Write {command} FILE; quote a name with spaces."
        )
    return Path(os.path.expanduser(words[0]))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def stats(session: ChatSession) -> str:
    """The cache's tokens, pages and bytes."""
    if session.num_stored == 0:
        return "The cache is empty."
    counters, size = session.engine.counters, session.engine.pool_size
    used, allocated = session.used_bytes(), session.engine.cache.bytes_of(size.num_pages, size.num_slots + 1)
    lines = [f"{session.num_stored} tokens, {counters.pages_used} of {counters.pages_total} pages in use"]
    for name in ("pages", "sinks", "rings", "statistics", "total"):
        sizes = output.size(getattr(used, name)), output.size(getattr(allocated, name))
        lines.append(f"{name:<10}  used {sizes[0]:>10}  allocated {sizes[1]:>10}")
    lines.append(f"16 bits would take {output.size(session.dense_bytes())}")
    return "\n".join(lines)


def _use_history() -> Callable[[], None]:
    """Line editing with a history that is kept between sessions, where Python has readline."""
    try:
        import readline
    except ImportError:  # Windows
        return lambda: None
    file = kitty_home() / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    except OSError as error:
        output.note(f"No history: {file} cannot be used: {_reason(error)}.")
        return lambda: None
    readline.set_history_length(1000)
    return lambda: _write_history(file)


def _write_history(file: Path) -> None:
    import readline

    try:
        readline.write_history_file(file)
    except OSError as error:
        output.note(f"The history was not saved to {file}: {_reason(error)}.")
