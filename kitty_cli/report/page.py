"""The HTML around charts and tables: one file with its own style, for light and dark, that asks for nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kitty_cli import output
from kitty_cli.report.markup import Markup, joined, tag
from kitty_runtime.errors import ConfigError
from kitty_runtime.files import check_writable, write_whole

_OPTION = "--report FILE.html"

_STYLE = Markup("""
:root { --paper: #fff; --ink: #1b1f24; --muted: #59636e; --grid: #e2e6ea; --band: #eef1f4;
  --boost: #d55e00; --pale: #a5cbe6;
  --s0: #e9f1f9; --s1: #cfe1f2; --s2: #a5cbe6; --s3: #6ba9d6; --s4: #3780bc; --s5: #135796; --s6: #052c58;
  --c0: #0072b2; --c1: #d55e00; --c2: #008a64; --c3: #b0528a; --c4: #a67c00 }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e6e9ec; --muted: #a2acb6; --grid: #2b323a;
  --band: #232a32; --boost: #ffa03a; --pale: #3a6a94;
  --s0: #1a2530; --s1: #1d344a; --s2: #214b70; --s3: #2a6da6; --s4: #4b96d3; --s5: #8cc3f0; --s6: #e0f1ff;
  --c0: #56b4e9; --c1: #ff8f50; --c2: #2cc89a; --c3: #e59cc6; --c4: #e6c14a } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1000px; margin: 0 auto; padding: 24px 20px 60px }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 17px; margin: 44px 0 8px }
p { margin: 4px 0 } figure { margin: 0 } svg { display: block; width: 100%; height: auto }
figcaption { max-width: 75em; font-size: 13.5px } .source { color: var(--muted); font-size: 12px }
code { font-family: ui-monospace, monospace; font-size: 0.92em; overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums }
th, td { padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9em }
th { font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: 13.5px; margin: 8px 0 }
dt { color: var(--muted) } dd { margin: 0; overflow-wrap: anywhere }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink) }
svg .tick { fill: var(--muted) } svg .title { font-weight: 600 }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round }
.axis { stroke: var(--muted); stroke-width: 1 } .grid { stroke: var(--grid); stroke-width: 1 }
.leader { stroke: var(--muted); stroke-width: 0.7 }
.mark { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 4 3 } .band { fill: var(--band) }
.cells path { fill: none; stroke-width: 1; shape-rendering: crispEdges } .cells .boosted { stroke: var(--boost);
  stroke-width: 0.32; shape-rendering: auto } .ring { fill: none; stroke: var(--ink); stroke-width: 1.2 }
polyline.line { fill: none; stroke-linejoin: round }
polyline.faint { stroke: var(--muted); stroke-width: 1; opacity: 0.4 }
polyline.strong { stroke-width: 1.8 } polyline.sum { stroke: var(--ink); stroke-width: 2.2; stroke-dasharray: 7 4 }
.bar { fill: var(--c0) } .pale { fill: var(--pale) } .boost { fill: var(--boost) } .error { stroke-width: 1.3 }
.stem { stroke: var(--s3); stroke-width: 2 }
.hollow { fill: var(--paper); stroke: var(--ink); stroke-width: 1.5 } .plain { fill: var(--ink); stroke: var(--ink) }
""" + "".join(f".s{i} {{ fill: var(--s{i}); stroke: var(--s{i}) }} " for i in range(7))
+ "".join(f".c{i} {{ fill: var(--c{i}); stroke: var(--c{i}) }} " for i in range(5)))  # fmt: skip

_HEAD = Markup("""<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">""")
"""A browser that reads the policy fetches nothing, whatever got into the page."""


@dataclass(frozen=True)
class Source:
    """Where figures come from, as each caption says it."""

    model: str
    revision: str
    config_sha256: str
    data: str
    token_sha256: str
    command: str

    def line(self) -> Markup:
        """In short: hashes are cut to 12 digits."""
        model = (
            f"{self.model}{f' at revision {self.revision}' if self.revision else ''}, config {self.config_sha256[:12]}"
        )
        return tag(
            "p",
            f"{model}; text {self.data}, tokens {self.token_sha256[:12]}; ",
            tag("code", self.command),
            class_="source",
        )


@dataclass(frozen=True)
class Figure:
    """A chart, what it is called and what it says."""

    title: str
    picture: Markup
    caption: str

    def section(self, source: Source) -> Markup:
        caption = tag("figcaption", tag("p", self.caption), source.line())
        return joined(tag("h2", self.title), tag("figure", self.picture, caption))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Figures in columns; the first names the row."""
    head = tag("tr", *(tag("th", name) for name in columns))
    body = [tag("tr", *(tag("td", cell) for cell in cells)) for cells in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide")


def facts(entries: Mapping[str, str]) -> Markup:
    """Names and values, one pair a line; empty values are left out."""
    pairs = [joined(tag("dt", name), tag("dd", value)) for name, value in entries.items() if value]
    return tag("dl", *pairs)


def page(title: str, *sections: Markup) -> str:
    """The whole file."""
    head = tag("head", _HEAD, tag("title", title), tag("style", _STYLE))
    body = tag("body", tag("main", tag("h1", title), *sections))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def check_report_path(path: Path | None) -> None:
    """Verify before the work begins that a report, if one is wanted, can be written there.

    Raises:
        ConfigError: not the name of an HTML file, or a place that cannot be written.
    """
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--report is {str(path)!r}, the report is an HTML file.", f"Name it so: {_OPTION}")
    check_writable(path, _OPTION, ConfigError)


def write_report(path: Path, content: str) -> None:
    """Write the file whole or not at all, and say on stderr where it is."""
    write_whole(path, content.encode(), _OPTION, ConfigError)
    output.note(f"report: {path}")
