"""Every error kitty raises on purpose: what went wrong, the value, and what to do next."""

from __future__ import annotations


class KittyError(Exception):
    """Base of all deliberate errors.

    Args:
        message: what went wrong, with the offending value.
        hint: the next step, as a sentence or a command; shown on its own line.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ConfigError(KittyError, ValueError):
    """A cache setting outside what the page format can hold."""


class MissingPackageError(KittyError, ImportError):
    """A package that only an extra of kitty's installs."""


class ShapeError(KittyError, ValueError):
    """Tensors whose shapes, dtypes or devices do not fit together."""


class NumericsError(KittyError, ArithmeticError):
    """NaN or infinity in keys, values or measurements."""


class PoolError(KittyError, RuntimeError):
    """The page pool has no free page, or its bookkeeping is broken."""


class UnsupportedModelError(KittyError):
    """The architecture cannot run on paged 2-bit keys and values."""


class ModelLoadError(KittyError):
    """A model that is missing, gated, unreadable or too large for the memory."""


class MemoryLimitError(KittyError, MemoryError):
    """The device ran out of memory while the model ran."""


class UnsupportedOperationError(KittyError):
    """An operation that a paged quantized cache cannot do, such as cropping."""


class ProfileError(KittyError, ValueError):
    """A boost profile that is damaged or does not belong to the model."""


class DataError(KittyError, ValueError):
    """Calibration or input text that cannot be read or is too short."""
