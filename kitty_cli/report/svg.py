"""What charts are drawn with: marks, text whose width is known, axes, a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from kitty_cli.report.markup import Markup, joined, tag
from kitty_cli.report.scale import Scale

WIDTH = 960
"""Of every chart, in pixels; the page may show it smaller."""

FONT_SIZE = 11
_CHARACTER = 0.6
"""Width of a character over the font's size, at the most, in the mean of a word."""

Anchor = Literal["start", "middle", "end"]


def picture(height: float, name: str, *content: str) -> Markup:
    """The SVG element; `name` is read to those who cannot see it."""
    return tag("svg", *content, viewBox=f"0 0 {WIDTH} {math.ceil(height)}", role="img", aria_label=name)


def text(x: float, y: float, words: str, anchor: Anchor = "start", class_: str = "label") -> Markup:
    """One line of text with its baseline at y."""
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def upright(x: float, y: float, words: str) -> Markup:
    """The title of a vertical axis, centered at y and read from below."""
    return tag("text", words, transform=f"translate({x:g} {y:g}) rotate(-90)", text_anchor="middle", class_="title")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Markup:
    """A rectangle; `title` shows when a mouse rests on it."""
    return tag("rect", *_title(title), x=x, y=y, width=max(width, 0), height=max(height, 0), class_=class_)


def dot(x: float, y: float, radius: float, class_: str, title: str = "") -> Markup:
    return tag("circle", *_title(title), cx=x, cy=y, r=radius, class_=class_)


def polyline(points: Sequence[tuple[float, float]], class_: str, title: str = "") -> Markup:
    return tag("polyline", *_title(title), points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def _title(words: str) -> list[Markup]:
    return [tag("title", words)] if words else []


def width_of(words: str, size: float = FONT_SIZE) -> float:
    """An upper estimate, in pixels."""
    return _CHARACTER * size * len(words)


def x_axis(scale: Scale, y: float, title: str, ticks: Sequence[tuple[float, str]], top: float | None = None) -> Markup:
    """Tick labels and a title below y; lines of the grid from there up to `top`."""
    marks = [text(scale(value), y + 14, words, "middle", "tick") for value, words in ticks]
    grid = [] if top is None else [line(scale(value), top, scale(value), y, "grid") for value, _ in ticks]
    middle = (scale.start + scale.stop) / 2
    return joined(
        *grid, line(scale.start, y, scale.stop, y, "axis"), *marks, text(middle, y + 31, title, "middle", "title")
    )


def y_axis(scale: Scale, x: float, title: str, ticks: Sequence[tuple[float, str]], right: float) -> Markup:
    """Tick labels and a title to the left of x; lines of the grid from there to `right`."""
    marks = [text(x - 6, scale(value) + 4, words, "end", "tick") for value, words in ticks]
    grid = [line(x, scale(value), right, scale(value), "grid") for value, _ in ticks]
    offset = 20 + max((width_of(words) for _, words in ticks), default=0)
    return joined(*grid, *marks, upright(x - offset, (scale.start + scale.stop) / 2, title))


def legend(x: float, y: float, entries: Sequence[tuple[Markup, str]]) -> Markup:
    """Marks of 14 x 10 pixels drawn at the origin, each with what it means, in one line."""
    parts = []
    for mark, words in entries:
        parts += [tag("g", mark, transform=f"translate({x:g} {y:g})"), text(x + 19, y + 9, words, class_="tick")]
        x += 19 + width_of(words) + 14
    return joined(*parts)
