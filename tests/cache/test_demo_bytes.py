"""The demo model at 4096 tokens: the bytes that are reported are the bytes that live."""

from __future__ import annotations

import gc

import pytest
import torch

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.config import preset
from kitty_runtime.emulation import forward_in_chunks
from kitty_runtime.memory import sequence_bytes
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.models.loading import load_model, resolve_model


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, shared storage counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.slow
def test_allocated_is_live_and_used_is_the_formula():
    model = load_model(resolve_model("demo"), attn_implementation="kitty")
    ids = torch.randint(3, model.config.vocab_size, (4096,), generator=torch.Generator().manual_seed(0))
    before = live_bytes()
    cache = KittyCache(model.config, preset("weighted"))
    for logits in forward_in_chunks(model, ids, cache, first_scored=4000):
        assert logits.isfinite().all()
    del logits
    cache._step = None  # where the last pass went, some hundred bytes of indices; the next pass would replace it
    assert cache.allocated_bytes().total == live_bytes() - before
    used = cache.used_bytes()
    assert used.total == sequence_bytes(layers_of(model.config), cache.config, 4096, dtype=torch.float32).total
    assert used.pages == (4096 - 32 - cache.config.k_recent_len) // 128 * 30 * 3 * 5136
    cache.paged.check_integrity()
