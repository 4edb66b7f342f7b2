"""The charts of a boost profile: every cell, line and bar, at the right place, for 2 to 80 layers."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from report_case import (
    LEVELS,
    Nesting,
    check_texts_keep_apart,
    key_errors,
    marks,
    picture_of,
    pictures,
    profile_of,
    titles,
    words,
)

from kitty_cli.profile_report import Comparison
from kitty_cli.report.error_left import error_left, shares_left
from kitty_cli.report.layer_budgets import layer_budgets
from kitty_cli.report.profile_page import profile_page
from kitty_cli.report.sensitivity_map import SHADES, rows_of, sensitivity_map, shade
from kitty_cli.report.worst_head import worst_head
from kitty_runtime.accuracy import Divergence
from kitty_runtime.profiles import BoostProfile, LayerProfile

SIZES = [(2, 1, 16), (30, 3, 64), (80, 8, 128), (3, 2, 256)]
WAVES = tuple(6.28 * 1e5 ** (2 * (i % 16) / 32) for i in range(32))


def whole(profile, boost=0.125, **parts):
    return profile_page(profile, boost, **parts)


def numbers(elements, name):
    return [float(element.get(name)) for element in elements]


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_pages_are_well_formed_and_their_texts_keep_apart(size):
    profile = profile_of(*size)
    waves = tuple(6.28 * 1e5 ** (2 * (i % (size[2] // 2)) / size[2]) for i in range(size[2]))
    text = whole(profile, errors=key_errors(profile), wavelengths=waves)
    Nesting(text)
    found = pictures(text)
    assert len(found) == 4
    for picture in found:
        check_texts_keep_apart(picture)
    assert not re.search(r"nan|inf\b", " ".join(found_text for picture in found for found_text in coordinates(picture)))


def coordinates(picture):
    return [value for element in picture.iter() for name, value in element.attrib.items() if name not in ("class",)]


def test_nothing_of_a_profile_becomes_markup():
    evil = "<script>alert(1)</script>"
    text = whole(profile_of(2, model=evil, model_revision=evil, data=evil, command=evil, config_sha256=evil))
    Nesting(text)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 10


def test_captions_say_where_figures_come_from():
    text = whole(profile_of(2))
    model, data = f"tiny at revision 8c22764, config {'c' * 12}", f"text words.txt, tokens {'t' * 12}"
    source = f"{model}; {data}; <code>kitty profile tiny</code>"
    assert text.count(source) == len(pictures(text)) == 3
    assert "t" * 64 in text


def test_held_out_figures_are_a_table():
    name, divergence = "this <profile>", Divergence(0.0284, 11.096, 10.862, 0.908, 0.84, 1660)
    text = whole(profile_of(2), compared=Comparison("b.txt", 2048, {name: divergence}, {name: 5903.2}))
    cells = "".join(f"<td>{cell}</td>" for cell in ("this &lt;profile&gt;", "0.0284", "11.096", "90.8 %", "5,903"))
    assert f"<tr>{cells}</tr>" in text


# --- the map ---------------------------------------------------------------------------------------------------------


def drawn_cells(picture):
    """Shade by row and channel, of the cells that are drawn; none twice."""
    (group,) = marks(picture, "cells")
    found = {}
    for path in group:
        class_ = path.get("class")
        for x, y, length in re.findall(r"M([\d.]+) ([\d.]+)\.5h([\d.]+)", path.get("d")):
            if class_ != "boosted":
                for channel in range(int(x), int(x) + int(length)):
                    assert found.setdefault((int(y), channel), int(class_[1:]) + 1) == int(class_[1:]) + 1
    return found


@pytest.mark.parametrize("size", SIZES)
def test_every_cell_has_the_shade_of_its_score(size):
    profile = profile_of(*size)
    found = drawn_cells(picture_of(sensitivity_map(profile, profile.budgets(0.125)).picture))
    scores = torch.cat([layer.relative_scores for layer in profile.layers.values()])
    expected = (scores.log2().floor() + 1).clamp(0, SHADES).int()
    assert len(expected) == size[0] * size[1]
    assert found == {(y, x): int(expected[y, x]) for y, x in expected.nonzero().tolist()}


def test_shades_double():
    assert [shade(x) for x in (0, 0.99, 1, 1.99, 2, 4, 63, 64, 1e9)] == [0, 0, 1, 1, 2, 3, 6, 7, 7]


def test_boosted_cells_are_marked():
    profile = profile_of(5)
    budgets = profile.budgets(0.125)
    picture = picture_of(sensitivity_map(profile, budgets).picture)
    (path,) = [p for p in marks(picture, "boosted") if p.tag == "path"]
    found = {(int(y), int(x)) for x, y in re.findall(r"M(\d+)\.2 (\d+)\.5", path.get("d"))}
    expected = set()
    for place, (index, layer) in enumerate(profile.layers.items()):
        for head in range(2):
            best = layer.channel_scores[head].argsort(descending=True)[: budgets[index]].tolist()
            expected |= {(2 * place + head, channel) for channel in best}
    assert found == expected
    assert len(found) == 2 * sum(budgets.values()) == 2 * 5 * 4


def test_outliers_are_ringed_and_named():
    profile = profile_of(10)
    picture = picture_of(sensitivity_map(profile, profile.budgets(0.125)).picture)
    rows = rows_of(profile, profile.budgets(0.125))
    tops = [max(row.scores) for row in rows if max(row.scores) >= 8]
    assert len(tops) == 2, "layers 0 and 7"
    named = [said for said in words(picture) if said.startswith("channel ")]
    assert named == [f"channel 3: {top:.3g}x" for top in sorted(tops, reverse=True)]
    rings = [ring for ring in marks(picture, "ring") if titles([ring]) != [""]]
    assert set(titles(rings)) == {"layer 0, KV head 0, channel 3", "layer 7, KV head 1, channel 3"}
    (cells,) = marks(picture, "cells")
    left, top, wide, high = map(float, re.findall(r"[\d.]+", cells.get("transform")))
    places = sorted((round((float(r.get("cy")) - top) / high - 0.5), (float(r.get("cx")) - left) / wide) for r in rings)
    assert [row for row, _ in places] == [0, 2 * 7 + 1], "layer 0, head 0 and layer 7, head 1"
    assert [channel for _, channel in places] == pytest.approx([3.5, 3.5], abs=0.01)


def test_bars_beside_the_map_are_the_layers_kl():
    profile = profile_of(30, 3, 64)
    picture = picture_of(sensitivity_map(profile, profile.budgets(0.125)).picture)
    bars = [bar for bar in marks(picture, "bar") if bar.get("height") != "10"]
    kls = [layer.kl[0] for layer in profile.layers.values()]
    assert titles(bars) == [f"layer {index}: {kl:.3g}" for index, kl in enumerate(kls)]
    widths = numbers(bars, "width")
    assert widths == pytest.approx([max(widths) * kl / max(kls) for kl in kls], abs=0.01)
    assert numbers(bars, "y") == sorted(numbers(bars, "y"))


def layer_numbers(profile):
    picture = picture_of(sensitivity_map(profile, profile.budgets(0.125)).picture)
    return [e.text for e in marks(picture, "tick") if e.get("text-anchor") == "end"]


def test_layers_have_numbers_that_name_them():
    """Each of 80 layers with eight heads; every second one of as many with one; those that are there of a few."""
    assert layer_numbers(profile_of(80, 8, 128)) == [str(n) for n in range(80)]
    assert layer_numbers(profile_of(80, 1)) == [str(n) for n in range(0, 80, 2)]
    profile = profile_of(4)
    some = replace(profile, layers={index: layer for index, layer in profile.layers.items() if index != 1})
    assert layer_numbers(some) == ["0", "2", "3"]


def test_wavelengths_are_on_the_top_axis():
    profile = profile_of(4)
    budgets = profile.budgets(0.125)
    picture = picture_of(sensitivity_map(profile, budgets, WAVES).picture)
    assert "RoPE wavelength, tokens" in words(picture)
    decades = [e for e in marks(picture, "tick") if e.text in ("10", "100", "1k", "10k", "100k")]
    assert [e.text for e in decades] == ["10", "100", "1k", "10k", "100k"] * 2
    assert numbers(decades, "x") == sorted(numbers(decades, "x"))
    assert "RoPE wavelength, tokens" not in words(picture_of(sensitivity_map(profile, budgets).picture))
    partial = picture_of(sensitivity_map(profile, budgets, [*WAVES[:8], *[math.inf] * 24]).picture)
    assert [e.text for e in marks(partial, "tick") if e.text in ("10", "100", "1k", "10k")] == ["10", "100"]


# --- curves and budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_one_line_per_layer(size):
    profile = profile_of(*size)
    picture = picture_of(error_left(profile).picture)
    strong, faint = marks(picture, "strong"), [e for e in marks(picture, "faint") if titles([e]) != [""]]
    assert len(strong) == min(5, size[0])
    assert len(strong) + len(faint) == size[0]
    assert len(marks(picture, "sum")) == 1
    by_kl = sorted(profile.layers, key=lambda index: -profile.layers[index].kl[0])
    assert [title.split(" (")[0] for title in titles(strong)] == [f"layer {index}" for index in by_kl[:5]]
    for curve in [*strong, *faint]:
        points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
        assert len(points) == len(LEVELS)
        xs, ys = zip(*points, strict=True)
        span = xs[-1] - xs[0]
        assert [(x - xs[0]) / span * LEVELS[-1] for x in xs] == pytest.approx(LEVELS, abs=1e-3)
        steps = [low - high for high, low in pairwise(ys)]
        assert steps == pytest.approx([steps[0]] * 4, abs=0.2), "a third less each time, on a logarithmic axis"


def test_lines_end_where_a_layer_became_negligible():
    assert shares_left((0.4, 0.2, 0.1, 0.1, 0.1)) == [1, 0.5, 0.25]
    assert shares_left((0.4, 0.4, 0.4)) == [1]
    assert shares_left((0.0, 0.0)) == []
    layer = profile_of(1).layers[0]
    layers = {0: layer, 1: replace(layer, kl=(1e-6,) * 5), 2: replace(layer, kl=(0.0,) * 5)}
    figure = error_left(BoostProfile(layers, LEVELS, profile_of(1).provenance))
    assert len(marks(picture_of(figure.picture), "strong")) == 1
    assert "without a line: 2 of 3 layers" in figure.caption


def test_verticals_stand_at_the_papers_boosts():
    picture = picture_of(error_left(profile_of(3)).picture)
    ticks = {e.text: float(e.get("x")) for e in marks(picture, "tick") if e.get("text-anchor") == "middle"}
    lines = numbers(marks(picture, "mark"), "x1")
    assert lines == [ticks["12.5 %"], ticks["25 %"]] == [ticks["4"], ticks["8"]]
    assert "boosted channels of 32 per KV head" in words(picture)


def test_budgets_stand_below_the_kl():
    profile = profile_of(30, 3, 64)
    budgets = profile.budgets(0.125)
    picture = picture_of(layer_budgets(profile, budgets, 0.125).picture)
    dots, bars = marks(picture, "c0"), marks(picture, "boost")
    assert titles(bars) == [f"layer {index}: {count}" for index, count in budgets.items()]
    assert titles(dots) == [f"layer {index}: KL {layer.kl[0]:.3g}" for index, layer in profile.layers.items()]
    middles = [float(bar.get("x")) + float(bar.get("width")) / 2 for bar in bars]
    assert middles == pytest.approx(numbers(dots, "cx"), abs=0.02)
    heights = numbers(bars, "height")
    assert heights == pytest.approx([max(heights) * n / max(budgets.values()) for n in budgets.values()], abs=0.02)
    kls, ys = [layer.kl[0] for layer in profile.layers.values()], numbers(dots, "cy")
    assert all(ys[i] > ys[j] for i in range(30) for j in range(30) if kls[i] < kls[j])
    assert max(numbers(dots, "cy")) < min(numbers(bars, "y"))
    assert "12.5 %" in words(picture)


def test_no_boost_at_all():
    profile = profile_of(3)
    text = whole(profile, 0.0, errors=key_errors(profile))
    Nesting(text)
    cells, _, budgets, head = pictures(text)
    assert [p.get("d") for p in marks(cells, "boosted")] == [""]
    assert set(numbers(marks(budgets, "boost"), "height")) == {0}
    assert marks(budgets, "mark") == []
    assert "error left with 0 channels boosted to 4 bits" in words(head)
    assert "0 % of the channels in all" in text


def test_layers_of_different_shapes_without_any_kl():
    """As Gemma's may be: other heads in other layers, some layers not paged, and nothing to see at 2 bits."""
    wide, narrow = profile_of(1, 1, 64).layers[0], profile_of(1, 4, 32).layers[0]
    layers = {3: replace(wide, kl=(0.0,) * 5), 5: replace(narrow, kl=(0.0,) * 5)}
    profile = BoostProfile(layers, LEVELS, profile_of(1).provenance)
    text = whole(profile, errors=key_errors(profile))
    Nesting(text)
    for picture in pictures(text):
        check_texts_keep_apart(picture)
    assert "without a bar: 4 of the first 6 layers" in text


