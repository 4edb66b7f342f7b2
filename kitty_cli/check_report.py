"""An accuracy check as people and machines read it: tables, Markdown, JSON; all from the same report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from kitty_cli import output
from kitty_runtime.gate import PROFILE_KEY, SCHEMA_VERSION, Figures, Rule, Verdict

if TYPE_CHECKING:
    from kitty_runtime.accuracy import Method
    from kitty_runtime.accuracy_stats import Statistics
    from kitty_runtime.check import Check, MethodReport
    from kitty_runtime.needle import NeedleScore
    from kitty_runtime.peers import Peer


@dataclass(frozen=True)
class Setting:
    """What was measured on and how to do it again, as it is known before weights load."""

    model_id: str
    revision: str
    config_sha256: str
    data_name: str
    token_sha256: str
    num_windows: int
    seq_len: int
    score_from: int
    versions: Mapping[str, str]
    command: str


@dataclass(frozen=True)
class Loaded:
    """The model in memory; `backend` names the operations that run."""

    weights_sha256: str
    dtype: str
    device: str
    backend: str


def config_document(method: Method | Peer) -> dict[str, Any]:
    """A method's settings; of a profile its hash, null where none is used."""
    from kitty_runtime.peers import Peer
    from kitty_runtime.profiles import dump_profile

    if isinstance(method, Peer):
        return {"rule": method.rule}
    settings = asdict(method.config)
    settings.pop("prefill")  # a check always reads what decode would
    profile = method.profile
    return {**settings, PROFILE_KEY: None if profile is None else hashlib.sha256(dump_profile(profile)).hexdigest()}


def is_peer(report: MethodReport) -> bool:
    """Whether kitty only emulates it."""
    from kitty_runtime.peers import Peer

    return isinstance(report.method, Peer)


def figures_of(check: Check) -> list[Figures]:
    """What the gate judges: the methods that kitty can run."""
    return [
        Figures(
            r.name,
            r.statistics.kl_mean,
            r.statistics.same_top1,
            r.statistics.ppl_ratio,
            r.cost.bytes_per_token,
            r.statistics.windows,
        )
        for r in check.methods
        if not is_peer(r)
    ]


def check_document(setting: Setting, loaded: Loaded, check: Check, verdict: Verdict) -> dict[str, Any]:
    """The document of ``kitty check --format json``, which is also what ``--write-baseline`` writes."""
    needle = {} if check.reference_needle is None else {"needle": asdict(check.reference_needle)}
    gate: dict[str, Any] = {"passed": verdict.passed, "rules": [asdict(rule) for rule in verdict.rules]}
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {"id": setting.model_id, "config_sha256": setting.config_sha256},
        "data": {
            "name": setting.data_name,
            "token_sha256": setting.token_sha256,
            "windows": setting.num_windows,
            "seq_len": setting.seq_len,
            "score_from": setting.score_from,
        },
        "reference": {
            **asdict(loaded),
            "ppl": check.reference_ppl,
            "bytes_per_token": check.noise_floor.cost.dense_bytes_per_token,
            **needle,
        },
        "noise_floor": _method_document(check.noise_floor),
        "methods": [_method_document(report) for report in check.methods],
        "gate": gate if verdict.cheapest is None else {**gate, "cheapest": verdict.cheapest},
        "versions": dict(setting.versions),
        "command": setting.command,
    }


def _method_document(report: MethodReport) -> dict[str, Any]:
    statistics = asdict(report.statistics)
    by_position, windows = statistics.pop("kl_by_position"), statistics.pop("windows")
    return {
        "name": report.name,
        "config": config_document(report.method),
        "packed_fraction": report.packed_fraction,
        **statistics,
        "effective_bits": report.effective_bits,
        "effective_bits_total": report.cost.effective_bits,
        "bytes_per_token": report.cost.bytes_per_token,
        "kl_by_position": by_position,
        "windows": windows,
        **({"emulation_only": True} if is_peer(report) else {}),
        **({} if report.needle is None else {"needle": asdict(report.needle)}),
    }


def show_check(setting: Setting, check: Check, verdict: Verdict) -> None:
    """Two tables and the verdict, on stdout."""
    output.text(headline(setting, check))
    output.show(_table(ERRORS, check))
    output.show(_table(QUANTILES, check))
    for line in closing_lines(check, verdict):
        output.text(line)


