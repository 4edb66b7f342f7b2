"""A number of bytes becomes pages and slots whose tensors take no more than that."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config, tiny_model

from kitty_runtime.config import PRESETS, preset
from kitty_runtime.engine.engine import Engine
from kitty_runtime.engine.limits import EngineLimits
from kitty_runtime.engine.pool_size import cache_cost, size_pool
from kitty_runtime.errors import MemoryLimitError
from kitty_runtime.models.geometry import layers_of


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tensors_take_what_was_promised(name, family):
    model, kv_bytes = tiny_model(family), 3_000_000
    engine = Engine(model, None, preset(name), limits=EngineLimits(kv_bytes=kv_bytes, max_num_seqs=4))
    allocated = sum(tensor.nbytes for tensor in engine.cache.tensors)
    assert allocated == engine.pool_size.total_bytes <= kv_bytes
    used_up = engine.cache.bytes_of(engine.pool_size.num_pages, engine.pool_size.num_slots + 1)
    assert used_up.total == allocated
    assert engine.used_bytes().total == 0


def test_slots_take_half_at_the_most():
    config, cost = preset("weighted"), cache_cost(layers_of(tiny_config()), preset("weighted"), None, torch.float16)
    for kv_bytes in range(2 * cost.slot_bytes, 100 * cost.slot_bytes, cost.slot_bytes // 3):
        size = size_pool(config, cost, kv_bytes, 1000, 10**6)
        assert size.total_bytes <= kv_bytes < size.total_bytes + cost.page_bytes
        assert size.num_slots == 1 or (size.num_slots + 1) * cost.slot_bytes <= kv_bytes / 2
    plenty = size_pool(config, cost, 10**9, 7, 2048)
    assert (plenty.num_slots, plenty.num_pages) == (7, 7 * 15)  # no more than they can fill
    assert plenty.longest_sequence == 2048
    with pytest.raises(MemoryLimitError, match="before its first page"):
        size_pool(config, cost, 2 * cost.slot_bytes - 1, 1000, 10**6)


def test_the_longest_sequence():
    for name in PRESETS:
        config, cost = preset(name), cache_cost(layers_of(tiny_config()), preset(name), None, torch.float16)
        size = size_pool(config, cost, 20 * cost.slot_bytes, 4, 10**6)
        assert config.packed_pages(size.longest_sequence)[0] == size.num_pages
        assert config.packed_pages(size.longest_sequence + 1)[0] == size.num_pages + 1