# --- the worst head --------------------------------------------------------------------------------------------------


def test_the_worst_head_is_of_the_layer_with_the_largest_kl():
    profile = profile_of(3)
    quiet, loud = torch.full((2, 32), 0.1), torch.full((2, 32), 0.1)
    loud[1, 7] = 30.0
    layers = {}
    for index, kl in {0: 0.01, 1: 0.5, 2: 0.02}.items():
        scores = loud if index == 1 else quiet
        layers[index] = LayerProfile(torch.ones(2, 32), scores, (kl, kl / 2, kl / 4, kl / 8, kl / 16))
    profile = replace(profile, layers=layers)
    figure = worst_head(profile, {0: 0, 1: 2, 2: 0}, key_errors(profile))
    assert figure.title == "The worst head: layer 1, KV head 1"
    picture = picture_of(figure.picture)
    pale = [bar for bar in marks(picture, "pale") if titles([bar]) != [""]]
    left = [bar for bar in marks(picture, "boost") if titles([bar]) != [""]]
    assert titles(pale)[:32] == titles(pale)[32:] == [f"channel {c}: {10 if c == 7 else 0.0333:.3g}" for c in range(32)]
    assert titles(left)[7] == "channel 7: 2", "at 4 bits"
    assert titles(left)[0] == "channel 0: 0.00667", "the second boosted channel, the lowest of equals"
    assert titles(left)[1:7] == titles(pale)[1:7], "not boosted, as it was"
    assert numbers(pale[:32], "x") == sorted(numbers(pale[:32], "x"))
    assert "take away 96 % of the squared error" in figure.caption


def test_without_key_errors_there_is_no_worst_head():
    assert "worst head" not in whole(profile_of(2))
