"""Teacher-forced logits: what token-by-token decode through the cache would give, at the speed of a prefill.

No second implementation: by the rule of position (`Windows.packed_pages`) a query reads the same pages in a prefill as
in decode, so a prefill through the real cache is the emulation. It goes in chunks, which bound the memory of the logits
and, by the same rule, change no answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import CacheConfig
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.profiles import BoostProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_SCORED = 384
"""Positions before this one are not scored: hardly anything is packed there."""

CHUNK_SIZE = 512
"""Tokens per forward pass: 512 x 128k vocabulary entries in fp32 are 256 MB."""


def teacher_forced_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    config: CacheConfig | None,
    profile: BoostProfile | None = None,
    chunk_size: int = CHUNK_SIZE,
    first_scored: int = 0,
) -> Iterator[Tensor]:
    """Next-token logits of a text, each query reading what decode would read at its position.

    Args:
        model: with ``attn_implementation="kitty"``.
        input_ids: int64 ``[num_tokens]``.
        config: settings of the cache, ``prefill`` is ignored; None = transformers' own unquantized cache.
        profile: see `KittyCache`.
        chunk_size: tokens per forward pass; changes memory, not answers.
        first_scored: positions before this one are read, but their logits are not computed.
    Yields:
        ``[chunk_size, vocab_size]`` in the model's dtype, in order; fewer rows where the chunk begins before
        `first_scored`, and in the last chunk.
    """
    cache: Cache
    if config is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = KittyCache(model.config, replace(config, prefill="paged"), profile)
    yield from forward_in_chunks(model, input_ids, cache, chunk_size, first_scored)


@torch.inference_mode()
def forward_in_chunks(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: Cache,
    chunk_size: int = CHUNK_SIZE,
    first_scored: int = 0,
) -> Iterator[Tensor]:
    """Logits of `input_ids` through `cache`, chunk by chunk. Arguments and yields as `teacher_forced_logits`."""
    arguments = {cache_kwarg(model): cache, "use_cache": True}
    start = 0
    for chunk in input_ids.to(model.device).split(chunk_size):
        start += len(chunk)
        wanted = min(len(chunk), max(0, start - first_scored))
        # 0 would mean all of them
        logits = model(input_ids=chunk[None], logits_to_keep=max(1, wanted), **arguments).logits[0]
        yield logits[len(logits) - wanted :]
