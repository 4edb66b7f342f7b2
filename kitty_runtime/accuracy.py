"""How far a quantized cache moves a model's predictions from those at 16 bits, on the same text.

All methods read a window in lockstep with the unquantized cache, chunk by chunk: no logits are kept, only a few numbers
per token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kitty_runtime.accuracy_stats import TokenValues, perplexity, statistics_of
from kitty_runtime.config import CacheConfig
from kitty_runtime.emulation import CHUNK_SIZE, FIRST_SCORED, forward_in_chunks, teacher_forced_logits
from kitty_runtime.errors import DataError, NumericsError
from kitty_runtime.peers import Peer, peer_cache, rounded_fraction
from kitty_runtime.profiles import BoostProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kitty_runtime.layer_kl import Progress


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
    """Compare methods with the unquantized cache: the figures of `measure_tokens` in short.

    Args, Raises:
        As `measure_tokens`.
    """
    results = {}
    for name, values in measure_tokens(model, windows, methods, first_scored).items():
        stats = statistics_of(values, first_scored)
        results[name] = Divergence(
            kl=stats.kl_mean,
            ppl=stats.ppl,
            reference_ppl=perplexity([w.reference_nll for w in values]),
            same_top1=stats.same_top1,
            packed_fraction=packed_fraction(methods[name].config, [len(w) for w in windows], first_scored),
            num_scored=sum(len(w.kl) for w in values),
        )
    return results


def measure_tokens(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    methods: Mapping[str, Method | Peer],
    first_scored: int = FIRST_SCORED,
    progress: Progress | None = None,
    first_window_only: Collection[str] = (),
) -> dict[str, list[TokenValues]]:
    """Compare methods with the unquantized cache, on the same tokens in one run, token by token.

    Args:
        model: with ``attn_implementation="kitty"``.
        windows: int64 ``[num_tokens]`` each, more than `first_scored` + 1 tokens.
        methods: by name.
        first_scored: first position whose prediction counts.
        progress: see `Progress`.
        first_window_only: methods that are measured on the first window alone, to save time.
    Returns:
        By method, one entry per window.
    Raises:
        DataError: a window is too short to score.
        NumericsError: the divergence is NaN or infinite.
    """
    short = min((len(window) for window in windows), default=0)
    if short < first_scored + 2:
        raise DataError(f"A window has {short} tokens, scoring starts at {first_scored}.", "Use a longer text.")
    found: dict[str, list[TokenValues]] = {name: [] for name in methods}
    rest = [name for name in methods if name not in first_window_only]
    done, total = 0, len(windows[0]) * (1 + len(methods)) + sum(map(len, windows[1:])) * (1 + len(rest))
    for number, window in enumerate(windows):
        measured = rest if number else list(methods)
        parts: dict[str, list[TokenValues]] = {name: [] for name in measured}
        streams = {name: method_logits(model, window, methods[name], first_scored) for name in measured}
        start = 0
        for logits in teacher_forced_logits(model, window, None, first_scored=first_scored):
            stop = min(start + CHUNK_SIZE, len(window))
            reference = _Reference.of(logits, window[stop - len(logits) + 1 : stop + 1])
            for name, stream in streams.items():
                done += stop - start
                if progress:
                    progress("tokens", done, total)
                parts[name].append(reference.compare(next(stream)))
            done += stop - start
            start = stop
        for name, of_chunks in parts.items():
            found[name].append(_joined(of_chunks))
            _check_finite(name, found[name][-1].kl)
    if progress:
        progress("tokens", total, total)
    return found


def method_logits(
    model: PreTrainedModel, window: Tensor, method: Method | Peer, first_scored: int = 0
) -> Iterator[Tensor]:
    """Logits of `window` through a method's cache, as `teacher_forced_logits` gives them."""
    if isinstance(method, Peer):
        cache = peer_cache(model.config, method)
        return forward_in_chunks(model, window, cache, first_scored=first_scored)
    return teacher_forced_logits(model, window, method.config, method.profile, first_scored=first_scored)


def packed_fraction_of(method: Method | Peer, lengths: Sequence[int], first_scored: int = FIRST_SCORED) -> float:
    """`packed_fraction` of any method; of a peer, the share of visible keys that are read rounded."""
    if isinstance(method, Peer):
        return rounded_fraction(method, lengths, first_scored)
    return packed_fraction(method.config, lengths, first_scored)


def packed_fraction(config: CacheConfig, lengths: Sequence[int], first_scored: int = FIRST_SCORED) -> float:
    """Mean share of visible keys that queries at the scored positions read from packed pages."""
    positions = torch.cat([torch.arange(first_scored, length) for length in lengths])
    if not len(positions) or not config.quantizes:
        return 0.0
    k_pages, _ = config.packed_pages(positions)
    return (k_pages * 128 / (positions + 1)).mean().item()


@dataclass(frozen=True)
class _Reference:
    """Predictions of a chunk at 16 bits: log-probabilities and probabilities, fp32 ``[n, vocab_size]``; int64 ``[n]``
    most likely tokens; the text's next tokens, one fewer at the end of a window, and their fp32 log-likelihoods."""

    log_probs: Tensor
    probs: Tensor
    top1: Tensor
    targets: Tensor
    nll: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> _Reference:
        log_probs, targets = logits.float().log_softmax(-1), targets.to(logits.device)
        return cls(log_probs, log_probs.exp(), log_probs.argmax(-1), targets, _nll(log_probs, targets))

    def compare(self, logits: Tensor) -> TokenValues:
        """The values of a method's logits ``[n, vocab_size]`` of the same tokens."""
        log_probs = logits.float().log_softmax(-1)
        top1, nll = log_probs.argmax(-1), _nll(log_probs, self.targets)
        # sum p (log p - log q) over the vocabulary, in place: this is the largest tensor there is
        kl = log_probs.neg_().add_(self.log_probs).mul_(self.probs).sum(-1)
        # Rounding can leave an equal distribution a hair below 0; NaN stays NaN.
        kl = kl.clamp_min(0.0)
        return TokenValues(kl.cpu(), (top1 == self.top1).cpu(), nll.cpu(), self.nll.cpu())


def _nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihoods of the targets, which may be fewer than the positions."""
    return -log_probs[: len(targets)].gather(1, targets[:, None])[:, 0]


def _joined(parts: Sequence[TokenValues]) -> TokenValues:
    return TokenValues(
        torch.cat([part.kl for part in parts]),
        torch.cat([part.same_top1 for part in parts]),
        torch.cat([part.nll for part in parts]),
        torch.cat([part.reference_nll for part in parts]),
    )


def _check_finite(name: str, kl: Tensor) -> None:
    wrong = kl[~kl.isfinite()]
    if len(wrong):
        raise NumericsError(f"The KL divergence of {name} is {wrong[0].item()}.", "Try --dtype float32.")
