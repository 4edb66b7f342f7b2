"""Fixtures that several test files share: the costly one is token-by-token decode, run once per preset."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    # For tests/kernels. Triton reads it when it is first imported, which transformers does below.
    os.environ["TRITON_INTERPRET"] = "1"

from tiny_models import logits_in_chunks, random_ids, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import preset

LONG = 1050


@pytest.fixture(scope="session")
def float64_model() -> PreTrainedModel:
    return tiny_model(dtype=torch.float64)


@pytest.fixture(scope="session")
def long_ids() -> Tensor:
    """``[1050]``, which `decoded` begins to decode."""
    return random_ids(LONG)


@pytest.fixture(scope="session")
def decoded(float64_model, long_ids) -> Callable[[str], tuple[Tensor, KittyCache]]:
    """By preset: logits and cache of tokens that each were their own pass, from the first on. Not to be changed.

    420 tokens (three packed pages of keys, two of values with the paper's windows) for presets whose pages differ,
    300 (two and one) for their variants.
    """
    found: dict[str, tuple[Tensor, KittyCache]] = {}

    def get(name: str) -> tuple[Tensor, KittyCache]:
        if name not in found:
            cache = KittyCache(float64_model.config, preset(name))
            length = 420 if name in ("kitty", "weighted", "kivi-2-g128", "kv4") else 300
            found[name] = logits_in_chunks(float64_model, long_ids[:length], cache, 1), cache
        return found[name]

    return get


@pytest.fixture(scope="session")
def float64_engine_model():
    return tiny_model(dtype=torch.float64, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def make_engine():
    """An engine with exactly so many pages and slots."""
    from kitty_runtime.engine.engine import Engine
    from kitty_runtime.engine.limits import EngineLimits

    def make(model, config, num_pages=40, num_slots=6, profile=None, tokenizer=None, **limits):
        limits = EngineLimits(num_pages=num_pages, max_num_seqs=num_slots, **limits)
        engine = Engine(model, tokenizer, config, profile, limits)
        assert sum(tensor.nbytes for tensor in engine.cache.tensors) == engine.pool_size.total_bytes
        return engine

    return make
