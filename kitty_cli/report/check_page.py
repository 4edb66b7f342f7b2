"""The report of an accuracy check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitty_cli.check_report import ERRORS, QUANTILES, closing_lines, figure_table, headline
from kitty_cli.report.error_per_byte import error_per_byte
from kitty_cli.report.markup import tag
from kitty_cli.report.page import Source, facts, page, table

if TYPE_CHECKING:
    from kitty_cli.check_report import Loaded, Setting
    from kitty_runtime.check import Check
    from kitty_runtime.gate import Verdict


def check_page(setting: Setting, loaded: Loaded, check: Check, verdict: Verdict) -> str:
    """The HTML file."""
    source = Source(
        setting.model_id,
        setting.revision,
        setting.config_sha256,
        setting.data_name,
        setting.token_sha256,
        setting.command,
    )
    provenance = facts(
        {
            "model": setting.model_id,
            "revision": setting.revision,
            "config sha256": setting.config_sha256,
            "weights sha256": loaded.weights_sha256,
            "runs on": f"{loaded.device}, {loaded.dtype}, {loaded.backend}",
            "text": setting.data_name,
            "tokens sha256": setting.token_sha256,
            "command": setting.command,
            "versions": ", ".join(f"{name} {version}" for name, version in setting.versions.items()),
        }
    )
    return page(
        f"Accuracy check of {setting.model_id}",
        tag("p", headline(setting, check)),
        error_per_byte(check).section(source),
        tag("h2", "Figures"),
        table(*figure_table(ERRORS, check)),
        tag("h2", "Quantiles over tokens"),
        table(*figure_table(QUANTILES, check)),
        *(tag("p", line) for line in closing_lines(check, verdict)),
        tag("h2", "Provenance"),
        provenance,
    )
