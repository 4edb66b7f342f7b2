"""One KV head channel by channel: how large its keys are, and what rounding does to them without and with boost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kitty_cli.report.markup import Markup, joined
from kitty_cli.report.page import Figure
from kitty_cli.report.scale import Scale, short
from kitty_cli.report.svg import WIDTH, legend, picture, rect, x_axis, y_axis

if TYPE_CHECKING:
    from kitty_runtime.profiles import BoostProfile
    from kitty_runtime.sensitivity import KeyErrors

_LEFT, _RIGHT, _TOP = 78.0, WIDTH - 20.0, 30.0
_PANEL, _GAP = 110.0, 22.0


def worst_head(profile: BoostProfile, budgets: Mapping[int, int], errors: Mapping[int, KeyErrors]) -> Figure:
    """The head whose rounding moves the logits most, of the layer with the largest KL.

    Args:
        budgets: boosted channels per KV head, by layer.
        errors: of the keys, by layer.
    """
    from kitty_runtime.quant.boost import choose_boosted

    index = max(profile.layers, key=lambda i: profile.layers[i].kl[0])
    layer, keys = profile.layers[index], errors[index]
    at_logits = keys.two_bits.cpu() * layer.query_energy
    head = int(at_logits.square().sum(1).argmax())
    boosted = set(choose_boosted(layer.channel_scores[head], budgets[index]).tolist())
    plain, fine, energy = keys.two_bits[head].tolist(), keys.four_bits[head].tolist(), layer.query_energy[head].tolist()
    left = [fine[c] if c in boosted else plain[c] for c in range(len(plain))]
    panels = (
        ("mean |K|", keys.magnitude[head].tolist(), None),
        ("rms error of K", plain, left),
        ("error x rms(q)", _product(plain, energy), _product(left, energy)),
    )
    scales = [
        Scale(0, max(values) * 1.05 or 1.0, _bottom(i), _bottom(i) - _PANEL) for i, (_, values, _) in enumerate(panels)
    ]
    channels = Scale(0, len(plain), _LEFT, _RIGHT)
    bars = [_panel(channels, scale, *panel) for scale, panel in zip(scales, panels, strict=True)]
    step = max(len(plain) // 8, 1)
    ticks = [(c, str(c)) for c in range(0, len(plain) + 1, step)]
    entries = [
        (rect(0, 0, 14, 10, "bar"), "|K|"),
        (rect(0, 0, 14, 10, "pale"), "error at 2 bits"),
        (rect(0, 0, 14, 10, "boost"), f"error left with {len(boosted)} channels boosted to 4 bits"),
    ]
    saved = 1 - sum(v * v for v in panels[2][2] or []) / (sum(v * v for v in panels[2][1]) or 1.0)
    return Figure(
        f"The worst head: layer {index}, KV head {head}",
        picture(
            _bottom(2) + 38,
            "Magnitude of keys and their error at 2 bits without and with boost, by channel",
            legend(_LEFT, 4, entries),
            *bars,
            x_axis(channels, _bottom(2), "key channel", ticks),
        ),
        "The layer with the largest KL divergence, and in it the head with the largest error times rms(q), which is "
        "what reaches the logits. Means over the pages of the calibration text, no range clipped. The boosted channels "
        f"are those of highest score; they take away {100 * saved:.0f} % of the squared error below.",
    )


def _product(values: Sequence[float], factors: Sequence[float]) -> list[float]:
    return [value * factor for value, factor in zip(values, factors, strict=True)]


def _bottom(panel: int) -> float:
    return _TOP + _PANEL + panel * (_PANEL + _GAP)


def _panel(channels: Scale, scale: Scale, title: str, values: Sequence[float], left: Sequence[float] | None) -> Markup:
    """Bars of one quantity; where something is left of it, in a second color over them."""
    width = channels(1) - channels(0)
    gap = min(1.0, width / 5)

    def bars(heights: Sequence[float], class_: str) -> list[Markup]:
        return [
            rect(channels(c), scale(h), width - gap, scale.start - scale(h), class_, f"channel {c}: {h:.3g}")
            for c, h in enumerate(heights)
        ]

    drawn = bars(values, "bar") if left is None else bars(values, "pale") + bars(left, "boost")
    ticks = [(value, short(value)) for value in scale.ticks(4)]
    return joined(y_axis(scale, _LEFT, title, ticks, _RIGHT), *drawn)
