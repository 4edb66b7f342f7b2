"""Tiny models on the engine, and answers of the same model one by one through `KittyCache`."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from kitty_runtime.engine import pool_size
from kitty_runtime.engine.engine import Engine, EngineLimits
from kitty_runtime.models.geometry import layers_of


@pytest.fixture(scope="session")
def float64_engine_model():
    return tiny_model(dtype=torch.float64, max_position_embeddings=4096)


@pytest.fixture
def make_engine(monkeypatch):
    """An engine with exactly so many pages and slots."""

    def make(model, config, num_pages=40, num_slots=6, profile=None, tokenizer=None, **limits):
        monkeypatch.setattr(pool_size, "SLOT_SHARE", 1.0)
        layers = layers_of(model.config)
        page_bytes, slot_bytes = pool_size._bytes(layers, config, profile, model.dtype)
        kv_bytes = num_pages * page_bytes + (num_slots + 1) * slot_bytes
        engine = Engine(
            model, tokenizer, config, profile, EngineLimits(kv_bytes=kv_bytes, max_num_seqs=num_slots, **limits)
        )
        assert (engine.pool_size.num_pages, engine.pool_size.num_slots) == (num_pages, num_slots)
        return engine

    return make
