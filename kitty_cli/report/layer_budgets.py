"""Who gets the boosted channels: each layer's KL at two bits, and below it how many channels it is allotted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kitty_cli.report.markup import Markup, joined
from kitty_cli.report.page import Figure
from kitty_cli.report.scale import Scale, decades_around, nice_step, short
from kitty_cli.report.svg import WIDTH, dot, line, picture, rect, text, x_axis, y_axis

if TYPE_CHECKING:
    from kitty_runtime.profiles import BoostProfile

_LEFT, _RIGHT = 78.0, WIDTH - 56.0
_KL_TOP, _KL_BOTTOM, _TOP, _BOTTOM = 14.0, 194.0, 220.0, 340.0


def layer_budgets(profile: BoostProfile, budgets: Mapping[int, int], boost_ratio: float) -> Figure:
    """
    Args:
        budgets: boosted channels per KV head, by layer.
        boost_ratio: share of the channels that the budgets were made for.
    """
    kls = {index: layer.kl[0] for index, layer in profile.layers.items()}
    head_dim = max(layer.query_energy.shape[1] for layer in profile.layers.values())
    layers = Scale(-0.5, max(kls) + 0.5, _LEFT, _RIGHT)
    step = int(nice_step(max(max(kls) / 25, 1)))
    ticks = [(index, str(index)) for index in range(0, max(kls) + 1, step)]
    missing = max(kls) + 1 - len(kls)
    given = sum(budgets.values()) / (head_dim * len(budgets))
    return Figure(
        "Budgets of the layers",
        picture(
            _BOTTOM + 38,
            "KL divergence of each layer at 2 bits, and its number of boosted channels",
            _kl_panel(kls, layers),
            _budget_panel(budgets, layers, head_dim, boost_ratio),
            x_axis(layers, _BOTTOM, "layer", ticks),
        ),
        f"Above, the KL divergence with this layer alone at 2 bits; below, its boosted channels at --boost "
        f"{boost_ratio:.3g}, {100 * given:.3g} % of the channels in all: each next sixteenth of the channels goes to "
        "the layer whose KL falls most per channel."
        + (f" Not paged and without a bar: {missing} of the first {max(kls) + 1} layers." if missing else ""),
    )


def _kl_panel(kls: Mapping[int, float], layers: Scale) -> Markup:
    """Dots on stems, on a logarithmic axis; a layer without any KL lies on its lower end."""
    low, high = decades_around([kl for kl in kls.values() if kl > 0] or [1e-3])
    scale = Scale(low, high, _KL_BOTTOM, _KL_TOP, log=True)
    content = []
    for index, kl in kls.items():
        x, y = layers(index), scale(kl)
        content += [line(x, y, x, _KL_BOTTOM, "stem"), dot(x, y, 3.4, "c0", f"layer {index}: KL {kl:.3g}")]
    ticks = [(value, short(value)) for value in scale.ticks(5)]
    axis = line(_LEFT, _KL_BOTTOM, _RIGHT, _KL_BOTTOM, "axis")
    return joined(y_axis(scale, _LEFT, "KL at 2 bits, nats", ticks, _RIGHT), axis, *content)


def _budget_panel(budgets: Mapping[int, int], layers: Scale, head_dim: int, boost_ratio: float) -> Markup:
    """Bars, and a line at what every layer would get if all got the same."""
    top = max([boost_ratio * head_dim, *budgets.values()]) or head_dim
    scale = Scale(0, top * 1.05, _BOTTOM, _TOP)
    half = min(0.36 * (layers(1) - layers(0)), 16)
    bars = [
        rect(layers(index) - half, scale(count), 2 * half, _BOTTOM - scale(count), "boost", f"layer {index}: {count}")
        for index, count in budgets.items()
    ]
    even = scale(boost_ratio * head_dim)
    ticks = [(value, short(value)) for value in scale.ticks(4)]
    mean = [
        line(_LEFT, even, _RIGHT, even, "mark"),
        text(_RIGHT + 6, even + 4, f"{100 * boost_ratio:.3g} %", class_="tick"),
    ]
    return joined(y_axis(scale, _LEFT, f"channels of {head_dim}", ticks, _RIGHT), *bars, *(mean if boost_ratio else []))
