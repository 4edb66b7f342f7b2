"""From logits to tokens, for all sequences of a pass at once.

Each request draws its own random numbers, a pure function of its seed, the position and the token: the same seed gives
the same choice whatever else runs, on any batch, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from kitty_runtime.engine.request import TokenLogprob
from kitty_runtime.engine.sequence import Sequence
from kitty_runtime.ops.transfer import OnTheWay, to_device

NO_TOKEN = -1

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of a pass's sequences as tensors on the logits' device; None where no sequence asks.

    Attributes:
        sequences: row i of the logits belongs to ``sequences[i]``.
        temperature: fp32 ``[n, 1]``, 1 for greedy rows; greedy: bool ``[n]``.
        top_k: int64 ``[n, 1]``, the vocabulary where all are kept; top_p, min_p: fp32 ``[n, 1]``.
        repetition_penalty: fp32 ``[n, 1]``.
        seeds: int64 ``[n, 2]``, low and high 32 bits.
        forbids: whether a sequence may have tokens that are not to be chosen.
        max_logprobs: the most alternatives that a sequence asks for.
    """

    sequences: tuple[Sequence, ...]
    greedy: Tensor
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    repetition_penalty: Tensor | None
    seeds: Tensor | None
    forbids: bool
    max_logprobs: int | None

    @staticmethod
    def of(sequences: Rows[Sequence], vocab_size: int, device: torch.device) -> SamplingBatch:
        settings = [s.sampling for s in sequences]

        def column(values: list[float] | list[int], neutral: float, dtype: torch.dtype) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return to_device(torch.tensor(values, dtype=dtype), device)[:, None]

        sampled = [s for s in settings if not s.greedy]
        seeds = torch.tensor([[seed & _WORD, seed >> 32 & _WORD] for seed in map(_seed, sequences)])
        wanted = [s.num_logprobs for s in settings if s.num_logprobs is not None]
        return SamplingBatch(
            sequences=tuple(sequences),
            greedy=to_device(torch.tensor([s.greedy for s in settings]), device),
            temperature=column([1.0 if s.greedy else s.temperature for s in settings], 1.0, torch.float32),
            top_k=column([s.top_k or vocab_size for s in settings], vocab_size, torch.int64) if sampled else None,
            top_p=column([s.top_p for s in settings], 1.0, torch.float32) if sampled else None,
            min_p=column([s.min_p for s in settings], 0.0, torch.float32) if sampled else None,
            repetition_penalty=column([s.repetition_penalty for s in settings], 1.0, torch.float32),
            seeds=to_device(seeds, device) if sampled else None,
            forbids=any(s.suppress_tokens or s.min_tokens for s in settings),
            max_logprobs=max(wanted, default=None),
        )


def _seed(sequence: Sequence) -> int:
    """The request's seed; without one its number, so that every request of a run draws others."""
    return sequence.arrival if sequence.sampling.seed is None else sequence.sampling.seed


class Sampled:
    """A pass's choices: on the device at once, for the host when it reads them.

    Attributes:
        tokens: int64 ``[n]`` on the device; some token where a logit is NaN.
    """

    def __init__(self, tokens: Tensor, is_nan: Tensor, batch: SamplingBatch, log_probs: Tensor | None) -> None:
        self.tokens = tokens
        self._batch = batch
        found = [tokens.masked_fill(is_nan, NO_TOKEN)]
        if log_probs is not None:
            assert batch.max_logprobs is not None
            top = log_probs.topk(min(batch.max_logprobs, log_probs.shape[-1]), dim=-1)
            found += [log_probs.gather(-1, tokens[:, None])[:, 0], top.values, top.indices]
        self._found = OnTheWay(*found)

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Token ids, `NO_TOKEN` where a logit is NaN; and log-probabilities where asked for: of the model's own
        distribution, before penalties, temperature and filters."""
        tokens, *logprobs = (tensor.tolist() for tensor in self._found.wait())
        if not logprobs:
            return tokens, [None] * len(tokens)
        found: list[TokenLogprob | None] = []
        for sequence, token, logprob, values, ids in zip(self._batch.sequences, tokens, *logprobs, strict=True):
            count = sequence.sampling.num_logprobs
            top = zip(ids[:count], values[:count], strict=True)
            found.append(None if count is None else TokenLogprob(token, logprob, tuple(top)))
        return tokens, found


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Choose a token per row of float ``[n, vocab_size]``."""
    logits = logits.float()
    own = logits
    if batch.repetition_penalty is not None:
        logits = _penalize(logits, batch)
    if batch.forbids:
        logits = _forbid(logits, batch.sequences)
    highest, chosen = logits.max(-1)
    if batch.seeds is not None:
        positions = to_device(torch.tensor([len(s.ids) for s in batch.sequences]), logits.device)
        drawn = _draw(_filter(logits, batch), batch.seeds, positions)
        chosen = torch.where(batch.greedy, chosen, drawn)
    return Sampled(chosen, highest.isnan(), batch, None if batch.max_logprobs is None else own.log_softmax(-1))


def _penalize(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Divide positive and multiply negative logits of tokens that the request has, as transformers does.

    Source: Keskar et al., CTRL, section 4.1.
    """
    assert batch.repetition_penalty is not None
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, sequence in enumerate(batch.sequences):
        if sequence.sampling.repetition_penalty != 1.0:
            seen[row, torch.tensor(sequence.ids, device=logits.device)] = True
    penalized = torch.where(logits < 0, logits * batch.repetition_penalty, logits / batch.repetition_penalty)
    return torch.where(seen, penalized, logits)


def _forbid(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """No suppressed token, and no end before the least length."""
    forbidden: list[tuple[int, int]] = []
    for row, s in enumerate(sequences):
        early = s.sampling.stop_token_ids if s.num_new < s.sampling.min_tokens else ()
        forbidden += [(row, token) for token in (*s.sampling.suppress_tokens, *early)]
    if not forbidden:
        return logits
    rows, tokens = to_device(torch.tensor(forbidden).T.contiguous(), logits.device).unbind(0)
    return logits.index_put((rows, tokens), torch.full((), float("-inf"), device=logits.device))


def _filter(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits after temperature, top_k, top_p and min_p; what is dropped is -inf. The likeliest token always stays."""
    if batch.temperature is not None:
        logits = logits / batch.temperature
    if batch.top_k is None and batch.top_p is None and batch.min_p is None:
        return logits
    ordered, order = logits.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if batch.top_k is not None:
        keep &= torch.arange(ordered.shape[-1], device=logits.device) < batch.top_k
    if batch.top_p is not None:
        probs = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= probs.cumsum(-1) - probs < batch.top_p
    if batch.min_p is not None:
        keep &= ordered >= ordered[:, :1] + batch.min_p.log()
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(-1, order, keep), float("-inf"))


def _draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A token of each row from softmax(logits): the least exponential variate of rate p, which is argmax p / e."""
    token = torch.arange(logits.shape[-1], device=logits.device)
    word = _mix(_mix(_mix(seeds[:, 0]) ^ seeds[:, 1]) ^ positions)[:, None]
    uniform = (_mix(word ^ _mix(token + 1)).float() + 0.5) * 2.0**-32  # fine where it matters, near 0
    exponential = -torch.log1p(-uniform)
    return (logits - exponential.log()).argmax(-1)


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words (in int64) that spreads every bit over all; the finalizer of MurmurHash3."""
    word = word & _WORD
    word = ((word ^ word >> 16) * 0x85EBCA6B) & _WORD
    word = ((word ^ word >> 13) * 0xC2B2AE35) & _WORD
    return word ^ word >> 16
