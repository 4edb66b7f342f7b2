"""An accuracy check: methods against the unquantized cache on the same text, with what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kitty_runtime.accuracy import Method, measure_tokens, packed_fraction_of
from kitty_runtime.accuracy_stats import Statistics, perplexity, statistics_of
from kitty_runtime.config import preset
from kitty_runtime.emulation import FIRST_SCORED
from kitty_runtime.memory import MeanCost, mean_cost, mean_sequence_cost, page_bits
from kitty_runtime.models.geometry import LayerGeometry, layers_of
from kitty_runtime.needle import NeedleCase, NeedleScore, needle_scores
from kitty_runtime.peers import Peer, peer_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kitty_runtime.layer_kl import Progress

NOISE_FLOOR = "16"
"""The preset whose divergence from the unquantized cache is rounding alone."""


@dataclass(frozen=True)
class MethodReport:
    """What was found of one method.

    Attributes:
        packed_fraction: mean share of visible keys read from pages.
        effective_bits: bits per number in pages, scales and ids included.
        cost: of everything, at the length of a window.
        needle: None where it was not asked for.
    """

    name: str
    method: Method | Peer
    packed_fraction: float
    statistics: Statistics
    effective_bits: float
    cost: MeanCost
    needle: NeedleScore | None = None


@dataclass(frozen=True)
class Check:
    """All that was found; `reference_ppl` and `reference_needle` are the unquantized cache's."""

    reference_ppl: float
    reference_needle: NeedleScore | None
    noise_floor: MethodReport
    methods: tuple[MethodReport, ...]


def run_check(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    methods: Mapping[str, Method | Peer],
    needles: Sequence[NeedleCase] = (),
    progress: Progress | None = None,
) -> Check:
    """Measure methods, and first of all the 16-bit pages, which show the noise floor.

    The noise floor is that of the first window, unless it is asked for as a method: rounding is the same everywhere.

    Args:
        model: with ``attn_implementation="kitty"``.
        windows: int64 ``[num_tokens]`` each, of one length.
        methods: by name, in the order of the report; at least one.
        needles: cases of the recall test; none to leave it out.
    Raises:
        As `measure_tokens`.
    """
    measured = {NOISE_FLOOR: Method(preset(NOISE_FLOOR)), **methods}
    values = measure_tokens(
        model,
        windows,
        measured,
        progress=progress,
        first_window_only=() if NOISE_FLOOR in methods else (NOISE_FLOOR,),
    )
    reference_needle, scores = needle_scores(model, needles, measured, progress) if needles else (None, {})
    layers, lengths = layers_of(model.config), [len(window) for window in windows]
    reports = {}
    for name, method in measured.items():
        page, cost = costs(layers, method, lengths[0])
        reports[name] = MethodReport(
            name=name,
            method=method,
            packed_fraction=packed_fraction_of(method, lengths),
            statistics=statistics_of(values[name], FIRST_SCORED),
            effective_bits=page,
            cost=cost,
            needle=scores.get(name),
        )
    reference = perplexity([window.reference_nll for window in values[next(iter(methods))]])
    return Check(reference, reference_needle, reports[NOISE_FLOOR], tuple(reports[name] for name in methods))


def costs(layers: Sequence[LayerGeometry], method: Method | Peer, seq_len: int) -> tuple[float, MeanCost]:
    """Bits per number in pages, and the cost of everything around `seq_len` tokens."""
    if isinstance(method, Peer):
        return method.bits, mean_cost(lambda length: peer_bytes(layers, method, length), seq_len)
    return (
        page_bits(layers, method.config, method.profile),
        mean_sequence_cost(layers, method.config, seq_len, method.profile),
    )
