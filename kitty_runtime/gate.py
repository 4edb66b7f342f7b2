"""Whether an accuracy check passes: limits, and a comparison with an earlier report. No torch here.

A regression is judged on paired windows: two runs read the same text, so the difference of a window's mean KL scatters
far less than the KL itself. See `regression`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kitty_runtime.config import CacheConfig
from kitty_runtime.errors import ConfigError

SCHEMA_VERSION = 1

_NEW_BASELINE = "Write a new one: kitty check ... --write-baseline FILE"


@dataclass(frozen=True)
class Figures:
    """What is judged of one method; `windows` is the mean KL of each window, in nats."""

    name: str
    kl_mean: float
    same_top1: float
    ppl_ratio: float
    bytes_per_token: float
    windows: tuple[float, ...]


@dataclass(frozen=True)
class Limits:
    """What a method must hold; None = no limit."""

    max_kl: float | None = None
    min_same_top1: float | None = None
    max_ppl_ratio: float | None = None
    max_bytes_per_token: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not (math.isfinite(limit) and limit >= 0):
                raise ConfigError(f"{field.name} is {limit}.", "Use a number from 0 up.")
        if self.min_same_top1 is not None and self.min_same_top1 > 1:
            raise ConfigError(f"min_same_top1 is {self.min_same_top1}.", "Use a share from 0 to 1, such as 0.85.")

    @property
    def given(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))


@dataclass(frozen=True)
class Rule:
    """One rule for one method: `value` must not exceed `limit`, or for ``min_same_top1`` not fall below it."""

    rule: str
    method: str
    value: float
    limit: float
    passed: bool


@dataclass(frozen=True)
class Verdict:
    """What the gate says.

    Attributes:
        passed: None where nothing was asked.
        rules: everything that was judged.
        cheapest: of several methods under limits, the one of fewest bytes per token that holds them all.
    """

    passed: bool | None
    rules: tuple[Rule, ...] = ()
    cheapest: str | None = None


def judge(
    methods: Sequence[Figures],
    limits: Limits,
    baseline: Baseline | None = None,
    noise_floor: float = 0.0,
    tolerance: float = 0.0,
) -> Verdict:
    """Judge a run.

    Limits: a single method must hold them all. Of several methods at least one must; the cheapest that does is named,
    so that a check can choose a method. Baseline: no method may have become worse, however many there are.

    Args:
        methods: those that kitty can run.
        baseline: comparable with this run, see `check_comparable`.
        noise_floor: mean KL of the 16-bit pages in this run, in nats.
        tolerance: see `regression`.
    """
    if not limits.given and baseline is None:
        return Verdict(None)
    by_method = {method.name: _limit_rules(method, limits) for method in methods}
    holding = [method for method in methods if all(rule.passed for rule in by_method[method.name])]
    rules = [rule for found in by_method.values() for rule in found]
    passed, cheapest = bool(holding), None
    if limits.given and len(methods) > 1 and holding:
        cheapest = min(holding, key=lambda method: method.bytes_per_token).name
    if baseline is not None:
        floor = max(noise_floor, baseline.noise_floor)
        compared = [regression(m, baseline.methods[m.name].windows, floor, tolerance) for m in methods]
        passed = passed and all(rule.passed for rule in compared)
        rules += compared
    return Verdict(passed, tuple(rules), cheapest)


def _limit_rules(method: Figures, limits: Limits) -> list[Rule]:
    found = []
    for name, value, limit, holds in (
        ("max_kl", method.kl_mean, limits.max_kl, operator.le),
        ("min_same_top1", method.same_top1, limits.min_same_top1, operator.ge),
        ("max_ppl_ratio", method.ppl_ratio, limits.max_ppl_ratio, operator.le),
        ("max_bytes_per_token", method.bytes_per_token, limits.max_bytes_per_token, operator.le),
    ):
        if limit is not None:
            found.append(Rule(name, method.name, value, limit, holds(value, limit)))
    return found


def regression(method: Figures, before: Sequence[float], noise_floor: float, tolerance: float = 0.0) -> Rule:
    """Whether the mean paired difference of the windows' KL exceeds what chance explains.

    Limit: the largest of two standard errors of the paired differences, the noise floor, and `tolerance` times the
    baseline's KL. Equal results pass whatever the limit. A single window has no standard error; the others remain.

    Args:
        method: this run's.
        before: the same windows' mean KL in the baseline.
        noise_floor: mean KL of the 16-bit pages, in nats: what storing without loss already shows.
        tolerance: share of the baseline's KL. Another CPU rounds otherwise, which flips single codes: with few windows
            such differences, which scatter around 0, can by chance lie on one side.
    """
    differences = [new - old for new, old in zip(method.windows, before, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / n
    two_se = 0.0
    if n > 1:
        two_se = 2 * math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    limit = max(two_se, noise_floor, tolerance * math.fsum(before) / n)
    return Rule("baseline", method.name, mean, limit, mean <= limit)


@dataclass(frozen=True)
class BaselineMethod:
    """A method in a baseline: its settings as in the report, and the mean KL of each window."""

    config: Mapping[str, Any]
    windows: tuple[float, ...]


@dataclass(frozen=True)
class Baseline:
    """What a report says that a later run is held against.

    Attributes:
        identity: what must be equal, by the words for it in messages.
        profiles: hash of the boost profile by method; may differ, it may be what has become worse.
        noise_floor: mean KL of the 16-bit pages, in nats.
        methods: by name, without those that are only emulated.
    """

    identity: Mapping[str, Any]
    profiles: Mapping[str, str | None]
    noise_floor: float
    methods: Mapping[str, BaselineMethod]


PROFILE_KEY = "profile_sha256"
"""The entry of a method's config that may differ from the baseline's."""


def parse_baseline(document: Any, name: str = "the report") -> Baseline:
    """What a report of ``kitty check`` says, each value verified.

    Args:
        document: parsed JSON.
        name: of the file, for messages.
    Raises:
        ConfigError: not such a report, of another schema, or damaged.
    """
    try:
        if document["schema_version"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{name} has schema version {document['schema_version']!r}, this kitty reads {SCHEMA_VERSION}.",
                _NEW_BASELINE,
            )
        reference, data = document["reference"], document["data"]
        identity = {
            "model": document["model"]["config_sha256"],
            "weights": reference["weights_sha256"],
            "dtype": reference["dtype"],
            "length": length_of(data["windows"], data["seq_len"], data["score_from"]),
            "text": data["token_sha256"],
        }
        methods, profiles = {}, {}
        for entry in document["methods"]:
            if entry.get("emulation_only"):
                continue
            config = dict(entry["config"])
            profiles[entry["name"]] = config.pop(PROFILE_KEY)
            windows = tuple(_number(kl) for kl in entry["windows"])
            if len(windows) != data["windows"] or entry["name"] in methods:
                raise ValueError(f"{len(windows)} windows of {entry['name']}")
            methods[entry["name"]] = BaselineMethod(config, windows)
        if not methods:
            raise ValueError("no methods")
        return Baseline(identity, profiles, _number(document["noise_floor"]["kl_mean"]), methods)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} is no report of kitty check: {error!r}.", _NEW_BASELINE) from error


def load_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        ConfigError: missing, not JSON, or as `parse_baseline`.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The baseline {path} cannot be read: {error.strerror}.", _NEW_BASELINE) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The baseline {path} is not JSON: {error}.", _NEW_BASELINE) from error
    return parse_baseline(document, str(path))


def length_of(num_windows: int, seq_len: int, score_from: int) -> str:
    """The entry of an identity that says how much text was measured."""
    return f"{num_windows} x {seq_len} tokens scored from {score_from}"


def check_comparable(baseline: Baseline, identity: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Verify that a run measures what its baseline measured.

    Args:
        identity: this run's, as far as it is known yet.
        configs: settings by method, those that are only emulated left out.
    Raises:
        ConfigError: another model, dtype, length, text, method or setting. Names it.
    """
    hint = "Measure as the baseline was measured, or write a new one: --write-baseline FILE"
    for what, now in identity.items():
        before = baseline.identity[what]
        if now != before:
            raise ConfigError(f"The baseline has another {what}: {before} then, {now} now.", hint)
    for names, where in (
        (baseline.methods.keys() - configs.keys(), "in the baseline but not in this run"),
        (configs.keys() - baseline.methods.keys(), "not in the baseline"),
    ):
        if names:
            raise ConfigError(f"Methods {where}: {', '.join(sorted(names))}.", hint)
    for name, config in configs.items():
        # A setting that the baseline does not know came later: it then had its default.
        before = {key: _DEFAULTS[key] for key in config if key in _DEFAULTS} | {**baseline.methods[name].config}
        for key in sorted(({*config} | {*before}) - {PROFILE_KEY}):
            if key not in config or key not in before or config[key] != before[key]:
                then, now = before.get(key), config.get(key)
                raise ConfigError(f"{name} has another {key}: {then!r} in the baseline, {now!r} now.", hint)


_DEFAULTS = {field.name: field.default for field in fields(CacheConfig)}


def check_packed(fractions: Mapping[str, float]) -> None:
    """Verify that every method reads packed pages: a perfect score of one that packs nothing means nothing.

    Args:
        fractions: packed fraction by method.
    Raises:
        ConfigError: one of them is 0, or there is no method.
    """
    if not fractions:
        raise ConfigError("Only methods that kitty can run are gated, and there is none.", "Add one to --methods.")
    for name, fraction in fractions.items():
        if fraction <= 0:
            raise ConfigError(
                f"{name} packs nothing at this length: its perfect score would mean nothing.",
                "Raise --seq-len, or leave it out of --methods.",
            )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
