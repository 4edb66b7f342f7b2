"""The paged cache: bytes of pages, of memory, of neighbours; sharing; numbers no key should have."""

from __future__ import annotations

import gc
import logging
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from page_format import Spec, encode_keys, encode_values, hadamard
from tiny_models import random_ids, tiny_config, tiny_model
from torch import Tensor

from kitty_runtime.cache.hf import KittyCache
from kitty_runtime.cache.paged_cache import PagedCache
from kitty_runtime.config import PRESETS, CacheConfig, preset
from kitty_runtime.errors import NumericsError, ShapeError, UnsupportedOperationError
from kitty_runtime.models.geometry import layers_of
from kitty_runtime.models.loading import cache_kwarg
from kitty_runtime.ops.operands import SoftmaxSpec
from kitty_runtime.profiles import layer_boosts
from kitty_runtime.quant.rotation import rotate

HEADS, GROUP, DIM, LAYERS = 2, 2, 32, 2
SOFTMAX = SoftmaxSpec(DIM**-0.5)
SMALL = CacheConfig(sink_len=5, k_recent_len=0, v_recent_len=128, policy="dynamic")
SMALL_RUNNING = CacheConfig(sink_len=5, k_recent_len=9, v_recent_len=9, policy="weighted")


class Stream(NamedTuple):
    """query ``[num_seqs, HEADS * GROUP, n, DIM]``, keys and values ``[num_seqs, HEADS, n, DIM]``."""

    query: Tensor
    keys: Tensor
    values: Tensor

    def columns(self, start: int, stop: int) -> Stream:
        return Stream(*(t[:, :, start:stop] for t in self))

    def row(self, row: int) -> Stream:
        return Stream(*(t[row : row + 1] for t in self))


