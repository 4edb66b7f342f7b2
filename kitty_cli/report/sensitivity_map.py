"""Which key channels are sensitive: every channel of every KV head, and beside them what each layer costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kitty_cli.report.labels import Box, Labels
from kitty_cli.report.markup import Markup, joined, tag
from kitty_cli.report.page import Figure
from kitty_cli.report.scale import Scale, nice_step, short
from kitty_cli.report.svg import WIDTH, dot, legend, line, picture, rect, text, upright, width_of, x_axis

if TYPE_CHECKING:
    from kitty_runtime.profiles import BoostProfile

SHADES = 7
"""From the median up, each a factor of two."""

_LEFT, _RIGHT, _TOP = 58.0, 800.0, 72.0
_TALLEST, _LEAST_ROW, _MOST_ROW = 560, 2, 8
_OUTLIERS, _OUTLIER = 8, 8.0
"""At most so many heads have their highest channel named, if it is so many times the median."""


class Row(NamedTuple):
    """One KV head: scores over its median, and the channels boosted in it."""

    layer: int
    head: int
    scores: Sequence[float]
    boosted: Sequence[int]


class Grid(NamedTuple):
    """Where rows and channels lie, in pixels."""

    row: float
    channel: float
    num_rows: int

    @property
    def bottom(self) -> float:
        return _TOP + self.row * self.num_rows


def sensitivity_map(
    profile: BoostProfile, budgets: Mapping[int, int], wavelengths: Sequence[float] | None = None
) -> Figure:
    """
    Args:
        budgets: boosted channels per KV head, by layer.
        wavelengths: of the rotary embedding, in tokens, by channel; None where they are not known.
    """
    rows = rows_of(profile, budgets)
    head_dim = max(len(row.scores) for row in rows)
    height = min(max(_TALLEST // len(rows), _LEAST_ROW), _MOST_ROW)
    grid = Grid(height, (_RIGHT - _LEFT) / head_dim, len(rows))
    channels = Scale(0, head_dim, _LEFT, _RIGHT)
    step = max(head_dim // 8, 1)
    content = [
        _legend(),
        _cells(rows, grid),
        x_axis(channels, grid.bottom, "key channel", [(c, str(c)) for c in range(0, head_dim + 1, step)]),
        _layers(rows, grid, {index: layer.kl[0] for index, layer in profile.layers.items()}),
        _outliers(rows, grid),
    ]
    if wavelengths is not None:
        content.append(_wavelengths(channels, wavelengths))
    return Figure(
        "Sensitivity of key channels",
        picture(grid.bottom + 38, "Map of channel scores by layer, KV head and channel", *content),
        f"Scores by the metric {profile.provenance.metric}, over the median of their KV head, on a logarithmic scale. "
        f"Marked: the channels of highest score, as many as each layer's budget; the policy weighted chooses as many "
        f"anew in each page. Named: the highest channels of up to {_OUTLIERS} heads. On the right: the KL divergence "
        "with this layer alone at 2 bits.",
    )


def rows_of(profile: BoostProfile, budgets: Mapping[int, int]) -> list[Row]:
    """The heads of all layers, in order."""
    from kitty_runtime.quant.boost import choose_boosted

    rows = []
    for index, layer in profile.layers.items():
        boosted = choose_boosted(layer.channel_scores, budgets[index]).tolist()
        for head, scores in enumerate(layer.relative_scores.tolist()):
            rows.append(Row(index, head, scores, boosted[head]))
    return rows


def shade(score: float) -> int:
    """0 below the median, then one more with every factor of two, up to `SHADES`."""
    return min(math.floor(math.log2(score)) + 1, SHADES) if score >= 1 else 0


def _cells(rows: Sequence[Row], grid: Grid) -> Markup:
    """One path per shade, in units of channels and rows: neighbors of one shade are one stroke."""
    paths: list[list[str]] = [[] for _ in range(SHADES + 1)]
    marks = []
    for y, row in enumerate(rows):
        for level, start, length in _runs(row.scores):
            paths[level].append(f"M{start} {y}.5h{length}")
        marks += [f"M{channel}.2 {y}.5h.6" for channel in row.boosted]
    shaded = [tag("path", d="".join(paths[level]), class_=f"s{level - 1}") for level in range(1, SHADES + 1)]
    boosted = tag("path", d="".join(marks), class_="boosted")
    place = f"translate({_LEFT:g} {_TOP:g}) scale({grid.channel:g} {grid.row:g})"
    return tag("g", *shaded, boosted, class_="cells", transform=place)


def _runs(scores: Sequence[float]) -> Iterator[tuple[int, int, int]]:
    """Shade, first channel and length of neighbors with one shade."""
    start = 0
    for level, group in groupby(map(shade, scores)):
        length = len(list(group))
        yield level, start, length
        start += length


def _layers(rows: Sequence[Row], grid: Grid, kls: Mapping[int, float]) -> Markup:
    """At the left numbers of layers, at the right bars of their KL, between them lines."""
    largest = max(kls.values()) or 1.0
    scale = Scale(0, largest, _RIGHT + 26, WIDTH - 24)
    content = []
    bands = [(index, list(group)) for index, group in groupby(enumerate(rows), key=lambda item: item[1].layer)]
    every = nice_step(12 / (grid.row * len(rows) / len(bands)))
    for place, (index, band) in enumerate(bands):
        top, high = _TOP + band[0][0] * grid.row, len(band) * grid.row
        if place % max(round(every), 1) == 0:
            content.append(text(_LEFT - 6, top + high / 2 + 4, str(index), "end", "tick"))
        content.append(line(_LEFT, top, _RIGHT, top, "grid"))
        bar = scale(kls[index]) - scale.start
        content.append(rect(scale.start, top + high * 0.1, bar, high * 0.8, "bar", f"layer {index}: {kls[index]:.3g}"))
    ticks = [(value, short(value)) for value in scale.ticks(3)]
    return joined(
        x_axis(scale, grid.bottom, "KL at 2 bits, nats", ticks),
        line(_RIGHT, _TOP, _RIGHT, grid.bottom, "grid"),
        *content,
        upright(14, (_TOP + grid.bottom) / 2, "layer, a row per KV head"),
    )


def _outliers(rows: Sequence[Row], grid: Grid) -> Markup:
    """Rings and names of the highest channels, the highest first."""
    tops = sorted(((max(row.scores), -y) for y, row in enumerate(rows)), reverse=True)[:_OUTLIERS]
    radius = max(grid.channel, grid.row) / 2 + 2
    rings, named, taken = [], [], []
    for score, minus_y in tops:
        if score >= _OUTLIER:
            row = rows[-minus_y]
            channel = list(row.scores).index(score)
            x, y = _LEFT + (channel + 0.5) * grid.channel, _TOP + (0.5 - minus_y) * grid.row
            rings.append(dot(x, y, radius, "ring", f"layer {row.layer}, KV head {row.head}, channel {channel}"))
            named.append((x, y, f"channel {channel}: {short(score)}x"))
            taken.append(Box(x - radius, y - radius, x + radius, y + radius))
    labels = Labels(Box(_LEFT, _TOP, _RIGHT, grid.bottom), taken)
    return joined(*rings, *(labels.add(x, y, words, radius + 2) for x, y, words in named))


def _wavelengths(channels: Scale, wavelengths: Sequence[float]) -> Markup:
    """On the top axis, where the wavelength passes a power of ten."""
    content = [text(_LEFT, _TOP - 22, "RoPE wavelength, tokens", class_="title")]
    free = _LEFT
    for channel in range(1, len(wavelengths)):
        before, here = wavelengths[channel - 1], wavelengths[channel]
        if not before < here < math.inf or math.floor(math.log10(here)) == math.floor(math.log10(before)):
            continue
        words = short_count(10 ** math.floor(math.log10(here)))
        x, wide = channels(channel), width_of(words)
        if x - wide / 2 >= free and x + wide / 2 <= channels.stop:
            content += [line(x, _TOP - 4, x, _TOP, "axis"), text(x, _TOP - 7, words, "middle", "tick")]
            free = x + wide / 2 + 4
    return joined(*content)


def short_count(value: float) -> str:
    """A power of ten with k, M or G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def _legend() -> Markup:
    swatches = [(rect(0, 0, 14, 10, f"s{level}"), f"{2**level}x") for level in range(SHADES)]
    swatches[-1] = (swatches[-1][0], f"{2 ** (SHADES - 1)}x and more")
    mark = joined(rect(0, 0, 14, 10, "band"), rect(2, 3.5, 10, 3, "boost"))
    words = "score over the head's median, from"
    entries = [*swatches, (mark, "boosted to 4 bits"), (dot(7, 5, 4.5, "ring"), "outlier")]
    return joined(text(_LEFT, 13, words, class_="title"), legend(_LEFT + width_of(words) + 8, 4, entries))
