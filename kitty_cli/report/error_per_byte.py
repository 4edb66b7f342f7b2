"""What a byte buys: each method's KL divergence against its bytes per token, on text that was held out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kitty_cli.report.labels import Box, Labels
from kitty_cli.report.markup import Markup, joined
from kitty_cli.report.page import Figure
from kitty_cli.report.scale import Scale, short
from kitty_cli.report.svg import WIDTH, dot, legend, line, picture, polyline, rect, text, x_axis, y_axis
from kitty_runtime.config import CacheConfig

if TYPE_CHECKING:
    from kitty_runtime.check import Check, MethodReport

_LEFT, _RIGHT, _TOP, _BOTTOM = 78.0, WIDTH - 20.0, 62.0, 470.0
_COLORS = 5
_LONGEST_NAME = 34
_FAR = 30


class Point(NamedTuple):
    """One method in the plot; `boost_ratio` and `family` only where others differ from it in nothing but the boost."""

    name: str
    bytes_per_token: float
    kl: float
    se: float
    emulated: bool
    boost_ratio: float = 0.0
    family: CacheConfig | None = None


def error_per_byte(check: Check) -> Figure:
    """All methods of a check as points with errors; methods that differ only in their boost are joined to a line."""
    points = points_of(check.methods)
    floor = check.noise_floor.statistics.kl_mean
    dense = check.noise_floor.cost.dense_bytes_per_token
    x, y = _scales(points, floor)
    families = _families(points)
    return Figure(
        "Error per byte",
        picture(
            _BOTTOM + 40,
            "KL divergence against bytes per token, by method",
            _axes(x, y, dense),
            _floor(y, floor),
            *(_sweep(members, color, x, y) for color, members in enumerate(families)),
            _points(points, families, x, y),
            _legend(families, any(p.emulated for p in points)),
        ),
        "Lower and further left is better. Mean KL divergence of the next-token distributions from those at 16 bits, "
        "with one standard error over windows; bytes of everything that is stored, at the length of a window. The "
        f"noise floor is what rounding alone does: {short(floor)} nats with 16-bit pages."
        + (" What lies below the plot is drawn at its lower edge." if floor < y.low else ""),
    )


def points_of(reports: Iterable[MethodReport]) -> list[Point]:
    """The methods of a check, emulated ones marked; settings that quantize keys to 2 bits have a family."""
    points = []
    for report in reports:
        s, config = report.statistics, getattr(report.method, "config", None)
        point = Point(report.name, report.cost.bytes_per_token, s.kl_mean, s.kl_se or 0.0, config is None)
        if isinstance(config, CacheConfig) and config.k_bits == 2:
            point = point._replace(boost_ratio=config.boost_ratio, family=replace(config, boost_ratio=0.0))
        points.append(point)
    return points


def _scales(points: Sequence[Point], floor: float) -> tuple[Scale, Scale]:
    """Bytes and KL of the methods. A noise floor far below the others would press them together: it is left out."""
    sizes = [p.bytes_per_token for p in points]
    kls = [p.kl for p in points if p.kl > 1.5 * floor] or [floor or 1e-6]
    if floor > min(kls) / _FAR:
        kls.append(floor)
    return (
        Scale(min(sizes) / 1.1, max(sizes) * 1.1, _LEFT, _RIGHT, log=True),
        Scale(min(kls) / 1.8, max(kls) * 1.8, _BOTTOM - 14, _TOP, log=True),
    )


def _families(points: Sequence[Point]) -> list[list[Point]]:
    """Points of one family at several boosts, each by rising boost."""
    found: dict[CacheConfig, list[Point]] = {}
    for point in points:
        if point.family is not None:
            found.setdefault(point.family, []).append(point)
    return [sorted(members, key=lambda p: p.boost_ratio) for members in found.values() if len(members) > 1]


def _axes(x: Scale, y: Scale, dense: float) -> Markup:
    """Bytes below, and above them how many times fewer that is than at 16 bits."""
    sizes = [(value, f"{value:,.0f}") for value in x.ticks(10)]
    kls = [(value, short(value)) for value in y.ticks(8)]
    ratios = Scale(dense / x.high, dense / x.low, x.stop, x.start, log=True)
    above = []
    for ratio in ratios.ticks(10):
        place = ratios(ratio)
        above += [line(place, _TOP - 4, place, _TOP, "axis"), text(place, _TOP - 8, f"{ratio:g}x", "middle", "tick")]
    return joined(
        x_axis(x, _BOTTOM, "bytes per token", sizes, _TOP),
        y_axis(y, _LEFT, "KL divergence, nats", kls, _RIGHT),
        line(_LEFT, _TOP, _RIGHT, _TOP, "axis"),
        text((_LEFT + _RIGHT) / 2, _TOP - 24, "times smaller than 16 bits", "middle", "title"),
        *above,
    )


def _floor(y: Scale, floor: float) -> Markup:
    """The band from the lower edge to the noise floor; a thin one at the edge where the floor lies below the plot."""
    top = y(floor) if floor > y.low else _BOTTOM - 12
    words = f"noise floor {short(floor)}" + (", below" if floor < y.low else "")
    return joined(
        rect(_LEFT, top, _RIGHT - _LEFT, _BOTTOM - top, "band"), text(_LEFT + 4, _BOTTOM - 3, words, class_="tick")
    )


def _sweep(members: Sequence[Point], color: int, x: Scale, y: Scale) -> Markup:
    return polyline([(x(p.bytes_per_token), y(p.kl)) for p in members], f"c{color % _COLORS} strong line")


def _points(points: Sequence[Point], families: Sequence[Sequence[Point]], x: Scale, y: Scale) -> Markup:
    """Error bars, marks and names; names keep off the marks and off one another."""
    colors = {p.name: f"c{i % _COLORS}" for i, members in enumerate(families) for p in members}
    marks, taken = [], []
    for p in points:
        px, py = x(p.bytes_per_token), y(p.kl)
        class_ = "hollow" if p.emulated else colors.get(p.name, "plain")
        low, high = y(p.kl - p.se), y(p.kl + p.se)
        marks.append(line(px, low, px, high, f"{'plain' if p.emulated else class_} error"))
        marks.append(dot(px, py, 4.5, class_, f"{p.name}: KL {p.kl:.4g}, {p.bytes_per_token:,.0f} bytes per token"))
        taken.append(Box(px - 5, min(high, py - 5), px + 5, max(low, py + 5)))
    labels = Labels(Box(_LEFT + 2, _TOP + 2, _RIGHT - 2, _BOTTOM - 16), taken)
    words = _words(points, families)
    names = [labels.add(x(p.bytes_per_token), y(p.kl), words[p.name]) for p in points]
    return joined(*marks, *names)


def _words(points: Sequence[Point], families: Sequence[Sequence[Point]]) -> dict[str, str]:
    """What each point is called in the plot: its name, cut if long; on a line that has a name only its boost."""
    words = {p.name: p.name if len(p.name) <= _LONGEST_NAME else p.name[: _LONGEST_NAME - 1] + "…" for p in points}
    for members in families:
        names = {p.name for p in members}
        for p in members:
            if p.name.replace(f":boost_ratio={p.boost_ratio}", "") in names - {p.name}:
                words[p.name] = f"boost {p.boost_ratio:g}"
    return words


def _legend(families: Sequence[Sequence[Point]], emulated: bool) -> Markup:
    entries = [(dot(7, 5, 4.5, "plain"), "method, with one standard error")]
    if families:
        mark = joined(polyline([(0, 5), (14, 5)], "c0 strong line"), dot(7, 5, 4, "c0"))
        entries.append((mark, "same settings at several boost ratios"))
    if emulated:
        entries.append((dot(7, 5, 4.5, "hollow"), "emulated for comparison"))
    entries.append((rect(0, 0, 14, 10, "band"), "noise floor"))
    return legend(_LEFT, 6, entries)
