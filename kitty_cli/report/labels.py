"""Labels that keep apart: beside the points of a plot, or in a column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kitty_cli.report.markup import Markup, joined
from kitty_cli.report.svg import FONT_SIZE, line, text, width_of

_STEP_X, _STEP_Y = 10, 5
"""How finely a place is searched for, in pixels."""


class Box(NamedTuple):
    """A rectangle of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def inside(self, other: Box) -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


class Labels:
    """Places labels beside points: inside `frame`, off the points and off one another, near where that is possible."""

    def __init__(self, frame: Box, taken: Iterable[Box] = ()) -> None:
        self._frame = frame
        self._taken = list(taken)

    def add(self, x: float, y: float, words: str, gap: float = 8) -> Markup:
        """A label for the point (x, y), with a thin line to it where it had to move away; nothing if all is full."""
        wide, high = width_of(words), FONT_SIZE + 2.0
        beside = self._free(_beside(x, y, wide, high, gap))
        box = beside or self._free(self._elsewhere(x, y, wide, high))
        if box is None:
            return Markup()
        self._taken.append(box)
        label = text(box.left, box.top + FONT_SIZE - 1, words, class_="label halo")
        if beside:
            return label
        return joined(line(x, y, min(max(x, box.left), box.right), min(max(y, box.top), box.bottom), "leader"), label)

    def _free(self, boxes: Iterable[Box]) -> Box | None:
        """The first that lies inside and on nothing."""
        return next((b for b in boxes if b.inside(self._frame) and not any(b.meets(o) for o in self._taken)), None)

    def _elsewhere(self, x: float, y: float, wide: float, high: float) -> list[Box]:
        """Boxes all over the frame, the nearest to (x, y) first."""
        frame = self._frame
        lefts = range(math.ceil(frame.left), math.floor(frame.right - wide) + 1, _STEP_X)
        tops = range(math.ceil(frame.top), math.floor(frame.bottom - high) + 1, _STEP_Y)
        boxes = [Box(left, top, left + wide, top + high) for left in lefts for top in tops]
        return sorted(
            boxes,
            key=lambda b: math.hypot(max(b.left - x, x - b.right, 0), max(b.top - y, y - b.bottom, 0)),
        )


def _beside(x: float, y: float, wide: float, high: float, gap: float) -> list[Box]:
    """To the right of a point, to its left, above and below it."""
    corners = [
        (x + gap, y - high / 2),
        (x - gap - wide, y - high / 2),
        (x - wide / 2, y - gap - high),
        (x - wide / 2, y + gap),
    ]
    return [Box(left, top, left + wide, top + high) for left, top in corners]


def spread(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in their order, `distance` apart and between `low` and `high` where they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = [0.0] * len(wanted)
    place = low
    for i in order:
        place = max(place, wanted[i])
        found[i] = place
        place += distance
    limit = high
    for i in reversed(order):
        found[i] = min(found[i], limit)
        limit = found[i] - distance
    return found
