"""A measured profile as people and machines read it: tables, a heatmap in the terminal, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from kitty_cli import output

if TYPE_CHECKING:
    from kitty_runtime.accuracy import Divergence
    from kitty_runtime.profiles import BoostProfile, LayerProfile

_SHADES = " .:░▒▓█"
"""One step is a factor of two over the median score of the KV head."""

COMPARISON_COLUMNS = ("held-out text", "KL", "perplexity", "same top-1", "B/token")

_MOST, _MAP_ROWS, _MAP_COLUMNS = 5, 40, 64


@dataclass(frozen=True)
class Comparison:
    """Before and after, on held-out text: divergence from 16 bits and bytes per token, by method."""

    text: str
    num_tokens: int
    divergences: Mapping[str, Divergence]
    bytes_per_token: Mapping[str, float]


def profile_document(
    profile: BoostProfile, path: Path, boost_ratio: float, compared: Comparison | None
) -> dict[str, Any]:
    """The document of ``kitty profile --json``; `kl` holds one value per entry of `boost_levels`, in nats."""
    first = next(iter(profile.layers.values()))
    budgets = profile.budgets(boost_ratio)
    return {
        "model": profile.provenance.model,
        "path": str(path),
        "num_layers": len(profile.layers),
        "num_kv_heads": first.query_energy.shape[0],
        "head_dim": first.query_energy.shape[1],
        "metric": profile.provenance.metric,
        "boost_ratio": boost_ratio,
        "boost_levels": list(profile.boost_levels),
        "layers": [
            {"layer": index, "num_boosted": budgets[index], "kl": list(layer.kl)}
            for index, layer in profile.layers.items()
        ],
        "held_out": None
        if compared is None
        else {
            "text": compared.text,
            "num_tokens": compared.num_tokens,
            "methods": [
                {"name": name, **asdict(d), "bytes_per_token": compared.bytes_per_token[name]}
                for name, d in compared.divergences.items()
            ],
        },
    }


def show_profile(profile: BoostProfile, path: Path, boost_ratio: float, compared: Comparison | None) -> None:
    """Tables of layers, the heatmap, and the comparison, on stdout."""
    output.show(layer_table(profile, boost_ratio))
    output.text("")
    output.text(f"Key channels by {profile.provenance.metric} score, over the median of their KV head;")
    output.text(f"each step of '{_SHADES[1:]}' is a factor of two. RoPE pairs channel i with i + head_dim / 2.")
    for line in heatmap(profile):
        output.text(line)
    output.text("")
    if compared is not None:
        output.show(comparison_table(compared))
    output.text(f"Wrote {path}")


def layer_table(profile: BoostProfile, boost_ratio: float) -> Table:
    """The most and the least sensitive layers, and what boosting buys them."""
    budgets = profile.budgets(boost_ratio)
    by_kl = sorted(profile.layers, key=lambda index: -profile.layers[index].kl[0])
    head_dim = next(iter(profile.layers.values())).query_energy.shape[1]
    table = Table(
        "layer",
        *(f"KL at {level:.3g}" for level in profile.boost_levels),
        f"boosted of {head_dim}",
        title="Each layer alone at 2 bits: KL in nats, by share of boosted channels (-: negligible)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns:
        column.justify = "right"
    least = by_kl[max(_MOST, len(by_kl) - _MOST) :]
    for index in by_kl[:_MOST]:
        table.add_row(str(index), *_kl_cells(profile.layers[index].kl), str(budgets[index]))
    if len(by_kl) > 2 * _MOST:
        table.add_row("...", *("" for _ in profile.boost_levels), "")
    for index in least:
        table.add_row(str(index), *_kl_cells(profile.layers[index].kl), str(budgets[index]))
    return table


def _kl_cells(kls: Sequence[float]) -> list[str]:
    """A dash where a layer was negligible already and its last value stands for what was not measured."""
    return ["-" if i and kl == kls[i - 1] else f"{kl:.2e}" for i, kl in enumerate(kls)]


def heatmap(profile: BoostProfile) -> list[str]:
    """One line per layer (or per few layers), one character per channel (or per few): the highest score there."""
    rows = [(index, _relative_scores(layer)) for index, layer in profile.layers.items()]
    per_line = -(-len(rows) // _MAP_ROWS)
    lines = []
    for start in range(0, len(rows), per_line):
        group = rows[start : start + per_line]
        name = str(group[0][0]) if len(group) == 1 else f"{group[0][0]}-{group[-1][0]}"
        cells = [max(column) for column in zip(*(scores for _, scores in group), strict=False)]
        lines.append(f"{name:>7} |{''.join(_shade(cell) for cell in cells)}|")
    return lines


def _relative_scores(layer: LayerProfile) -> list[float]:
    """Highest score over the KV heads' medians, per printed column."""
    relative = layer.relative_scores.amax(0)
    per_cell = -(-len(relative) // _MAP_COLUMNS)
    return [chunk.max().item() for chunk in relative.split(per_cell)]


def _shade(score: float) -> str:
    steps = 0
    while score >= 2 and steps < len(_SHADES) - 1:
        score /= 2
        steps += 1
    return _SHADES[steps]


def comparison_table(compared: Comparison) -> Table:
    """KL, perplexity and bytes of the paper's preset and of the profile."""
    table = Table(
        *COMPARISON_COLUMNS,
        title=f"{compared.num_tokens} tokens of {compared.text}, against 16 bits",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in comparison_rows(compared):
        table.add_row(*cells)
    return table


def comparison_rows(compared: Comparison) -> list[list[str]]:
    """Cells of the table, 16 bits first."""
    reference = next(iter(compared.divergences.values())).reference_ppl
    rows = [["16 bits", "0", f"{reference:.3f}", "100 %", ""]]
    for name, d in compared.divergences.items():
        bytes_per_token = f"{compared.bytes_per_token[name]:,.0f}"
        rows.append([name, f"{d.kl:.4f}", f"{d.ppl:.3f}", f"{100 * d.same_top1:.1f} %", bytes_per_token])
    return rows
