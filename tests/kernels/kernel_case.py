"""Layers for the kernel tests, and where they run: the GPU if there is one, else the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

import pytest
import torch
from attention_case import POISON, batch_of, make_case
from page_format import Spec
from torch import Tensor

from kitty_runtime.config import Windows
from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

F16, BF16 = torch.float16, torch.bfloat16

KITTY = Windows(6, 0, 128)
RECENT = Windows(5, 9, 9)
NO_SINK = Windows(0, 0, 128)

HEAD_DIMS = [32, 64, 80, 96, 128, 256]
GROUPS = [1, 2, 3, 4, 5, 7, 8, 16]

UNPACKED = ("k_sink", "v_sink", "k_ring", "v_ring")


def label(value: object) -> str | None:
    """Short ids of parametrized tests."""
    match value:
        case Spec() | PageLayout():
            return f"d{value.head_dim}k{value.k_bits}v{value.v_bits}b{value.num_boosted}"
        case Windows():
            return f"w{value.sink_len}-{value.k_recent_len}-{value.v_recent_len}"
        case torch.dtype():
            return str(value).removeprefix("torch.")
    return None


Operand = TypeVar("Operand", LayerState, Batch, LayerBoost)


def with_tensors(operand: Operand, change: Callable[[Tensor], Tensor], names: tuple[str, ...] | None = None) -> Operand:
    """A copy whose tensors, or those called `names`, are changed."""
    found = {f.name: getattr(operand, f.name) for f in fields(operand) if names is None or f.name in names}
    return replace(operand, **{name: change(x) for name, x in found.items() if isinstance(x, Tensor)})


def copy_to(device: torch.device | str, operand: Operand) -> Operand:
    return with_tensors(operand, lambda x: x.to(device, copy=True))


def same(a: LayerState, b: LayerState) -> list[str]:
    """Tensors of two states that differ in a byte, by name; [] if none do."""

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    pairs = {name: (getattr(a, name), getattr(b, name)) for name in ("pages", *UNPACKED)}
    return [name for name, (x, y) in pairs.items() if not torch.equal(bits(x), bits(y.to(x.device)))]


def poisoned_case(
    spec: Spec, windows: Windows, lens: list[int], dtype: torch.dtype, seed: int, new: list[int] | None = None
) -> tuple[LayerState, Batch]:
    """See `attention_case.make_case`, in a 16-bit dtype and on the CPU; a row of the page table has a wide stride.

    Without `new` the last token of each sequence was just stored; with it that many are on top of `lens`, not stored.
    """
    total = lens if new is None else [a + b for a, b in zip(lens, new, strict=True)]
    spec = replace(spec, dense_itemsize=8)
    case = make_case(spec, windows, lens, [n - 1 for n in lens] if new is None else total, seed)
    pages = case.state.pages
    if spec.k_bits == 16:
        pages = pages.view(torch.float64).to(dtype).view(torch.uint8)
    layout = replace(case.state.layout, dtype=dtype)
    state = with_tensors(replace(case.state, layout=layout, pages=pages), lambda x: x.to(dtype), UNPACKED)
    table = torch.full((len(lens), case.page_table.shape[1] + 3), -1, dtype=torch.int32)
    table[:, :-3] = case.page_table
    batch = batch_of(table[:, :-3], total)
    return state, batch if new is None else replace(batch, past_lens=torch.tensor(lens, dtype=torch.int32))


def spread(state: LayerState, batch: Batch, slots: Tensor, first_page: int) -> tuple[LayerState, Batch]:
    """The sequences moved to other `slots` and their pages up by `first_page`; poison lies where they were."""

    def moved(x: Tensor) -> Tensor:
        out = x.new_full((int(slots.max()) + 1, *x.shape[1:]), POISON)
        out[slots.to(x.device)] = x[batch.slots.to(x.device)]
        return out

    state = with_tensors(state, moved, UNPACKED)
    pages = state.pages.new_full((first_page + state.pages.shape[0], state.pages.shape[1]), 0xFF)
    pages[first_page:] = state.pages
    table = torch.where(batch.page_table >= 0, batch.page_table + first_page, -1)
    return replace(state, pages=pages), replace(batch, slots=slots.to(batch.slots.device), page_table=table)


def random_state(
    layout: PageLayout,
    windows: Windows,
    num_slots: int,
    num_pages: int,
    seed: int,
    device: torch.device | str = "cpu",
    running_energy: bool = False,
) -> LayerState:
    """Every slot and every page holds random tokens; sums of the running energy are those of very many."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    state = LayerState.allocate(layout, windows, num_slots, layout.dtype, device, running_energy)
    for name in UNPACKED:
        getattr(state, name).normal_(generator=generator)
    if state.query_sq_sum is not None:
        state.query_sq_sum.uniform_(1, 1000, generator=generator)
    shape = (num_pages, layout.page_bytes)
    pages = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    if layout.dense:
        layout.dense_keys(pages).normal_(generator=generator)
        layout.dense_values(pages).normal_(generator=generator)
    else:
        field = layout.fields(pages)
        for qparams in (field.k_qparams, field.v_qparams):
            qparams.scale.uniform_(0.05, 0.4, generator=generator)
            qparams.zero_point.uniform_(-2, 0.5, generator=generator)
        if layout.has_ids:
            ranks = torch.rand((*field.boosted_channels.shape[:2], layout.head_dim), device=device, generator=generator)
            ids = ranks.argsort(-1)[..., : layout.num_boosted].sort(-1).values
            field.boosted_channels.copy_(ids)
    return replace(state, pages=pages)


