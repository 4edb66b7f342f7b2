"""Files that are replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kitty_runtime.errors import KittyError


def check_writable(path: Path, option: str, error_type: type[KittyError]) -> None:
    """Verify before a long measurement that `write_whole` will be able to write there; makes the folder.

    Args:
        option: how to name another file, such as ``--output FILE``.
        error_type: raised when `path` is a folder or device, or in a folder that cannot be written.
    """
    try:
        if path.is_dir():
            raise error_type(f"{path} is a folder.", f"Name the file: {option}")
        if path.exists() and not path.is_file():
            raise error_type(f"{path} is no file.", f"Name a file: {option}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise _unwritable(path, option, error_type, error) from error


def write_whole(path: Path, content: bytes, option: str, error_type: type[KittyError]) -> None:
    """Write a file; one that is there is replaced whole or not at all. Arguments as `check_writable`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, option, error_type, error) from error


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _unwritable(path: Path, option: str, error_type: type[KittyError], error: OSError) -> KittyError:
    return error_type(f"{path} cannot be written: {error.strerror}.", f"Choose another place: {option}")
