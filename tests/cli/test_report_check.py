"""The chart of a check: every method at its place, sweeps as lines, the noise floor as a band; and the page."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_case import (
    Nesting,
    check_of,
    check_texts_keep_apart,
    marks,
    method_report,
    picture_of,
    pictures,
    sweep,
    titles,
    words,
)

from kitty_cli.check_report import Loaded, Setting
from kitty_cli.report.check_page import check_page
from kitty_cli.report.error_per_byte import error_per_byte
from kitty_runtime.accuracy import Method
from kitty_runtime.config import PRESETS
from kitty_runtime.gate import Rule, Verdict
from kitty_runtime.peers import PEERS

EVIL = "<script>alert(1)</script>"
SETTING = Setting("m", "", "c" * 64, "b.txt", "t" * 64, 4, 2048, 384, {"kitty": "0.1.0"}, "kitty check m")
LOADED = Loaded("w" * 64, "float32", "cpu", "torch reference on CPU")


def preset_report(name, kl, se, size):
    return method_report(name, Method(PRESETS[name]), kl, se, size)


PAPER = [
    preset_report("kivi-2-g128-sink", 0.3, 0.01, 5800.0),
    preset_report("kitty", 0.1, 0.007, 5960.0),
    preset_report("kitty-pro", 0.05, 0.005, 6130.0),
]
OTHERS = [
    preset_report("kv4", 0.0056, 0.0006, 8500.0),
    preset_report("random", 0.28, 0.01, 5960.0),
    method_report("fp8", PEERS["fp8"], 0.001, None, 11900.0),
]


def drawn(methods, **changes):
    return picture_of(error_per_byte(check_of(methods, **changes)).picture)


def points(picture):
    """Centers of the points by the method's name, as their titles have it."""
    circles = [element for element in picture.iter("circle") if titles([element]) != [""]]
    return {
        title.split(": KL")[0]: (float(c.get("cx")), float(c.get("cy")))
        for c, title in zip(circles, titles(circles), strict=True)
    }


def test_every_method_is_a_point_with_its_name():
    methods = PAPER + OTHERS
    picture = drawn(methods)
    found = points(picture)
    assert list(found) == [report.name for report in methods]
    assert [name for name in found if name not in words(picture)] == []
    by_bytes = sorted(methods, key=lambda r: r.cost.bytes_per_token)
    assert [found[r.name][0] for r in by_bytes] == sorted(x for x, _ in found.values())
    by_kl = sorted(methods, key=lambda r: -r.statistics.kl_mean)
    assert [found[r.name][1] for r in by_kl] == sorted(y for _, y in found.values())
    check_texts_keep_apart(picture)


def test_error_bars_are_one_standard_error_long():
    picture = drawn(PAPER + OTHERS)
    bars = marks(picture, "error")
    lengths = [float(bar.get("y1")) - float(bar.get("y2")) for bar in bars]
    assert len(lengths) == 6
    assert lengths[-1] == 0, "a single window has no error"
    assert min(lengths[:-1]) > 0
    assert lengths[3] > lengths[0], "a tenth of the KL is longer than a thirtieth"


def test_settings_that_differ_only_in_boost_are_one_line():
    methods = [*PAPER, *OTHERS, *sweep("weighted", 0.25, 0.0625, 0.125), *sweep("tuned", 0.125)]
    picture = drawn(methods)
    found = points(picture)
    lines = [e for e in marks(picture, "line") if len(e.get("points").split()) > 2]
    assert len(lines) == 2, "the paper's and weighted; tuned is alone"
    order = ["weighted:boost_ratio=0.0625", "weighted", "weighted:boost_ratio=0.25"]
    for line, names in zip(lines, (["kivi-2-g128-sink", "kitty", "kitty-pro"], order), strict=True):
        places = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert places == [pytest.approx(found[name], abs=0.06) for name in names]
    assert [said for said in words(picture) if said.startswith("boost ")] == ["boost 0.25", "boost 0.0625"]
    assert "same settings at several boost ratios" in words(picture)
    assert "same settings at several boost ratios" not in words(drawn(OTHERS))


def test_a_sweep_without_a_preset_keeps_its_names():
    said = words(drawn(sweep("weighted", 0.25, 0.0625)))
    assert {"weighted:boost_ratio=0.25", "weighted:boost_ratio=0.0625"} <= set(said)


def test_emulated_methods_are_hollow():
    picture = drawn(PAPER + OTHERS)
    hollow = [e for e in marks(picture, "hollow") if titles([e]) != [""]]
    assert [title.split(":")[0] for title in titles(hollow)] == ["fp8"]
    assert "emulated for comparison" in words(picture)
    assert "emulated for comparison" not in words(drawn(PAPER))


@pytest.mark.parametrize(("floor", "said"), [(4e-8, "noise floor 4e-8, below"), (0.004, "noise floor 0.004")])
def test_the_noise_floor_is_a_band(floor, said):
    picture = drawn([*PAPER, preset_report("kv4", 0.0045, 0.0, 8500.0)], floor=floor)
    assert said in words(picture)
    band = max(marks(picture, "band"), key=lambda e: float(e.get("width")))
    lowest = max(y for _, y in points(picture).values())
    assert float(band.get("y")) > lowest
    check_texts_keep_apart(picture)


def test_a_method_without_error_lies_at_the_lower_edge():
    picture = drawn([*PAPER, preset_report("16", 0.0, 0.0, 24000.0)], floor=0.0)
    found = points(picture)
    assert found["16"][1] == max(y for _, y in found.values())
    check_texts_keep_apart(picture)


@pytest.mark.parametrize("methods", [PAPER[:1], [preset_report("16", 1e-8, None, 24000.0)]])
def test_a_single_method(methods):
    picture = drawn(methods)
    assert len(points(picture)) == 1
    check_texts_keep_apart(picture)


def test_thirty_methods_close_together_keep_their_names_apart():
    methods = []
    for n in range(30):
        config = replace(PRESETS["weighted"], k_recent_len=n, v_recent_len=n)
        name = f"weighted:k_recent_len={n}:v_recent_len={n}"
        methods.append(method_report(name, Method(config), 0.05 + 0.001 * (n * 7 % 30), 0.002, 5900.0 + 5 * n))
    picture = drawn([*methods, *OTHERS])
    check_texts_keep_apart(picture)
    cut = [said for said in words(picture) if said.startswith("weighted:")]
    assert len(cut) == 30
    assert max(map(len, cut)) == 34


def test_the_page_has_figures_verdict_and_provenance():
    rule = Rule("max_kl", "kitty", 0.1, 0.06, False)
    text = check_page(SETTING, LOADED, check_of(PAPER + OTHERS), Verdict(False, (rule,)))
    Nesting(text)
    assert len(pictures(text)) == 1
    for said in ("0.1000±0.0070", "fp8 *", "gate FAILED", "kitty: kl 0.1 &gt; 0.06", "c" * 64, "t" * 64, "w" * 64):
        assert said in text, said
    assert f"m, config {'c' * 12}; text b.txt, tokens {'t' * 12}; <code>kitty check m</code>" in text


def test_nothing_of_a_check_becomes_markup():
    setting = replace(SETTING, model_id=EVIL, revision=EVIL, data_name=EVIL, command=EVIL, versions={EVIL: EVIL})
    evil = method_report(EVIL, Method(PRESETS["kitty"]), 0.1, 0.01, 5000.0)
    text = check_page(setting, replace(LOADED, backend=EVIL), check_of([evil]), Verdict(None))
    Nesting(text)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 10
