"""What can be wrong with one line of a batch; neither ends the batch."""

from __future__ import annotations

from kitty_runtime.errors import DataError


class LineError(DataError):
    """A line that cannot be read as a request with an id.

    Args:
        code: for programs, such as ``invalid_json``.
        message: what is wrong.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RowError(DataError):
    """A request that cannot be answered as it asks: status 400.

    Args:
        message: what is wrong, with the value, and what is right.
        param: the parameter, or None.
        code: for programs, such as ``invalid_value``.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def shown(value: object, limit: int = 60) -> str:
    """A value for a message: one line of ASCII, cut where it gets long."""
    text = ascii(value[: limit + 1] if isinstance(value, (str, list, tuple)) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
