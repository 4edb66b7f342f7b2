"""The gate of a check as a command sees it: what it compares before and after the run, and the file it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitty_cli import output
from kitty_runtime.errors import ConfigError
from kitty_runtime.files import check_writable, write_whole
from kitty_runtime.gate import (
    PROFILE_KEY,
    Baseline,
    Limits,
    Verdict,
    check_comparable,
    judge,
    length_of,
    load_baseline,
)

if TYPE_CHECKING:
    from kitty_cli.check_report import Setting
    from kitty_runtime.check import Check

_OPTION = "--write-baseline FILE"


@dataclass(frozen=True)
class Gate:
    """What is asked of a run.

    Attributes:
        limits: for every method.
        baseline: the earlier report, if there is one.
        tolerance: see `kitty_runtime.gate.regression`.
        write_to: where the report goes unless the gate fails.
    """

    limits: Limits
    baseline: Baseline | None
    tolerance: float
    write_to: Path | None

    @property
    def wanted(self) -> bool:
        return self.limits.given or self.baseline is not None or self.write_to is not None

    def compare(self, identity: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Verify that this run measures what the baseline measured. Arguments and errors as `check_comparable`."""
        if self.baseline is not None:
            check_comparable(self.baseline, identity, configs)

    def note_differences(self, configs: Mapping[str, Mapping[str, Any]], num_windows: int) -> None:
        """Say on stderr what may differ from the baseline and does, and when the comparison is a weak one."""
        if self.baseline is None:
            return
        others = [name for name, config in configs.items() if config[PROFILE_KEY] != self.baseline.profiles[name]]
        if others:
            output.note(f"another boost profile than in the baseline: {', '.join(others)}")
        if num_windows == 1:
            output.note("one window has no standard error: only the noise floor is allowed; use --windows 2 or more")

    def judge(self, check: Check) -> Verdict:
        """The verdict on a run."""
        from kitty_cli.check_report import figures_of

        floor = check.noise_floor.statistics.kl_mean
        return judge(figures_of(check), self.limits, self.baseline, floor, self.tolerance)

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the report as a baseline, if that was asked for.

        Raises:
            ConfigError: it cannot be written.
        """
        if self.write_to is not None:
            content = json.dumps(document, indent=2, allow_nan=False) + "\n"
            write_whole(self.write_to, content.encode(), _OPTION, ConfigError)
            output.note(f"wrote {self.write_to}")


def open_gate(limits: Limits, baseline: Path | None, tolerance: float, write_to: Path | None) -> Gate:
    """The gate that the options describe.

    Raises:
        ConfigError: a baseline that cannot be read or written, or a tolerance without one.
    """
    if tolerance and baseline is None:
        raise ConfigError("--tolerance is for comparing with a baseline.", "Give one: --baseline FILE")
    if write_to is not None:
        check_writable(write_to, _OPTION, ConfigError)
    return Gate(limits, None if baseline is None else load_baseline(baseline), tolerance, write_to)


def early_identity(setting: Setting) -> dict[str, Any]:
    """What is known before weights load, as `Baseline.identity` has it."""
    return {
        "model": setting.config_sha256,
        "length": length_of(setting.num_windows, setting.seq_len, setting.score_from),
        "text": setting.token_sha256,
    }
