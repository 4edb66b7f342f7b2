"""What charts are made of: markup that escapes, scales, labels that keep apart."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from report_case import VOID, Nesting, text_boxes

from kitty_cli.report.labels import Box, Labels, spread
from kitty_cli.report.markup import Markup, joined, number, tag
from kitty_cli.report.page import Figure, Source, facts, page, table
from kitty_cli.report.scale import Scale, decades_around, nice_step, short
from kitty_cli.report.svg import picture

EVIL = "<script>alert('x')</script>\"&"
ESCAPED = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&quot;&amp;"


def test_text_and_attributes_are_escaped_and_markup_is_not():
    assert tag("p", EVIL) == f"<p>{ESCAPED}</p>"
    assert tag("p", tag("b", "a&b"), "<") == "<p><b>a&amp;b</b>&lt;</p>"
    assert tag("a", title=EVIL) == f'<a title="{ESCAPED}"></a>'
    assert joined("<", Markup("<hr>")) == "&lt;<hr>"


def test_names_of_attributes():
    assert (
        tag("g", class_="a", text_anchor="end", viewBox="0 0 1 1")
        == '<g class="a" text-anchor="end" viewBox="0 0 1 1"></g>'
    )


@pytest.mark.parametrize(
    ("value", "written"), [(1, "1"), (0.5, "0.5"), (1 / 3, "0.33"), (-0.001, "0"), (1e6, "1000000"), (100.0, "100")]
)
def test_numbers_are_short(value, written):
    assert number(value) == written


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_coordinate_is_refused(value):
    with pytest.raises(ValueError, match="no coordinate"):
        tag("rect", x=value)


def test_every_piece_of_a_page_escapes():
    source = Source(EVIL, EVIL, EVIL, EVIL, EVIL, EVIL)
    figure = Figure(EVIL, picture(10, EVIL), EVIL)
    whole = page(EVIL, figure.section(source), table([EVIL], [[EVIL]]), facts({EVIL: EVIL}))
    Nesting(whole)
    assert "<script" not in whole
    assert whole.count("&lt;script&gt;") == 2 + 3 + 6 + 2 + 2  # the page, the figure, its source, the table, the facts


def test_source_names_revision_hashes_and_command():
    def said(revision):
        source = Source("m", revision, "c" * 64, "text.txt", "t" * 64, "kitty check m")
        return "".join(ElementTree.fromstring(source.line()).itertext())

    rest = f"config {'c' * 12}; text text.txt, tokens {'t' * 12}; kitty check m"
    assert said("r1") == f"m at revision r1, {rest}"
    assert said("") == f"m, {rest}"


def test_a_page_fetches_nothing_and_has_both_themes():
    whole = page("title")
    assert "default-src 'none'" in whole
    assert "prefers-color-scheme: dark" in whole
    parsed = Nesting(whole)
    assert not [name for _, name, _ in parsed.attributes if name in ("src", "href", "xlink:href", "onload")]
    assert "url(" not in whole
    assert "@import" not in whole
    assert {tag for tag, _, _ in parsed.attributes} & {"meta", "link", "img", "script"} == VOID


def test_scales_run_from_end_to_end_and_clamp():
    linear = Scale(0, 10, 100, 200)
    assert [linear(v) for v in (-1, 0, 5, 10, 11)] == [100, 100, 150, 200, 200]
    falling = Scale(0.01, 1, 300, 100, log=True)
    assert [falling(v) for v in (0, 0.01, 0.1, 1, 2)] == pytest.approx([300, 300, 200, 100, 100])


@pytest.mark.parametrize("log", [False, True])
def test_ticks_lie_inside_and_are_few_but_some(log):
    generator = random.Random(0)
    for _ in range(300):
        low = 10 ** generator.uniform(-8, 5)
        high = low * 10 ** generator.uniform(0.05, 7)
        ticks = Scale(low, high, 0, 100, log).ticks(6)
        assert 1 <= len(ticks) <= 13
        assert all(low * (1 - 1e-6) <= tick <= high * (1 + 1e-6) for tick in ticks), (low, high, ticks)
        assert all(a < b for a, b in pairwise(ticks))


def test_round_numbers():
    assert [nice_step(x) for x in (0.3, 1, 1.1, 2, 30, 51)] == pytest.approx([0.5, 1, 2, 2, 50, 100])
    assert decades_around([0.002, 0.3]) == pytest.approx((0.001, 1))
    assert decades_around([0.1]) == pytest.approx((0.1, 1))
    assert [short(x) for x in (0, 0.00001, 0.001, 0.0123, 12, 12345)] == ["0", "1e-5", "0.001", "0.0123", "12", "1e4"]


def test_labels_keep_apart_inside_the_frame_and_off_the_points():
    generator = random.Random(1)
    points = [(generator.gauss(200, 40), generator.gauss(150, 30)) for _ in range(25)]
    frame, taken = Box(0, 0, 500, 400), [Box(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    labels = Labels(frame, taken)
    drawn = picture(400, "labels", *(labels.add(x, y, f"method {i}") for i, (x, y) in enumerate(points)))
    boxes = list(text_boxes(ElementTree.fromstring(drawn)))
    assert len(boxes) == 25
    for i, (_, box) in enumerate(boxes):
        assert box.inside(frame)
        assert not any(box.meets(other) for _, other in boxes[:i])
        assert not any(box.meets(other) for other in taken)


def test_a_label_for_which_there_is_no_room_is_left_out():
    assert Labels(Box(0, 0, 20, 20)).add(10, 10, "far too long") == ""


def test_spreading_keeps_order_and_distance():
    wanted = [50.0, 10.0, 52.0, 51.0, 98.0, 99.0]
    found = spread(wanted, 10, 0, 100)
    assert sorted(range(6), key=lambda i: found[i]) == sorted(range(6), key=lambda i: wanted[i])
    ordered = sorted(found)
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(ordered))
    assert ordered[0] >= 0
    assert ordered[-1] <= 100
    assert spread([5.0, 30.0], 10, 0, 100) == [5.0, 30.0]
