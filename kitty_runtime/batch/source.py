"""The input of a batch: one pass that finds its rows, and each row read again when its turn comes.

Prompts are not kept in memory: 1,000,000 rows take their ids, offsets and hashes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kitty_runtime.batch.lines import MAX_LINE_BYTES, Identity, RowKey, identify, row_sha256, strip_line
from kitty_runtime.errors import ConfigError, DataError

_PIECE_BYTES = 2**20
_NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class RowEntry:
    """Where a row is.

    Attributes:
        key: see `RowKey`.
        line: its number in the file, from 1; blank lines count.
        offset, num_bytes: of the line in the file, with its line end.
        row_sha256: of the line without blanks around it.
    """

    key: RowKey
    line: int
    offset: int
    num_bytes: int
    row_sha256: str

    @property
    def custom_id(self) -> str | None:
        """None if the line has no id that can be read."""
        return self.key if isinstance(self.key, str) else None

    @property
    def too_large(self) -> bool:
        return self.num_bytes > MAX_LINE_BYTES


@dataclass(frozen=True)
class BatchInput:
    """An input that was checked.

    Attributes:
        name: for messages.
        file: open for reading; a spooled copy of what cannot be read twice.
        entries: rows in order.
        models: models that lines ask for, the first few.
        ignored: fields of simple lines that are no parameters, the first few.
    """

    name: str
    file: BinaryIO
    entries: tuple[RowEntry, ...]
    models: tuple[str, ...]
    ignored: tuple[str, ...]

    def read(self, entry: RowEntry) -> bytes:
        """The line without blanks around it.

        Raises:
            DataError: the file was changed since it was checked.
        """
        self.file.seek(entry.offset)
        stripped = strip_line(self.file.read(entry.num_bytes))
        if row_sha256(stripped) != entry.row_sha256:
            raise DataError(
                f"{self.name} was changed while the batch ran (line {entry.line}).",
                "Leave it alone; --resume goes on with what it is now.",
            )
        return stripped


@contextmanager
def open_input(path: Path | None, stdin: BinaryIO | None) -> Iterator[BatchInput]:
    """Open and check an input.

    Args:
        path: None reads `stdin`. What is no plain file (a pipe) is copied to a temporary file first.
        stdin: None if it is closed.
    Raises:
        DataError: missing, unreadable or empty.
        ConfigError: an id that two lines have.
    """
    name = "stdin" if path is None else str(path)
    try:
        with _seekable(path, stdin) as file:
            yield _checked(name, file)
    except OSError as error:
        if path is None or error.filename not in (path, str(path)):
            raise
        if isinstance(error, FileNotFoundError):
            raise DataError(f"There is no file {path}.", "Check the path.") from error
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Name a file of requests.") from error


@contextmanager
def _seekable(path: Path | None, stdin: BinaryIO | None) -> Iterator[BinaryIO]:
    if path is not None and path.is_file():
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile(prefix="kitty-batch-") as copy:
        if path is not None:
            with path.open("rb") as pipe:
                shutil.copyfileobj(pipe, copy)
        elif stdin is None:
            raise DataError("Standard input is closed.", "Pipe requests in, or name a file of them.")
        else:
            shutil.copyfileobj(stdin, copy)
        copy.seek(0)
        yield copy


def _checked(name: str, file: BinaryIO) -> BatchInput:
    entries: list[RowEntry] = []
    lines: dict[RowKey, int] = {}
    doubles: list[str] = []
    models: dict[str, None] = {}
    ignored: dict[str, None] = {}
    for entry, identity in _scan(file):
        if entry.key in lines:
            doubles.append(f"{entry.key!a} (lines {lines[entry.key]} and {entry.line})")
        lines.setdefault(entry.key, entry.line)
        entries.append(entry)
        if identity.model and len(models) < _NUM_NAMED:
            models[identity.model] = None
        for field in identity.ignored if len(ignored) < _NUM_NAMED else ():
            ignored[field] = None
    if doubles:
        more = f" and {len(doubles) - _NUM_NAMED} more" if len(doubles) > _NUM_NAMED else ""
        raise ConfigError(
            f"{name} uses an id twice: {', '.join(doubles[:_NUM_NAMED])}{more}.", "Give each row an id of its own."
        )
    if not entries:
        raise DataError(f"{name} holds no requests.", "Write one JSON object per line.")
    return BatchInput(name, file, tuple(entries), tuple(models), tuple(ignored))


def _scan(file: BinaryIO) -> Iterator[tuple[RowEntry, Identity]]:
    """Every line that is not blank. A line that is too long is read in pieces and known by its number."""
    line = offset = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        line += 1
        if len(raw) > MAX_LINE_BYTES:
            digest, num_bytes = hashlib.sha256(raw), len(raw)
            while not raw.endswith(b"\n") and (raw := file.readline(_PIECE_BYTES)):
                digest.update(raw)
                num_bytes += len(raw)
            yield RowEntry(line, line, offset, num_bytes, digest.hexdigest()), Identity(line)
        else:
            num_bytes = len(raw)
            stripped = strip_line(raw)
            if stripped:
                identity = identify(stripped, line)
                yield RowEntry(identity.key, line, offset, num_bytes, row_sha256(stripped)), identity
        offset += num_bytes


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths name one file, also through links or where it does not exist yet."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)
