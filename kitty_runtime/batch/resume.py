"""What a resumed batch has left to do: each row once, answered as its line and the settings are now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kitty_runtime.batch.journal import Stored
from kitty_runtime.batch.lines import RowKey
from kitty_runtime.batch.source import RowEntry
from kitty_runtime.errors import ConfigError

Reason = Literal["gone", "double", "edited", "settings", "failed"]
"""Why a record does not stay. gone: its row is not in the input. double: another record answers the row. edited: the
line has changed. settings: the model or a setting has. failed: it is an error, and those are to be done again."""


@dataclass(frozen=True)
class Plan:
    """What to do with an input and the records that are there.

    Attributes:
        todo: rows to answer, in order.
        keep: records that stay, in order.
        replaced: answers that do not stay, in order; errors to be done again are not among them.
        reasons: how many records do not stay, by why.
    """

    todo: tuple[RowEntry, ...]
    keep: tuple[Stored, ...] = ()
    replaced: tuple[Stored, ...] = ()
    reasons: tuple[tuple[Reason, int], ...] = ()

    @property
    def num_failed_kept(self) -> int:
        return sum(record.failed for record in self.keep)


def check_same_batch(entries: Sequence[RowEntry], stored: Sequence[Stored]) -> None:
    """Verify, before a model loads, that an output is this input's.

    Raises:
        ConfigError: no record answers a row of the input: most likely it is another batch's output.
    """
    keys = {entry.key for entry in entries}
    if stored and not any(record.key in keys for record in stored):
        raise ConfigError(
            f"None of the {len(stored)} records in the output answers a row of this input.",
            "Name another output with -o, or replace this one with --overwrite.",
        )


def plan_resume(
    entries: Sequence[RowEntry], stored: Sequence[Stored], settings_sha256: str, retry_failed: bool = False
) -> Plan:
    """
    Args:
        entries: rows of the input.
        stored: records of the output.
        settings_sha256: of the settings now.
        retry_failed: whether errors are done again.
    """
    rows = {entry.key: entry for entry in entries}
    done: set[RowKey] = set()
    keep: list[Stored] = []
    replaced: list[Stored] = []
    reasons: Counter[Reason] = Counter()
    for record in stored:
        reason = _reason(record, rows.get(record.key), record.key in done, settings_sha256, retry_failed)
        if reason is None:
            keep.append(record)
            done.add(record.key)
            continue
        reasons[reason] += 1
        if not record.failed:
            replaced.append(record)
    todo = tuple(entry for entry in entries if entry.key not in done)
    return Plan(todo, tuple(keep), tuple(replaced), tuple(reasons.items()))


def _reason(
    record: Stored, row: RowEntry | None, is_done: bool, settings_sha256: str, retry_failed: bool
) -> Reason | None:
    if row is None:
        return "gone"
    if is_done:
        return "double"
    if record.row_sha256 != row.row_sha256:
        return "edited"
    if record.settings_sha256 != settings_sha256:
        return "settings"
    return "failed" if record.failed and retry_failed else None