def random_batch(windows: Windows, past: list[int], new: list[int], num_slots: int, num_pages: int, seed: int) -> Batch:
    """Sequences in random slots with random pages; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    total = [p + n for p, n in zip(past, new, strict=True)]
    before, after = ([windows.packed_pages(n) for n in lens] for lens in (past, total))
    table = torch.full((len(past), max(k for k, _ in after) + 1), -1, dtype=torch.int32)
    ids = torch.randperm(num_pages, generator=generator).int()
    for row, (k_pages, _) in enumerate(after):
        table[row, :k_pages], ids = ids[:k_pages], ids[k_pages:]
    return Batch(
        slots=torch.randperm(num_slots, generator=generator)[: len(past)],
        page_table=table,
        past_lens=torch.tensor(past, dtype=torch.int32),
        seq_lens=torch.tensor(total, dtype=torch.int32),
        max_new_pages=max(b - a for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True)),
    )


def random_tokens(layout: PageLayout, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
    """A pass's keys and values, on the CPU: keys as projections leave them, heads innermost but one; NaN as padding."""
    generator = torch.Generator().manual_seed(seed)
    new_lens = (batch.seq_lens - batch.past_lens).tolist()
    longest = max(1, *new_lens)
    keys = torch.randn(len(new_lens), longest, layout.num_kv_heads, layout.head_dim, generator=generator)
    keys = keys.to(layout.dtype).transpose(1, 2)
    values = torch.randn(keys.shape, generator=generator).to(layout.dtype)
    for row, n in enumerate(new_lens):
        keys[row, :, n:] = POISON
        values[row, :, n:] = POISON
    return keys, values


def without_stale_slots(state: LayerState, batch: Batch, stored: Tensor) -> LayerState:
    """Poison in slots of other sequences and where no token lies when each sequence has `stored` ones."""
    state = with_tensors(state, torch.clone)
    for name in ("k_sink", "v_sink"):
        getattr(state, name).fill_(POISON)  # pages begin past the sink
    for ring in (state.k_ring, state.v_ring):
        kept = torch.full_like(ring, POISON)
        for slot, length in zip(batch.slots.tolist(), stored.tolist(), strict=True):
            n = max(0, length - state.windows.sink_len)
            kept[slot, :, :n] = ring[slot, :, :n]
        ring.copy_(kept)
    return state


def needs_gpu_memory(gib: int) -> None:
    """Skip on a card without that much free memory."""
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")
