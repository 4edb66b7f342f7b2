"""A layer full of random tokens, at the lengths asked: sinks, full rings, scattered pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kitty_runtime.config import Windows
from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.quant.packing import PageLayout


def random_layer(layout: PageLayout, windows: Windows, lens: Sequence[int]) -> tuple[LayerState, Batch]:
    """Every slot and page random, pages in random order, page tables to match."""
    device = torch.device("cuda")
    state = LayerState.allocate(layout, windows, len(lens), layout.dtype, device)
    for tensor in (state.k_sink, state.v_sink, state.k_ring, state.v_ring):
        tensor.normal_()
    counts = [windows.packed_pages(length - 1)[0] for length in lens]
    num_pages = max(1, sum(counts))
    if layout.dense:
        state.pages = torch.randn(num_pages, layout.page_bytes // 2, device=device, dtype=layout.dtype).view(
            torch.uint8
        )
    else:
        state.pages = torch.randint(0, 256, (num_pages, layout.page_bytes), device=device, dtype=torch.uint8)
        field = layout.fields(state.pages)
        for qparams in (field.k_qparams, field.v_qparams):
            qparams.scale.uniform_(0.6, 1.1)
            qparams.zero_point.normal_(-1.5, 0.2)
        if layout.has_ids:
            ranks = torch.rand((*field.boosted_channels.shape[:2], layout.head_dim), device=device)
            ids = ranks.topk(layout.num_boosted).indices.sort(-1).values
            field.boosted_channels.copy_(ids.to(torch.uint8))
    order = torch.randperm(num_pages).tolist()
    table = torch.full((len(lens), max([*counts, 1])), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    slots = torch.arange(len(lens), device=device)
    return state, Batch(slots, table.to(device), seq_lens - 1, seq_lens, max_new_pages=1)
