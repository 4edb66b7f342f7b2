"""The gate: limits, the paired comparison with a baseline, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import statistics
from dataclasses import replace

import pytest

from kitty_runtime.errors import ConfigError
from kitty_runtime.gate import (
    Figures,
    Limits,
    Verdict,
    check_comparable,
    check_packed,
    judge,
    load_baseline,
    parse_baseline,
    regression,
)

KITTY = Figures("kitty", 0.08, 0.87, 1.08, 5900.0, (0.07, 0.09))
PRO = Figures("kitty-pro", 0.05, 0.90, 1.05, 6200.0, (0.04, 0.06))
KV4 = Figures("kv4", 0.005, 0.97, 1.004, 9000.0, (0.004, 0.006))


def test_nothing_asked():
    assert judge([KITTY], Limits()) == Verdict(None)
    assert not Limits().given
    assert Limits(max_kl=0.0).given


@pytest.mark.parametrize(
    ("name", "holds", "breaks"),
    [
        ("max_kl", 0.08, 0.0799),
        ("min_same_top1", 0.87, 0.8701),
        ("max_ppl_ratio", 1.08, 1.0799),
        ("max_bytes_per_token", 5900.0, 5899.0),
    ],
)
def test_each_limit_includes_its_value(name, holds, breaks):
    for limit, passed in ((holds, True), (breaks, False)):
        verdict = judge([KITTY], Limits(**{name: limit}))
        (rule,) = verdict.rules
        assert (verdict.passed, rule.passed) == (passed, passed)
        assert (rule.rule, rule.method, rule.limit) == (name, "kitty", limit)
        assert verdict.cheapest is None


def test_one_method_must_hold_all_limits():
    verdict = judge([KITTY], Limits(max_kl=0.1, min_same_top1=0.9))
    assert verdict.passed is False
    assert [rule.passed for rule in verdict.rules] == [True, False]


def test_of_several_the_cheapest_that_holds_is_named():
    verdict = judge([KV4, KITTY, PRO], Limits(max_kl=0.06))
    assert (verdict.passed, verdict.cheapest) == (True, "kitty-pro")
    verdict = judge([KV4, KITTY, PRO], Limits(max_kl=0.06, max_bytes_per_token=6000))
    assert (verdict.passed, verdict.cheapest) == (False, None)


@pytest.mark.parametrize("limit", [-0.1, math.nan, math.inf])
def test_limits_are_numbers(limit):
    with pytest.raises(ConfigError, match="max_kl is"):
        Limits(max_kl=limit)


def test_same_top1_is_a_share():
    with pytest.raises(ConfigError, match="min_same_top1 is 87"):
        Limits(min_same_top1=87)


# --- regression ----------------------------------------------------------------------------------------------------


def test_equal_results_pass():
    rule = regression(KITTY, KITTY.windows, 0.0)
    assert (rule.value, rule.limit, rule.passed) == (0.0, 0.0, True)


def test_two_paired_standard_errors():
    before = (0.05, 0.10, 0.07, 0.20)
    for rises in ((0.010, 0.020, 0.012, 0.030), (0.010, -0.020, 0.012, 0.004)):
        after = replace(KITTY, windows=tuple(b + r for b, r in zip(before, rises, strict=True)))
        rule = regression(after, before, 1e-8)
        limit = 2 * statistics.stdev(rises) / math.sqrt(4)
        assert rule.value == pytest.approx(statistics.fmean(rises))
        assert rule.limit == pytest.approx(limit)
        assert rule.passed == (statistics.fmean(rises) <= limit)
    assert rule.passed


def test_an_improvement_passes_however_clear():
    assert regression(replace(KITTY, windows=(0.01, 0.01)), (0.5, 0.5), 0.0).passed


def test_below_the_noise_floor_is_no_regression():
    after = replace(KITTY, windows=(0.07 + 1e-7, 0.09 + 1e-7))
    assert not regression(after, KITTY.windows, 1e-9).passed
    assert regression(after, KITTY.windows, 2e-7).passed


def test_one_window_is_held_to_the_noise_floor():
    after = replace(KITTY, windows=(0.071,))
    rule = regression(after, (0.07,), 1e-6)
    assert (rule.limit, rule.passed) == (1e-6, False)
    assert regression(after, (0.07,), 1e-6, tolerance=0.02).passed


def test_tolerance_is_a_share_of_the_baseline():
    after = replace(KITTY, windows=(0.0711, 0.0911))
    assert not regression(after, (0.07, 0.09), 0.0, tolerance=0.01).passed
    assert regression(after, (0.07, 0.09), 0.0, tolerance=0.02).passed


# --- baselines -----------------------------------------------------------------------------------------------------

DOCUMENT = {
    "schema_version": 1,
    "model": {"id": "m", "config_sha256": "c"},
    "data": {"name": "d", "token_sha256": "t", "windows": 2, "seq_len": 2048, "score_from": 384},
    "reference": {"weights_sha256": "w", "dtype": "float32"},
    "noise_floor": {"kl_mean": 1e-8},
    "methods": [
        {"name": "kitty", "config": {"k_bits": 2, "profile_sha256": None}, "windows": [0.07, 0.09]},
        {"name": "kv4", "config": {"k_bits": 4, "profile_sha256": None}, "windows": [0.004, 0.006]},
        {"name": "fp8", "config": {"rule": "r"}, "windows": [0.001, 0.001], "emulation_only": True},
    ],
}
IDENTITY = {
    "model": "c",
    "weights": "w",
    "dtype": "float32",
    "length": "2 x 2048 tokens scored from 384",
    "text": "t",
}
CONFIGS = {entry["name"]: entry["config"] for entry in DOCUMENT["methods"][:2]}


@pytest.fixture
def baseline():
    return parse_baseline(DOCUMENT)


def test_a_report_is_a_baseline(baseline, tmp_path):
    assert list(baseline.methods) == ["kitty", "kv4"]
    assert baseline.identity == IDENTITY
    assert baseline.noise_floor == 1e-8
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(DOCUMENT))
    assert load_baseline(path) == baseline
    check_comparable(baseline, IDENTITY, CONFIGS)


def test_a_setting_that_came_later_had_its_default(baseline):
    """A baseline from before `v_hadamard` compares with runs that do not use it, and with no other."""
    later = {name: {**config, "v_hadamard": False} for name, config in CONFIGS.items()}
    check_comparable(baseline, IDENTITY, later)
    later["kitty"]["v_hadamard"] = True
    with pytest.raises(ConfigError, match="kitty has another v_hadamard: False in the baseline, True now"):
        check_comparable(baseline, IDENTITY, later)


def test_every_method_is_compared(baseline):
    worse = replace(KV4, windows=(0.005, 0.007))
    verdict = judge([KITTY, worse], Limits(), baseline)
    assert verdict.passed is False
    assert [(rule.method, rule.passed) for rule in verdict.rules] == [("kitty", True), ("kv4", False)]
    assert judge([KITTY, KV4], Limits(), baseline).passed is True


def test_limits_and_baseline_must_both_hold(baseline):
    assert judge([KITTY, KV4], Limits(max_kl=0.001), baseline).passed is False
    found = judge([KITTY, KV4], Limits(max_kl=0.01), baseline)
    assert (found.passed, found.cheapest) == (True, "kv4")


def test_the_larger_noise_floor_counts(baseline):
    after = replace(KITTY, windows=(0.07 + 5e-9, 0.09 + 5e-9))
    assert judge([after, KV4], Limits(), baseline, noise_floor=0.0).passed
    assert judge([after, KV4], Limits(), replace(baseline, noise_floor=0.0), noise_floor=1e-8).passed
    assert not judge([after, KV4], Limits(), replace(baseline, noise_floor=0.0), noise_floor=0.0).passed


@pytest.mark.parametrize("what", IDENTITY)
def test_another_identity_is_refused(baseline, what):
    with pytest.raises(ConfigError, match=f"The baseline has another {what}: "):
        check_comparable(baseline, {what: "other"}, CONFIGS)


def test_another_setting_is_refused(baseline):
    with pytest.raises(ConfigError, match="kitty has another k_bits: 2 in the baseline, 4 now"):
        check_comparable(baseline, {}, {**CONFIGS, "kitty": {"k_bits": 4, "profile_sha256": None}})
    with pytest.raises(ConfigError, match="kitty has another clip: None in the baseline, True now"):
        check_comparable(baseline, {}, {**CONFIGS, "kitty": {**CONFIGS["kitty"], "clip": True}})


def test_another_profile_is_not_a_setting(baseline):
    check_comparable(baseline, {}, {**CONFIGS, "kitty": {"k_bits": 2, "profile_sha256": "p"}})


def test_other_methods_are_refused(baseline):
    with pytest.raises(ConfigError, match="in the baseline but not in this run: kv4"):
        check_comparable(baseline, {}, {"kitty": CONFIGS["kitty"]})
    with pytest.raises(ConfigError, match="not in the baseline: random"):
        check_comparable(baseline, {}, {**CONFIGS, "random": CONFIGS["kitty"]})


def damaged(path: tuple, value) -> dict:
    document = copy.deepcopy(DOCUMENT)
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("schema_version",), 2, "schema version 2, this kitty reads 1"),
        (("schema_version",), None, "no report"),
        (("model",), None, "no report"),
        (("model",), "m", "no report"),
        (("noise_floor", "kl_mean"), "low", "no report"),
        (("noise_floor", "kl_mean"), math.nan, "no report"),
        (("methods",), [], "no report"),
        (("methods",), 5, "no report"),
        (("methods", 0, "windows"), [0.07], "no report"),
        (("methods", 0, "windows"), [0.07, True], "no report"),
        (("methods", 0, "windows"), [0.07, math.inf], "no report"),
        (("methods", 0, "config"), [], "no report"),
        (("methods", 1, "name"), "kitty", "no report"),
    ],
)
def test_damaged_baselines(path, value, said):
    with pytest.raises(ConfigError, match=said):
        parse_baseline(damaged(path, value))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"null", b"[1]", b'"text"'])
def test_files_that_are_no_baseline(tmp_path, content):
    path = tmp_path / "baseline.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"baseline.json is no"):
        load_baseline(path)


def test_missing_baseline(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_baseline(tmp_path / "none.json")


def test_what_packs_nothing_is_not_gated():
    check_packed({"kitty": 0.9})
    with pytest.raises(ConfigError, match="16 packs nothing"):
        check_packed({"kitty": 0.9, "16": 0.0})
    with pytest.raises(ConfigError, match="Only methods that kitty can run"):
        check_packed({})
