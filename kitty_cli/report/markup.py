"""Elements of HTML and SVG. The only place that escapes: text becomes markup nowhere else."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is markup already."""


def tag(name: str, *content: str, **attributes: str | float) -> Markup:
    """An element; content is escaped unless it is `Markup`.

    Args:
        attributes: ``class_`` is written ``class``, ``text_anchor`` ``text-anchor``; numbers with two decimals at most.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else number(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*content: str) -> Markup:
    """Pieces one after another, each escaped unless it is `Markup`."""
    return Markup("".join(piece if isinstance(piece, Markup) else escape(piece) for piece in content))


def number(value: float) -> str:
    """With two decimals at most.

    Raises:
        ValueError: NaN or infinity, which no picture can show.
    """
    if value - value != 0:
        raise ValueError(f"{value} is no coordinate")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
