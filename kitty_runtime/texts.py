"""Text to measure on: built in, from a file, or from `datasets`; and its tokens in windows."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kitty_runtime.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN, SOURCE = "builtin", "source"


@dataclass(frozen=True)
class Text:
    """A text and what to call it in reports."""

    name: str
    content: str


def calibration_text() -> Text:
    """The first half of the manual pages that ship with CPython; `held_out_text` is the other half."""
    return Text("builtin:python-manual/a", _manual_pages(first_half=True))


def held_out_text() -> Text:
    """The other half of the manual pages. The two halves share some passages, since topics quote each other."""
    return Text("builtin:python-manual/b", _manual_pages(first_half=False))


SOURCE_MODULES = ("argparse", "tarfile", "_pydecimal")


def source_text() -> Text:
    """Source code of three modules of CPython's standard library: text of another kind."""
    content = "\n".join(inspect.getsource(import_module(name)) for name in SOURCE_MODULES)
    return Text("builtin:python-source", content)


def _manual_pages(first_half: bool) -> str:
    from pydoc_data.topics import topics

    names = sorted(topics)
    middle = len(names) // 2
    return "\n\n".join(topics[name] for name in (names[:middle] if first_half else names[middle:]))


def load_text(data: str, split: str = "train", column: str = "text") -> Text:
    """Text named on a command line.

    Args:
        data: ``builtin``; the path of a text file; or what ``datasets.load_dataset`` takes, ``NAME`` or
            ``NAME:CONFIG``, a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file included.
        split, column: which rows and which field of a dataset.
    Raises:
        DataError: it cannot be read, or holds no text.
    """
    if data == BUILTIN:
        return calibration_text()
    path = Path(os.path.expanduser(data))
    builder = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(path.suffix)
    if path.is_file() and builder is None:
        return Text(path.name, _read_file(path))
    if builder is not None:
        if not path.is_file():
            raise DataError(f"There is no file {data}.", "Check the path.")
        if not path.stat().st_size:
            raise DataError(f"{path} is empty.", "Use a longer text, or leave --data out.")
        return Text(path.name, _read_dataset(data, (builder,), {"data_files": str(path)}, "train", column))
    if path.suffix == ".txt" or data.startswith((".", "/", "~")):
        raise DataError(f"There is no file {data}.", "Check the path.")
    return Text(f"{data}[{split}]", _read_dataset(data, tuple(data.split(":", 1)), {}, split, column))


def load_check_text(data: str, split: str = "test", column: str = "text") -> Text:
    """Text to check accuracy on, which no profile should have been measured on.

    Args:
        data: ``builtin`` for `held_out_text`, ``source`` for `source_text`, else as `load_text` takes it.
        split, column, Raises: as `load_text`.
    """
    if data == BUILTIN:
        return held_out_text()
    return source_text() if data == SOURCE else load_text(data, split, column)


def _read_file(path: Path) -> str:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}).", "Convert it first.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions.") from error
    if not content.strip():
        raise DataError(f"{path} holds no text.", "Use a longer text, or leave --data out.")
    return content


def _read_dataset(data: str, name: tuple[str, ...], options: dict[str, str], split: str, column: str) -> str:
    """Rows of a dataset, joined by blank lines."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        rows = load_dataset(*name, **options, split=split)
    except (DatasetNotFoundError, DatasetGenerationError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"The dataset {data} cannot be loaded: {reason}",
            "Check its name, --data-split and the network, or pass a text file.",
        ) from error
    if column not in rows.column_names:
        raise DataError(
            f"The dataset {data} has no column {column!r}; it has {', '.join(rows.column_names)}.",
            "Choose one: --data-column",
        )
    content = "\n\n".join(str(value) for value in rows[column] if value)
    if not content.strip():
        raise DataError(f"The column {column!r} of {data} holds no text.", "Choose another with --data-column.")
    return content


def tokenize(text: Text, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Token ids of a text, int64 ``[num_tokens]``, without special tokens."""
    # verbose=False: the text is cut into windows, so its whole length is no concern.
    ids = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def windows_of(text: Text, ids: Tensor, num_windows: int, window_len: int, seed: int = 0) -> list[Tensor]:
    """Stretches of a text that do not overlap, in a random order that `seed` fixes.

    Args:
        text: for messages.
        ids: int64 ``[num_tokens]``.
        num_windows, window_len: how many stretches, of how many tokens.
    Raises:
        DataError: the text has fewer tokens.
    """
    available = len(ids) // window_len
    if available < num_windows:
        raise DataError(
            f"{text.name} has {len(ids)} tokens, {num_windows} x {window_len} are needed.",
            "Use a longer text, or fewer tokens (--tokens, --num-samples, --max-seq-length).",
        )
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return [ids[i * window_len : (i + 1) * window_len] for i in order[:num_windows].tolist()]


def token_sha256(windows: Sequence[Tensor]) -> str:
    """Hash of the token ids, so that two runs know whether they read the same text."""
    return hashlib.sha256(torch.cat(list(windows)).to(torch.int64).cpu().numpy().tobytes()).hexdigest()
