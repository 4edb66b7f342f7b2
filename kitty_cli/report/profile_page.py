"""The report of a boost profile, from the profile and what else the run that made it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kitty_cli.report.error_left import error_left
from kitty_cli.report.layer_budgets import layer_budgets
from kitty_cli.report.markup import Markup, joined, tag
from kitty_cli.report.page import Source, facts, page, table
from kitty_cli.report.sensitivity_map import sensitivity_map
from kitty_cli.report.worst_head import worst_head

if TYPE_CHECKING:
    from kitty_cli.profile_report import Comparison
    from kitty_runtime.profiles import BoostProfile, Provenance
    from kitty_runtime.sensitivity import KeyErrors


def profile_page(
    profile: BoostProfile,
    boost_ratio: float,
    compared: Comparison | None = None,
    errors: Mapping[int, KeyErrors] | None = None,
    wavelengths: Sequence[float] | None = None,
) -> str:
    """The HTML file.

    Args:
        boost_ratio: the share of channels that budgets are shown for.
        compared: figures on held-out text, if they were measured.
        errors: of the keys by layer, if they were measured.
        wavelengths: see `sensitivity_map`.
    """
    origin = profile.provenance
    source = Source(
        origin.model, origin.model_revision, origin.config_sha256, origin.data, origin.token_sha256, origin.command
    )
    budgets = profile.budgets(boost_ratio)
    figures = [
        sensitivity_map(profile, budgets, wavelengths),
        error_left(profile),
        layer_budgets(profile, budgets, boost_ratio),
    ]
    if errors is not None:
        figures.append(worst_head(profile, budgets, errors))
    lead = tag(
        "p",
        f"{len(profile.layers)} layers measured on {origin.num_tokens:,} tokens of {origin.data}, their KL divergence "
        f"on {origin.kl_tokens:,} more; budgets for a boost ratio of {boost_ratio:.3g}.",
    )
    sections = [lead, *(figure.section(source) for figure in figures)]
    if compared is not None:
        sections.append(_comparison(compared))
    return page(f"Boost profile of {origin.model}", *sections, tag("h2", "Provenance"), _provenance(origin))


def _comparison(compared: Comparison) -> Markup:
    from kitty_cli.profile_report import COMPARISON_COLUMNS, comparison_rows

    title = f"{compared.num_tokens:,} tokens of {compared.text}, against 16 bits"
    return joined(tag("h2", "On held-out text"), tag("p", title), table(COMPARISON_COLUMNS, comparison_rows(compared)))


def _provenance(origin: Provenance) -> Markup:
    return facts(
        {
            "model": origin.model,
            "revision": origin.model_revision,
            "config sha256": origin.config_sha256,
            "weights sha256": origin.weights_sha256,
            "metric": origin.metric,
            "text": origin.data,
            "tokens sha256": origin.token_sha256,
            "command": origin.command,
            "versions": ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
        }
    )
