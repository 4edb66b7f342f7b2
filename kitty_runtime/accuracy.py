"""How far a quantized cache moves a model's predictions from those at 16 bits, on the same text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kitty_runtime.config import CacheConfig
from kitty_runtime.emulation import CHUNK_SIZE, FIRST_SCORED, teacher_forced_logits
from kitty_runtime.errors import DataError, NumericsError
from kitty_runtime.profiles import BoostProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Method:
    """One way to store the cache: settings and, for policies that use one, a profile."""

    config: CacheConfig
    profile: BoostProfile | None = None


@dataclass(frozen=True)
class Divergence:
    """Against 16 bits, over the scored positions.

    Attributes:
        kl: mean KL divergence of the next-token distributions, in nats.
        ppl: perplexity of the method; reference_ppl: at 16 bits.
        same_top1: share of positions whose most likely token is the same.
        packed_fraction: mean share of visible keys read from packed pages.
        num_scored: positions.
    """

    kl: float
    ppl: float
    reference_ppl: float
    same_top1: float
    packed_fraction: float
    num_scored: int


def measure_divergence(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    methods: Mapping[str, Method],
    first_scored: int = FIRST_SCORED,
) -> dict[str, Divergence]:
    """Compare methods with the unquantized cache, on the same tokens in one run.

    Args:
        model: with ``attn_implementation="kitty"``.
        windows: int64 ``[num_tokens]`` each, more than `first_scored` + 1 tokens.
        methods: by name.
        first_scored: first position whose prediction counts.
    Raises:
        DataError: a window is too short to score.
        NumericsError: the divergence is NaN.
    """
    short = min((len(window) for window in windows), default=0)
    if short < first_scored + 2:
        raise DataError(f"A window has {short} tokens, scoring starts at {first_scored}.", "Use a longer text.")
    sums = {name: [0.0, 0.0, 0.0] for name in methods}
    reference_nll, scored, predicted = 0.0, 0, 0
    for window in windows:
        streams = {name: teacher_forced_logits(model, window, m.config, m.profile) for name, m in methods.items()}
        start = 0
        for chunk in teacher_forced_logits(model, window, None):
            skip = max(0, first_scored - start)
            targets = window[start + skip + 1 : start + len(chunk) + 1].to(chunk.device)
            reference = chunk[skip:].float().log_softmax(-1)
            reference_nll += _nll(reference, targets)
            scored += len(reference)
            predicted += len(targets)
            for name, stream in streams.items():
                quantized = next(stream)[skip:].float().log_softmax(-1)
                sums[name][0] += (reference.exp() * (reference - quantized)).sum().item()
                sums[name][1] += _nll(quantized, targets)
                sums[name][2] += (reference.argmax(-1) == quantized.argmax(-1)).sum().item()
            start += CHUNK_SIZE
    results = {}
    for name, (kl, nll, same) in sums.items():
        if not math.isfinite(kl):
            raise NumericsError(f"The KL divergence of {name} is {kl}.", "Try --dtype float32.")
        fraction = packed_fraction(methods[name].config, [len(w) for w in windows], first_scored)
        results[name] = Divergence(
            kl / scored,
            _perplexity(nll / predicted),
            _perplexity(reference_nll / predicted),
            same / scored,
            fraction,
            scored,
        )
    return results


def packed_fraction(config: CacheConfig, lengths: Sequence[int], first_scored: int = FIRST_SCORED) -> float:
    """Mean share of visible keys that queries at the scored positions read from packed pages."""
    positions = torch.cat([torch.arange(first_scored, length) for length in lengths])
    if not len(positions) or not config.quantizes:
        return 0.0
    k_pages, _ = config.packed_pages(positions)
    return (k_pages * 128 / (positions + 1)).mean().item()


def _nll(log_probs: Tensor, targets: Tensor) -> float:
    """Summed negative log likelihood; the last token of a window has no target."""
    return -log_probs[: len(targets)].gather(1, targets[:, None]).sum().item()


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))  # finite for a ruined model too
