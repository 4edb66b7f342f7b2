"""The output file of a batch: one writer, each record written whole and at once, repaired after a kill."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from kitty_runtime.batch.lines import RowKey
from kitty_runtime.batch.records import failed
from kitty_runtime.errors import ConfigError, DataError

SYNC_S = 1.0
"""Seconds between two fsync calls, about 3 ms each: a power cut loses what came after the last, a kill nothing."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record that an earlier run wrote.

    Attributes:
        key: the row that it answers.
        row_sha256, settings_sha256: of the line and the settings that it answers.
        failed: whether it is an error.
        offset, num_bytes: where it is in the file, with its line end if it has one.
    """

    key: RowKey
    row_sha256: str
    settings_sha256: str
    failed: bool
    offset: int
    num_bytes: int


class Journal:
    """Records on disk; made by `open_journal`, which holds the lock.

    Args:
        path: the file itself, no link to it.
        name: the path as it was given, for messages.
    """

    def __init__(self, path: Path, name: Path) -> None:
        self.path = path
        self.name = name
        self._fd: int | None = None
        self._synced_at = 0.0

    @property
    def stale_path(self) -> Path:
        """Where records go that a resumed batch replaces."""
        return self.path.with_name(f"{self.path.stem}.stale.jsonl")

    def stored(self) -> tuple[Stored, ...]:
        """The records of earlier runs; a last line that was cut off is none.

        Raises:
            ConfigError: another line that is no record.
        """
        if not self.path.exists():
            return ()
        found, offset = [], 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                record = _stored(line, offset)
                if record is not None:
                    found.append(record)
                elif line.strip() and line.endswith(b"\n"):
                    raise ConfigError(
                        f"Line {number} of {self.name} is no record of kitty batch.",
                        "Name another output with -o, or replace this one with --overwrite.",
                    )
                offset += len(line)
        return tuple(found)

    def start(self, keep: Sequence[Stored] = (), replaced: Sequence[Stored] = ()) -> None:
        """Make the file hold exactly the records to keep, in order, and open it for more.

        Args:
            keep: of `stored`, in order; nothing empties the file.
            replaced: of `stored`; they are appended to `stale_path`.
        Raises:
            DataError: the file cannot be written.
        """
        try:
            if replaced:
                with self.path.open("rb") as source, self.stale_path.open("ab") as target:
                    _copy(source, replaced, target)
            if not self._is_exactly(keep):
                self._rewrite(keep)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise _unwritable(self.name, error) from error

    def write(self, line: bytes) -> None:
        """Append a record, with its line end.

        Raises:
            OSError: the disk is full, or gone.
        """
        if self._fd is None:
            raise ValueError("the journal has not been started")
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        now = time.monotonic()
        if now - self._synced_at >= SYNC_S:
            os.fsync(self._fd)
            self._synced_at = now

    def close(self) -> None:
        """Wait until everything is on the disk."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _is_exactly(self, keep: Sequence[Stored]) -> bool:
        """Whether the file is the records to keep, one after another, and nothing else."""
        if not self.path.exists():
            return not keep
        end = 0
        for record in keep:
            if record.offset != end:
                return False
            end += record.num_bytes
        if end != self.path.stat().st_size:
            return False
        with self.path.open("rb") as file:
            file.seek(max(0, end - 1))
            return end == 0 or file.read(1) == b"\n"

    def _rewrite(self, keep: Sequence[Stored]) -> None:
        """Through a file beside it: whenever this is killed, the records are in one of the two."""
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("wb") as target:
            if keep:
                with self.path.open("rb") as source:
                    _copy(source, keep, target)
            target.flush()
            os.fsync(target.fileno())
        if self.path.exists():
            shutil.copymode(self.path, partial)
        partial.replace(self.path)


@contextmanager
def open_journal(path: Path, resume: bool, overwrite: bool) -> Iterator[Journal]:
    """Lock an output; nothing in it changes before `Journal.start`.

    Args:
        path: made if it is not there; its folder has to be.
        resume, overwrite: whether records in it are welcome, or may go.
    Raises:
        ConfigError: records are in it and neither was asked for, it is no plain file, or another process writes it.
        DataError: it cannot be written.
    """
    _check_kind(path)
    name, path = path, Path(os.path.realpath(path))  # a link stays one, and two names of a file share a lock
    lock_path = path.with_name(f".{path.name}.lock")
    lock = FileLock(lock_path)
    try:
        os.close(os.open(lock_path, os.O_WRONLY | os.O_CREAT, 0o666))  # says why it cannot; the lock would wait for it
        lock.acquire(timeout=0)
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))
    except Timeout as error:
        raise ConfigError(
            f"Another process is writing {name}.", "Wait for it, or name another output with -o."
        ) from error
    except OSError as error:
        raise _unwritable(name, error) from error
    try:
        if path.exists() and path.stat().st_size and not resume and not overwrite:
            raise ConfigError(
                f"{name} has records already.", "Continue it with --resume, or replace it with --overwrite."
            )
        journal = Journal(path, name)
        try:
            yield journal
        finally:
            journal.close()
    finally:
        lock.release()


def _check_kind(path: Path) -> None:
    try:
        is_there, is_dir, is_file = path.exists(), path.is_dir(), path.is_file()
    except OSError as error:  # such as a name that is too long
        raise _unwritable(path, error) from error
    if is_dir:
        raise ConfigError(f"{path} is a folder.", "Name a file: -o FILE")
    if is_there and not is_file:
        raise ConfigError(f"{path} is no plain file.", "Name a file, or - for standard output: -o FILE")


def _stored(line: bytes, offset: int) -> Stored | None:
    try:
        record = json.loads(line)
        mark = record["kitty"]
        key = mark["line"] if record["custom_id"] is None else record["custom_id"]
        found = Stored(key, mark["row_sha256"], mark["settings_sha256"], failed(record), offset, len(line))
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(key, (str, int)) else None


def _copy(source: BinaryIO, records: Sequence[Stored], target: BinaryIO) -> None:
    for record in records:
        source.seek(record.offset)
        target.write(source.read(record.num_bytes).removesuffix(b"\n") + b"\n")


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be written: {error.strerror}.", "Choose another place: -o FILE")
