"""From values to pixels, and which round numbers an axis shows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on the pixels from `start` to `stop`; a value outside lies at the nearer end."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.stop - self.start) * (value - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers inside, about `most` of them: decades and few digits times decades, or even steps."""
        if not self.log or self.high < 3 * self.low:
            step = nice_step((self.high - self.low) / most)
            first = math.ceil(self.low / step - 1e-9)
            return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            inside = [d * 10.0**e for e in decades for d in digits if self._holds(d * 10.0**e)]
            if len(inside) <= most:
                return inside
        return inside[:: -(-len(inside) // most)]

    def _holds(self, value: float) -> bool:
        return self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)


def nice_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    decade = 10.0 ** math.floor(math.log10(least))
    return next(d * decade for d in (1, 2, 5, 10) if d * decade >= least * (1 - 1e-9))


def decades_around(values: Iterable[float]) -> tuple[float, float]:
    """The powers of ten that enclose positive values, at least one decade."""
    logs = [math.log10(value) for value in values]
    low = math.floor(min(logs))
    return 10.0**low, 10.0 ** max(math.ceil(max(logs)), low + 1)


def short(value: float) -> str:
    """A number on an axis: 3 digits, powers of ten where that is shorter."""
    if value and not 1e-3 <= abs(value) < 1e4:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.3g}"