def stream(num_seqs: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Stream:
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (
        torch.randn(num_seqs, heads, n, DIM, generator=generator) for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    channel_scale = torch.rand(2, 1, DIM, generator=generator) * 3 + 0.1
    return Stream(
        (query * channel_scale.flip(-1).repeat_interleave(GROUP, 0)).to(dtype),
        (keys * channel_scale).to(dtype),
        (values * 128).round().div(128).to(dtype),  # coarse: sums of them are exact in any order
    )


def stored_values(tokens: Stream, config: CacheConfig) -> Tensor:
    """The values as sinks, rings and pages hold them."""
    if not config.v_hadamard:
        return tokens.values
    return torch.from_numpy(hadamard(tokens.values.numpy()))


def new_cache(config: CacheConfig, num_seqs: int = 1) -> PagedCache:
    return PagedCache(config, layer_boosts(layers_of(tiny_config()), config, None), num_seqs)


def feed(cache: PagedCache, tokens: Stream, real: Tensor | None = None, layer: int = 0) -> Tensor:
    """One forward pass of one layer."""
    step = cache.begin_step(tokens.keys.shape[2], real)
    return cache.layer(layer, tokens.keys).attend(step, *tokens, SOFTMAX)


def feed_in(cache: PagedCache, tokens: Stream, sizes: list[int]) -> Tensor:
    out, at = [], 0
    for size in sizes:
        out.append(feed(cache, tokens.columns(at, at + size)))
        at += size
    assert at == tokens.keys.shape[2]
    return torch.cat(out, dim=2)


def spec_of(config: CacheConfig, itemsize: int = 4) -> Spec:
    boosted = DIM if config.k_bits == 4 else int(config.boost_ratio * DIM)
    return Spec(DIM, config.k_bits, config.v_bits, boosted, itemsize)


def boosted_by_hand(config: CacheConfig, tokens: Stream, page: int, layer: int) -> list[list[int]]:
    """Per head, from the text of the method."""
    count = spec_of(config).num_boosted
    if count in (0, DIM):
        return [list(range(count))] * HEADS
    first = config.sink_len + 128 * page
    chosen = []
    drawn = torch.rand(HEADS, DIM, generator=torch.Generator().manual_seed(config.seed + layer))
    for head in range(HEADS):
        keys = tokens.keys[0, head, first : first + 128].double().numpy()
        if config.policy == "random":
            scores = drawn[head].numpy()
        elif config.policy == "dynamic":
            scores = np.abs(keys).mean(0)
        else:  # everything seen when the page is packed, which is before the query at that position
            seen = tokens.query[0, :, : first + 128 + config.k_recent_len].double().numpy()
            group = seen[head * GROUP : (head + 1) * GROUP]
            scores = (keys.max(0) - keys.min(0)) * np.sqrt((group**2).mean((0, 1)))
        best = sorted(range(DIM), key=lambda channel: (-scores[channel], channel))
        chosen.append(sorted(best[:count]))
    return chosen


def check_pages(cache: PagedCache, row: int, tokens: Stream, config: CacheConfig, layer: int = 0) -> tuple[int, int]:
    """Compare every packed byte of a sequence with the independent computation."""
    spec, table = spec_of(config, tokens.keys.element_size()), cache.tables[row]
    length = cache.lens[row]
    k_pages = max(0, (length - config.sink_len - config.k_recent_len) // 128)
    v_pages = max(0, (length - config.sink_len - config.v_recent_len) // 128)
    assert len(table) == k_pages
    (state,) = [x.state for x in cache.layers if x.index == layer]
    assert state.pages.shape[1] == HEADS * spec.head_bytes
    for page, page_id in enumerate(table):
        span = slice(config.sink_len + 128 * page, config.sink_len + 128 * page + 128)
        channels = boosted_by_hand(config, tokens, page, layer)
        for head in range(HEADS):
            keys, values = tokens.keys[0, head, span], stored_values(tokens, config)[0, head, span]
            if config.k_bits == 16:
                fields = {"keys": keys.contiguous().numpy().tobytes()}
                if page < v_pages:
                    fields["values"] = values.contiguous().numpy().tobytes()
            else:
                clips = (1 / 16, 1 / 8) if config.clip_search else ()
                fields = encode_keys(spec, keys.numpy(), channels[head], clips)
                if page < v_pages:
                    fields |= encode_values(spec, values.numpy())
            data = spec.head_in_page(state.pages[page_id].numpy(), head, HEADS).tobytes()
            for name, expected in fields.items():
                assert data[slice(*spec.spans[name])] == expected, (page, head, name)
    return k_pages, v_pages


def check_buffers(cache: PagedCache, row: int, tokens: Stream, config: CacheConfig) -> None:
    """Sink and ring hold what they must hold, exactly."""
    state, length = cache.layers[0].state, cache.lens[row]
    k_pages, v_pages = config.packed_pages(length)
    for stored, sink, ring, recent, pages in (
        (tokens.keys[0], state.k_sink[row], state.k_ring[row], config.k_recent_len, k_pages),
        (stored_values(tokens, config)[0], state.v_sink[row], state.v_ring[row], config.v_recent_len, v_pages),
    ):
        assert ring.shape[1] == recent + 128
        for pos in range(min(length, config.sink_len)):
            assert torch.equal(sink[:, pos], stored[:, pos])
        for pos in range(config.sink_len + 128 * pages, length):
            assert torch.equal(ring[:, (pos - config.sink_len) % (recent + 128)], stored[:, pos])


# --- bytes of pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), [*((name, 0) for name in PRESETS), ("random", 1), ("weighted", 1)], ids=str)
def test_pages_of_decode_are_exact(name, layer):
    config = preset(name)
    length = config.sink_len + 3 * 128 + config.v_recent_len
    if layer:  # another layer draws other random channels; short is enough
        length = config.sink_len + 128 + config.v_recent_len
    tokens, cache = stream(1, length), new_cache(config)
    for i in range(length):
        feed(cache, tokens.columns(i, i + 1), layer=layer)
    k_pages, v_pages = check_pages(cache, 0, tokens, config, layer)
    assert v_pages == (1 if layer else 3)
    assert k_pages == v_pages + (config.v_recent_len - config.k_recent_len) // 128
    cache.check_integrity()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("sizes", [[620], [1, 200, 1, 1, 17, 400], [31, 1, 128, 128, 128, 128, 76]], ids=str)
def test_pages_of_prefill_are_exact(name, sizes):
    config, tokens = preset(name), stream(1, sum(sizes), seed=len(sizes))
    cache = new_cache(config)
    feed_in(cache, tokens, sizes)
    assert check_pages(cache, 0, tokens, config)[1] >= 3
    check_buffers(cache, 0, tokens, config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["kitty", "weighted", "kv4"])
def test_pages_of_other_dtypes_are_exact(name, dtype):
    config, tokens = preset(name), stream(1, 360, dtype=dtype)
    cache = new_cache(config)
    feed_in(cache, tokens, [280, *[1] * 80])
    as_float = Stream(*(t.float() for t in tokens))
    assert check_pages(cache, 0, as_float, config) >= (2, 1)


# --- lengths -------------------------------------------------------------------------------------------------------


def boundary_lengths(config: CacheConfig) -> list[int]:
    first_page = config.sink_len + 128 + config.k_recent_len
    lengths = {1, 2, config.sink_len - 1, config.sink_len, config.sink_len + 1}
    lengths |= {first_page + n for n in (-1, 0, 1, 127, 128, 129)} | {config.sink_len + 127, config.sink_len + 129}
    return sorted(n for n in lengths if n > 0)


def check_length(cache: PagedCache, tokens: Stream, config: CacheConfig, out: Tensor) -> None:
    """Everything about a cache that holds `tokens` and gave `out`."""
    length = tokens.keys.shape[2]
    assert cache.lens == [length]
    check_pages(cache, 0, tokens, config)
    check_buffers(cache, 0, tokens, config)
    cache.check_integrity()
    assert bool(out.isfinite().all())
    if length < config.sink_len + 128 + config.k_recent_len:  # nothing packed yet: plain attention
        exact = torch.nn.functional.scaled_dot_product_attention(*tokens, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-5)


BOUNDARY_CONFIGS = [SMALL, SMALL_RUNNING, preset("kivi-2-g128"), preset("16")]


@pytest.mark.parametrize("config", BOUNDARY_CONFIGS, ids=repr)
def test_boundary_lengths_in_one_pass(config):
    for length in boundary_lengths(config):
        tokens, cache = stream(1, length), new_cache(config)
        check_length(cache, tokens, config, feed(cache, tokens))


@pytest.mark.parametrize("config", BOUNDARY_CONFIGS, ids=repr)
def test_boundary_lengths_in_decode(config):
    lengths = boundary_lengths(config)
    tokens, cache, out = stream(1, lengths[-1]), new_cache(config), []
    for i in range(lengths[-1]):
        out.append(feed(cache, tokens.columns(i, i + 1)))
        if i + 1 in lengths:
            check_length(cache, tokens.columns(0, i + 1), config, torch.cat(out, dim=2))


def test_attention_does_not_depend_on_the_route():
    for config in (SMALL, SMALL_RUNNING):
        tokens = stream(1, 420, dtype=torch.float64)
        outs = [feed_in(new_cache(config), tokens, sizes) for sizes in ([420], [1] * 420, [7] * 60, [133, 1, 286])]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-11)
        exact = torch.nn.functional.scaled_dot_product_attention(*tokens, is_causal=True, enable_gqa=True)
        assert float((outs[0] - exact).abs().max()) > 1e-2  # and it did read packed pages


# --- memory --------------------------------------------------------------------------------------------------------


class YoungerTensors:
    """Tensors made since `start`, found by the garbage collector and not by asking the cache."""

    def start(self) -> None:
        gc.collect()
        gc.freeze()

    def storages(self) -> dict[int, int]:
        """Address to bytes of every storage that is alive."""
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is Tensor]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.fixture
def younger_tensors():
    yield YoungerTensors()
    gc.unfreeze()


@pytest.mark.parametrize("name", PRESETS)
def test_allocated_is_what_lives_and_used_is_the_formula(name, younger_tensors):
    config, num_seqs = preset(name), 2
    long, short, shorter = stream(num_seqs, 700), stream(num_seqs, 450, seed=1), stream(num_seqs, 130, seed=2)
    boosts = layer_boosts(layers_of(tiny_config()), config, None)
    rotate(long.values)  # its matrix is made once in a process, for all caches
    younger_tensors.start()
    cache = PagedCache(config, boosts, num_seqs)
    lens, tokens, step = [700, 0], None, None
    padding = torch.tensor([[True] * 700, [False] * 700])
    for real, tokens, added in (
        (padding, long, [0, 0]),
        (None, short, [450, 450]),
        (None, shorter, [130, 130]),  # a page each: the pool grows by half, so more is allocated than used
    ):
        step = cache.begin_step(tokens.keys.shape[2], real)
        for layer in range(LAYERS):
            cache.layer(layer, tokens.keys).attend(step, *tokens, SOFTMAX)
        lens = [n + extra for n, extra in zip(lens, added, strict=True)]
        assert cache.lens == lens
    del step, real, added, padding
    alive = sum(younger_tensors.storages().values())
    allocated, used, spec = cache.allocated_bytes(), cache.used_bytes(), spec_of(config)
    assert allocated.total == alive
    pages = sum(max(0, (n - config.sink_len - config.k_recent_len) // 128) for n in lens)
    buffers = num_seqs * HEADS * DIM * 4 * LAYERS
    assert used.pages == LAYERS * pages * HEADS * spec.head_bytes
    assert used.sinks == allocated.sinks == buffers * 2 * config.sink_len
    assert used.rings == allocated.rings == buffers * (256 + config.k_recent_len + config.v_recent_len)
    assert used.statistics == allocated.statistics == (buffers if name in ("weighted", "tuned") else 0)
    assert used.total == used.pages + used.sinks + used.rings + used.statistics
    assert used.pages < allocated.pages <= used.pages * 3 // 2 + LAYERS * HEADS * spec.head_bytes
    assert cache.dense_bytes() == sum(lens) * LAYERS * HEADS * DIM * 2 * 2


@torch.no_grad()
def test_no_full_length_keys_stay_alive_after_a_prefill(younger_tensors):
    model, ids = tiny_model(), random_ids(1, 900)
    cache = KittyCache(model.config, preset("kitty"))
    younger_tensors.start()
    model(input_ids=ids, logits_to_keep=1, use_cache=True, **{cache_kwarg(model): cache})
    own = {t.untyped_storage().data_ptr() for layer in cache.paged.layers for t in layer.state.tensors}
    other = {a: n for a, n in younger_tensors.storages().items() if a not in own}
    assert max(other.values(), default=0) < 900 * DIM * 4  # less than one head's keys
    assert cache.used_bytes().pages == 2 * 6 * HEADS * spec_of(preset("kitty")).head_bytes


# --- neighbours ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, SMALL_RUNNING], ids=repr)
def test_row_0_never_changes_row_1(config):
    real = torch.tensor([[True] * 300, [False] * 70 + [True] * 230])
    mine, other = stream(2, 360), stream(2, 360, seed=9)
    changed = Stream(*(torch.stack([o[0] * 50, m[1]]) for m, o in zip(mine, other, strict=True)))
    found = []
    for tokens in (mine, changed):
        cache = new_cache(config, 2)
        out = [feed(cache, tokens.columns(0, 300), real)[1]]
        out += [feed(cache, tokens.columns(i, i + 1))[1] for i in range(300, 360)]
        state = cache.layers[0].state
        pages = state.pages[cache.tables[1]]
        buffers = [t[1] for t in (state.k_sink, state.v_sink, state.k_ring, state.v_ring)]
        found.append([torch.cat(out, dim=1), pages, *buffers])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    # and row 1 is what it would be alone, its padding gone
    alone = Stream(*(t[1:2, :, 70:] for t in mine))
    check_pages(cache, 1, alone, config)
    check_buffers(cache, 1, alone, config)
    assert not bool(found[0][0][:, :70].any())


def test_padding_may_be_anywhere_and_may_be_nan():
    real = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) < 0.7
    tokens = stream(2, 300)
    for t in tokens:
        t.masked_fill_(~real[:, None, :, None], float("nan"))
    cache = new_cache(SMALL, 2)
    feed(cache, tokens.columns(0, 200), real[:, :200])
    feed(cache, tokens.columns(200, 300), real[:, 200:])
    for row in range(2):
        alone = Stream(*(t[row : row + 1, :, real[row]] for t in tokens))
        assert cache.lens[row] == int(real[row].sum())
        assert check_pages(cache, row, alone, SMALL)[0] == 1
        check_buffers(cache, row, alone, SMALL)


def test_a_row_may_append_nothing():
    cache, tokens = new_cache(SMALL, 2), stream(2, 200)
    feed(cache, tokens.columns(0, 140))
    for i in range(140, 200):  # row 1 has ended: its columns are padding
        out = feed(cache, tokens.columns(i, i + 1), torch.tensor([[True], [False]]))
        assert not bool(out[1].any())
    assert cache.lens == [200, 140]
    check_pages(cache, 0, tokens.row(0), SMALL)
    check_pages(cache, 1, Stream(*(t[:, :, :140] for t in tokens.row(1))), SMALL)
    cache.check_integrity()


# --- sharing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_len", [132, 133, 160, 300])
def test_shared_pages_then_divergence(shared_len):
    """At 160 tokens the page's keys are packed and its values are not: both heirs pack the same values."""
    cache, tokens = new_cache(SMALL, 2), stream(2, 420)
    feed(cache, tokens.columns(0, shared_len))
    cache.reorder(torch.tensor([1, 1]))
    cache.check_integrity()
    assert cache.tables[0] == cache.tables[1]
    assert cache.pool.num_used == SMALL.packed_pages(shared_len)[0]
    histories = [
        Stream(*(torch.cat([t[1:2, :, :shared_len], t[row : row + 1, :, shared_len:]], dim=2) for t in tokens))
        for row in range(2)
    ]
    out = feed_in(cache, tokens.columns(shared_len, 420), [1] * (420 - shared_len))
    for row in range(2):
        expected = feed(new_cache(SMALL), histories[row])[:, :, shared_len:]
        torch.testing.assert_close(out[row : row + 1], expected, rtol=0, atol=1e-5)
    for row in range(2):
        assert check_pages(cache, row, histories[row], SMALL) == (3, 2)
        check_buffers(cache, row, histories[row], SMALL)
    shared = SMALL.packed_pages(shared_len)[0]
    assert cache.tables[0][:shared] == cache.tables[1][:shared]
    assert not set(cache.tables[0][shared:]) & set(cache.tables[1][shared:])


@pytest.mark.parametrize("config", [SMALL, SMALL_RUNNING], ids=repr)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_reordering(config, seed):
    rng = random.Random(seed)
    cache, rows = new_cache(config, 3), 3
    first = stream(3, 120, seed)
    feed(cache, first)
    histories = [first.row(row) for row in range(3)]
    for turn in range(9):
        order = [rng.randrange(rows) for _ in range(rng.choice([2, 3, 4]))]
        cache.reorder(torch.tensor(order))
        histories, rows = [histories[row] for row in order], len(order)
        cache.check_integrity()
        new = stream(rows, 30, seed=100 * seed + turn)
        if turn % 2:
            feed(cache, new)
        else:
            feed_in(cache, new, [1] * 30)
        histories = [
            Stream(*(torch.cat(pair, dim=2) for pair in zip(old, new.row(row), strict=True)))
            for row, old in enumerate(histories)
        ]
        for row in range(rows):
            check_buffers(cache, row, histories[row], config)
    for row in range(rows):
        assert check_pages(cache, row, histories[row], config)[0] == config.packed_pages(390)[0]
    assert cache.pool.num_used <= 3 * rows


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("n", [1, 40])
def test_nan_and_infinity_name_the_layer(bad, which, n):
    tokens, cache = stream(1, n), new_cache(SMALL)
    getattr(tokens, which)[0, 1, n - 1, 3] = bad
    with pytest.raises(NumericsError, match="Layer 1 "):
        feed(cache, tokens, layer=1)


@pytest.mark.parametrize(
    ("name", "route"),
    [("kitty", "pass"), ("weighted", "pass"), ("kv4", "pass"), ("kivi-2-g128", "pass"), ("weighted", "decode")],
)
def test_bf16_beyond_fp16_saturates_with_one_warning(name, route, caplog):
    config = preset(name)
    tokens, cache = stream(1, 430, dtype=torch.bfloat16), new_cache(config)
    tokens.keys[:, 1, :, 7] = 1e5
    tokens.keys[:, 1, ::2, 9] = -1e5
    tokens.values[:, 0, 70] = 1e5
    with caplog.at_level(logging.WARNING, logger="kitty_runtime"):
        out = feed_in(cache, tokens, [430] if route == "pass" else [1] * 430)
    assert bool(out.isfinite().all())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "layer 0" in caplog.text
    layer = cache.layers[0]
    page = layer.state.layout.fields(layer.state.pages[cache.tables[0]])
    assert bool(torch.cat([p.flatten() for p in page.k_qparams]).isfinite().all())
    assert set(page.k_qparams.zero_point[:, 1, 0, 7].tolist()) == {65504.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", ["pass", "decode"])
def test_constant_zero_and_extreme_channels_stay_finite(dtype, route, caplog):
    tokens, cache = stream(1, 300, dtype=dtype), new_cache(SMALL)
    largest = 65504.0 if dtype != torch.bfloat16 else 65280.0
    for channel, value in enumerate([0.0, 1.0, largest, -largest]):
        tokens.keys[..., channel] = value
        tokens.values[..., channel] = value
        tokens.query[..., channel] = 0
    tokens.keys[:, :, ::2, 2] = -largest
    out = feed_in(cache, tokens, [300] if route == "pass" else [1] * 300)
    assert bool(out.isfinite().all())
    assert not caplog.records


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_second_pass_after_an_unquantized_prefill_is_refused_and_takes_nothing():
    config = CacheConfig(prefill="full", policy="dynamic")
    tokens, cache = stream(1, 600), new_cache(config)
    feed(cache, tokens.columns(0, 300))
    pages = cache.pool.num_used
    with pytest.raises(UnsupportedOperationError, match="prefill"):
        cache.begin_step(200)
    assert (cache.lens, cache.pool.num_used) == ([300], pages)
    cache.check_integrity()
    for i in range(300, 600):
        feed(cache, tokens.columns(i, i + 1))
    assert check_pages(cache, 0, tokens, config)[0] == 3


def test_shapes_that_do_not_fit_are_refused():
    tokens, cache = stream(1, 10), new_cache(SMALL)
    feed(cache, tokens)
    step = cache.begin_step(10)
    layer = cache.layer(0, tokens.keys)
    with pytest.raises(ShapeError, match="layer 0"):
        layer.attend(step, tokens.query, tokens.keys[:, :1], tokens.values[:, :1], SOFTMAX)
    with pytest.raises(ShapeError, match="layer 0"):
        layer.attend(step, tokens.query, tokens.keys, tokens.values[..., :16], SOFTMAX)