def markdown(setting: Setting, check: Check, verdict: Verdict) -> list[str]:
    """The lines of a Markdown table with every column, and the verdict."""
    columns, rows = figure_table({**ERRORS, **QUANTILES}, check)
    lines = [_escaped(headline(setting, check)), ""]
    lines += [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    lines += [f"| {' | '.join(_escaped(cell) for cell in cells)} |" for cells in rows]
    return lines + [text for line in closing_lines(check, verdict) for text in ("", _escaped(line))]


def _escaped(text: str) -> str:
    """What Markdown would read as markup, with a backslash before it."""
    return "".join(f"\\{letter}" if letter in "\\|*_`<>[]" else letter for letter in text)


def headline(setting: Setting, check: Check) -> str:
    """What was measured on, in one line."""
    return (
        f"{setting.model_id}: {setting.num_windows} x {setting.seq_len} tokens of {setting.data_name}, scored from "
        f"token {setting.score_from}, against 16 bits (perplexity {check.reference_ppl:.3f})"
    )


def closing_lines(check: Check, verdict: Verdict) -> list[str]:
    """What comes after the tables: what they do not say of some methods, the recall test, the gate."""
    lines = []
    if any(is_peer(report) for report in check.methods):
        lines.append("* emulated for comparison: kitty itself does not store a cache so")
    empty = [report.name for report in check.methods if not report.packed_fraction]
    if empty:
        lines.append(f"nothing was packed by {', '.join(empty)}: a perfect score there means nothing")
    if check.reference_needle is not None:
        lines.append(f"hidden numbers found at 16 bits: {_score(check.reference_needle)}")
        lines += [f"  {report.name}: {_score(report.needle)}" for report in check.methods if report.needle]
    return lines + verdict_lines(verdict)


def _score(needle: NeedleScore) -> str:
    return f"{needle.correct} of {needle.total}"


def verdict_lines(verdict: Verdict) -> list[str]:
    """The gate for people: passed or failed, the cheapest method that holds all limits, and what does not hold."""
    if verdict.passed is None:
        return []
    lines = [f"gate {'passed' if verdict.passed else 'FAILED'}"]
    if verdict.cheapest is not None:
        lines.append(f"  cheapest method that holds all limits: {verdict.cheapest}")
    return lines + [f"  {rule_text(rule)}" for rule in verdict.rules if not rule.passed]


def rule_text(rule: Rule) -> str:
    """A broken rule in words."""
    if rule.rule == "baseline":
        return f"{rule.method}: KL is {rule.value:.3g} above the baseline's, {rule.limit:.3g} is allowed"
    sign = "<" if rule.rule.startswith("min") else ">"
    return f"{rule.method}: {rule.rule.partition('_')[2]} {rule.value:.4g} {sign} {rule.limit:.4g}"


def _kl(value: float | None) -> str:
    if not value:
        return "0"
    if value < 1e-4:
        return f"{value:.0e}"
    return f"{value:.4f}" if value < 10 else f"{value:.1f}"


def _with_error(value: str, error: str | None) -> str:
    return value if error is None else f"{value}±{error}"


def _kl_mean(s: Statistics) -> str:
    return _with_error(_kl(s.kl_mean), None if s.kl_se is None else _kl(s.kl_se))


def _same_top1(s: Statistics) -> str:
    return _with_error(f"{100 * s.same_top1:.1f}", None if s.same_top1_se is None else f"{100 * s.same_top1_se:.1f}")


def _ppl_ratio(s: Statistics) -> str:
    """A ratio near 1 with its error, or a large number alone."""
    if s.ppl_ratio >= 100:
        return f"{s.ppl_ratio:.3g}"
    return _with_error(f"{s.ppl_ratio:.3f}", None if s.ppl_ratio_se is None else f"{s.ppl_ratio_se:.3f}")


Columns = Mapping[str, Callable[["MethodReport"], str]]

ERRORS: Columns = {
    "KL, nats": lambda r: _kl_mean(r.statistics),
    "top-1, %": lambda r: _same_top1(r.statistics),
    "ppl ratio": lambda r: _ppl_ratio(r.statistics),
    "page\nbits": lambda r: f"{r.effective_bits:.2f}",
    "all\nbits": lambda r: f"{r.cost.effective_bits:.2f}",
    "B/token": lambda r: f"{r.cost.bytes_per_token:,.0f}",
}

QUANTILES: Columns = {
    "KL\nmedian": lambda r: _kl(r.statistics.kl_median),
    "p90": lambda r: _kl(r.statistics.kl_p90),
    "p95": lambda r: _kl(r.statistics.kl_p95),
    "p99": lambda r: _kl(r.statistics.kl_p99),
    "p99.9": lambda r: _kl(r.statistics.kl_p999),
    "max": lambda r: _kl(r.statistics.kl_max),
    "dp\nrms %": lambda r: f"{100 * r.statistics.dp_rms:.2f}",
    "pages\n%": lambda r: f"{100 * r.packed_fraction:.0f}",
}


def figure_table(columns: Columns, check: Check) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, the method's first, and rows of cells, the noise floor first."""
    return ["method", *(name.replace("\n", " ") for name in columns)], _cells(columns, check)


def _cells(columns: Columns, check: Check) -> list[list[str]]:
    """Rows of a table, the noise floor first."""
    rows = [(f"{check.noise_floor.name} (noise floor)", check.noise_floor)]
    rows += [(f"{report.name} *" if is_peer(report) else report.name, report) for report in check.methods]
    return [[label, *(cell(report) for cell in columns.values())] for label, report in rows]


def _table(columns: Columns, check: Check) -> Table:
    """A table that fits 80 columns unless names are long; those are folded."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=16)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in _cells(columns, check):
        table.add_row(*(escape(cell) for cell in cells))
    return table
