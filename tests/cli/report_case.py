"""Profiles and checks to draw, and what is read off a report: its pictures, their texts and where these lie."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import torch

from kitty_cli.method_specs import method_name
from kitty_cli.report.labels import Box
from kitty_cli.report.svg import width_of
from kitty_runtime.accuracy import Method
from kitty_runtime.accuracy_stats import Statistics
from kitty_runtime.check import Check, MethodReport
from kitty_runtime.config import PRESETS
from kitty_runtime.memory import MeanCost
from kitty_runtime.peers import Peer
from kitty_runtime.profiles import BoostProfile, LayerProfile, Provenance
from kitty_runtime.sensitivity import KeyErrors

LEVELS = (0.0, 0.0625, 0.125, 0.25, 0.5)
PROVENANCE = Provenance(
    "tiny", "8c22764", "c" * 64, "w" * 64, "query", "words.txt", "t" * 64, 4096, 1280, 0, "kitty profile tiny"
)
VOID = {"meta"}


def profile_of(num_layers: int, num_heads: int = 2, head_dim: int = 32, **provenance: str) -> BoostProfile:
    """Random scores with an outlier in every seventh layer; KL falls by a third from level to level."""
    generator = torch.Generator().manual_seed(0)
    layers = {}
    for index in range(num_layers):
        scores = torch.rand(num_heads, head_dim, generator=generator).exp()
        if index % 7 == 0:
            scores[index % num_heads, 3] = 100.0
        first = 0.001 * (1 + index * 37 % 11)
        kl = tuple(first * 0.66**n for n in range(len(LEVELS)))
        layers[index] = LayerProfile(torch.rand(num_heads, head_dim, generator=generator) + 0.5, scores, kl)
    return BoostProfile(layers, LEVELS, replace(PROVENANCE, **provenance))


def key_errors(profile: BoostProfile) -> dict[int, KeyErrors]:
    """Errors in proportion to the scores, a fifth of them at 4 bits."""
    return {
        index: KeyErrors(layer.channel_scores * 2, layer.channel_scores / 3, layer.channel_scores / 15)
        for index, layer in profile.layers.items()
    }


def method_report(name: str, method: Method | Peer, kl: float, se: float | None, size: float) -> MethodReport:
    statistics = Statistics(
        kl, se, kl, kl, kl, kl, kl, kl, 9.0, 1.1, None, 0.1, 0.9, None, kl_by_position=(), windows=(kl,)
    )
    return MethodReport(name, method, 0.9, statistics, 2.5, MeanCost(size, 24000.0))


def check_of(methods: Sequence[MethodReport], floor: float = 1e-7) -> Check:
    return Check(8.5, None, method_report("16", Method(PRESETS["16"]), floor, None, 24000.0), tuple(methods))


def picture_of(markup: str) -> ElementTree.Element:
    """The one picture in it; raises if it is not well-formed."""
    (found,) = pictures(markup)
    return found


def pictures(markup: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", markup, re.DOTALL)]


def words(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter("text")]


def marks(picture: ElementTree.Element, class_: str) -> list[ElementTree.Element]:
    """Elements of a class, in the order they are drawn."""
    return [element for element in picture.iter() if class_ in element.get("class", "").split()]


def titles(elements: Sequence[ElementTree.Element]) -> list[str]:
    return [element.findtext("title", "") for element in elements]


def text_boxes(picture: ElementTree.Element) -> Iterator[tuple[str, Box]]:
    """Level texts and the room that they take at the most: 11 pixels high, 8 of them above the baseline."""
    for element in picture.iter("text"):
        if "transform" in element.attrib:
            continue
        said, x, y = element.text or "", float(element.get("x", "")), float(element.get("y", ""))
        wide = width_of(said)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[element.get("text-anchor", "start")]
        yield said, Box(left, y - 8, left + wide, y + 3)


def check_texts_keep_apart(picture: ElementTree.Element) -> None:
    """No text meets another one or leaves the picture."""
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    boxes = list(text_boxes(picture))
    assert boxes
    for i, (said, box) in enumerate(boxes):
        assert box.inside(Box(0, 0, width, height)), f"{said!r} leaves the picture: {box}"
        for other, other_box in boxes[:i]:
            assert not box.meets(other_box), f"{said!r} lies on {other!r}"


class Nesting(HTMLParser):
    """Verifies that elements close in order, and collects their attributes."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def sweep(preset: str, *boosts: float) -> list[MethodReport]:
    """A preset at several boosts: KL falls as bytes rise."""
    found = []
    for n, boost in enumerate(boosts):
        config = replace(PRESETS[preset], boost_ratio=boost)
        name = method_name(config, preset)
        found.append(method_report(name, Method(config), 0.1 / (n + 1), 0.01, 5000.0 + 150 * n))
    return found
