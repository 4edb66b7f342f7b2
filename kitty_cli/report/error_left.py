"""What boosting buys: the share of each layer's KL that is left, by how many channels have 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kitty_cli.report.labels import spread
from kitty_cli.report.markup import Markup, joined
from kitty_cli.report.page import Figure
from kitty_cli.report.scale import Scale, short
from kitty_cli.report.svg import dot, legend, line, picture, polyline, text, width_of, x_axis, y_axis

if TYPE_CHECKING:
    from kitty_runtime.profiles import BoostProfile

NAMED = 5
"""So many layers, those of the largest KL, have a color and a name."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 78.0, 790.0, 56.0, 396.0
_LEAST = 1e-3
"""A smaller share lies at the lower edge."""

_PAPER_SHARES = (0.125, 0.25)
"""Boost ratios of the paper's presets."""


class Curve(NamedTuple):
    """A layer's KL at two bits, and the share of it left at each boost level as far as it was measured."""

    layer: int
    kl: float
    left: Sequence[float]


def error_left(profile: BoostProfile) -> Figure:
    """One line per layer, the most sensitive ones named, and one for the sum of all."""
    curves = [Curve(index, layer.kl[0], shares_left(layer.kl)) for index, layer in profile.layers.items()]
    totals = [sum(kls) for kls in zip(*(layer.kl for layer in profile.layers.values()), strict=True)]
    summed = [total / totals[0] for total in totals] if totals[0] else []
    drawn = [curve for curve in curves if len(curve.left) > 1]
    shares = [share for curve in drawn for share in curve.left] + summed
    scale = Scale(max(min([0.5, *shares]), _LEAST) / 1.1, max([1.0, *shares]), _BOTTOM, _TOP, log=True)
    head_dim = max(layer.query_energy.shape[1] for layer in profile.layers.values())
    levels = Scale(0, profile.boost_levels[-1], _LEFT, _RIGHT)
    unmeasured = len(curves) - len(drawn)
    return Figure(
        "What boosting leaves of the error",
        picture(
            _BOTTOM + 40,
            "Share of the KL divergence left against the number of boosted channels, by layer",
            _axes(levels, scale, profile.boost_levels, head_dim),
            _curves(drawn, summed, profile.boost_levels, levels, scale),
        ),
        "KL divergence with one layer alone quantized (keys at 2 bits and the boost, values at 4 bits), over the same "
        "without boost. A line ends where the layer became negligible and was measured no further; in the sum its last "
        "value stands for the rest."
        + (
            f" Negligible from the start and without a line: {unmeasured} of {len(curves)} layers."
            if unmeasured
            else ""
        ),
    )


def shares_left(kls: Sequence[float]) -> list[float]:
    """Over the first, up to the last level that was measured: a layer that became negligible repeats its value."""
    measured = len(kls)
    while measured > 1 and kls[measured - 1] == kls[measured - 2]:
        measured -= 1
    return [kl / kls[0] for kl in kls[:measured]] if kls[0] else []


def _axes(levels: Scale, scale: Scale, boost_levels: Sequence[float], head_dim: int) -> Markup:
    ticks = [(level, f"{level * head_dim:g}") for level in boost_levels]
    title = f"boosted channels of {head_dim} per KV head"
    marks = []
    for share in _PAPER_SHARES:
        if share <= levels.high:
            x = levels(share)
            marks.append(line(x, _TOP - 6, x, _BOTTOM, "mark"))
            marks.append(text(x, _TOP - 10, f"{100 * share:g} %", "middle", "tick"))
    shares = [(share, f"{short(100 * share)} %") for share in scale.ticks()]
    return joined(
        x_axis(levels, _BOTTOM, title, ticks),
        y_axis(scale, _LEFT, "share of the KL left", shares, _RIGHT),
        *marks,
    )


def _curves(
    curves: Sequence[Curve], summed: Sequence[float], boost_levels: Sequence[float], levels: Scale, scale: Scale
) -> Markup:
    """The unnamed layers in gray below, then those of the largest KL, then the sum; names at the right."""
    by_kl = sorted(curves, key=lambda curve: -curve.kl)
    drawn = []
    for curve in by_kl[NAMED:]:
        drawn.append(polyline(_points(curve.left, boost_levels, levels, scale), "faint line", _title(curve)))
    named = [
        (f"c{i}", curve.left, f"layer {curve.layer} (KL {short(curve.kl)})") for i, curve in enumerate(by_kl[:NAMED])
    ]
    if summed:
        named.append(("sum", summed, "sum of all layers"))
    ends = [_points(left, boost_levels, levels, scale)[-1] for _, left, _ in named]
    places = spread([y for _, y in ends], 15, _TOP + 6, _BOTTOM - 6)
    for (color, left, words), (x, y), place in zip(named, ends, places, strict=True):
        points = _points(left, boost_levels, levels, scale)
        drawn.append(polyline(points, f"{color} strong line" if color != "sum" else "sum line", words))
        if color != "sum":
            drawn += [dot(px, py, 2.6, color) for px, py in points]
            drawn.append(dot(_RIGHT + 15, place, 3.5, color))
        drawn += [line(x + 4, y, _RIGHT + 10, place, "leader"), text(_RIGHT + 22, place + 4, words)]
    gray = polyline([(0, 5), (14, 5)], "faint line")
    entries = [(gray, "other layers")] if len(by_kl) > NAMED else []
    words = "the most sensitive layers are named"
    return joined(*drawn, text(_LEFT, 17, words, class_="title"), legend(_LEFT + width_of(words) + 8, 8, entries))


def _points(
    left: Sequence[float], boost_levels: Sequence[float], levels: Scale, scale: Scale
) -> list[tuple[float, float]]:
    return [(levels(level), scale(share)) for level, share in zip(boost_levels, left, strict=False)]


def _title(curve: Curve) -> str:
    return f"layer {curve.layer}: KL {curve.kl:.3g} at 2 bits"
