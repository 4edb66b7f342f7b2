"""Quantize and dequantize whole pages in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE
from kitty_runtime.ops.operands import Batch, LayerState
from kitty_runtime.quant.affine import QParams, choose_qparams, dequantize, quantize
from kitty_runtime.quant.boost import LayerBoost
from kitty_runtime.quant.packing import PageLayout, pack_tokens, unpack_tokens


def quantize_pages(
    state: LayerState,
    batch: Batch,
    keys: Tensor | None,
    values: Tensor | None,
    boost: LayerBoost,
    energy: Tensor | None,
    clip_search: bool = False,
) -> None:
    """See `kitty_runtime.ops.quantize_page.api.quantize_pages`."""
    if energy is None and state.query_sq_sum is not None:
        energy = (state.query_sq_sum[batch.slots] / batch.seq_lens[:, None, None]).sqrt()[:, None]
    spans = zip(batch.slots.tolist(), batch.past_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    for row, (slot, past_len, seq_len) in enumerate(spans):
        k_before, v_before = state.windows.packed_pages(past_len)
        k_after, v_after = state.windows.packed_pages(seq_len)
        page_ids = batch.page_table[row].long()
        if k_after > k_before:
            new = None if keys is None else keys[row]
            tokens = _page_tokens(state.k_ring[slot], new, k_before, k_after, past_len, state.windows.sink_len)
            channels = boost.choose(tokens, None if energy is None else energy[row, : k_after - k_before])
            _quantize_keys(state.pages, page_ids[k_before:k_after], tokens, channels, state.layout, clip_search)
        if v_after > v_before:
            new = None if values is None else values[row]
            tokens = _page_tokens(state.v_ring[slot], new, v_before, v_after, past_len, state.windows.sink_len)
            _quantize_values(state.pages, page_ids[v_before:v_after], tokens, state.layout)


def _page_tokens(ring: Tensor, new: Tensor | None, first: int, stop: int, past_len: int, sink_len: int) -> Tensor:
    """Tokens of pages first..stop-1 of one sequence, ``[stop - first, num_kv_heads, 128, head_dim]``.

    Args:
        ring: ``[num_kv_heads, ring_len, head_dim]``.
        new: ``[num_kv_heads, n, head_dim]`` at positions past_len and on; None if the ring holds all.
    """
    offsets = torch.arange(first * PAGE_SIZE, stop * PAGE_SIZE, device=ring.device)
    stored = len(offsets) if new is None else max(0, min(len(offsets), past_len - sink_len - first * PAGE_SIZE))
    tokens: Tensor = ring[:, offsets[:stored] % ring.shape[1]]
    if new is not None:
        rest = offsets[stored:] + sink_len - past_len
        tokens = torch.cat([tokens, new[:, rest]], dim=1)
    return tokens.reshape(ring.shape[0], stop - first, PAGE_SIZE, ring.shape[2]).transpose(0, 1)


def _quantize_keys(
    pages: Tensor, page_ids: Tensor, keys: Tensor, boosted_channels: Tensor, layout: PageLayout, clip_search: bool
) -> None:
    """Keys ``[n, num_kv_heads, 128, head_dim]`` and their boosted channels to pages `page_ids`."""
    if layout.dense:
        layout.dense_keys(pages)[page_ids] = keys
        return
    levels = torch.full((*keys.shape[:-2], layout.head_dim), 3, device=keys.device)
    levels.scatter_(-1, boosted_channels, 15)
    levels = levels.unsqueeze(-2)
    qparams = choose_qparams(keys, levels, dim=-2, clip_search=clip_search)
    codes = quantize(keys, qparams, levels)
    field = layout.fields(pages)
    field.k_low[page_ids] = pack_tokens(codes & 3, dim=-2)
    field.k_qparams.scale[page_ids] = qparams.scale
    field.k_qparams.zero_point[page_ids] = qparams.zero_point
    if layout.num_boosted:
        index = boosted_channels.unsqueeze(-2).expand(*codes.shape[:-1], -1)
        field.k_high[page_ids] = pack_tokens(codes.gather(-1, index) >> 2, dim=-2)
    if layout.has_ids:
        field.boosted_channels[page_ids] = boosted_channels.to(torch.uint8)


def _quantize_values(pages: Tensor, page_ids: Tensor, values: Tensor, layout: PageLayout) -> None:
    """Values ``[n, num_kv_heads, 128, head_dim]`` to pages `page_ids`."""
    if layout.dense:
        layout.dense_values(pages)[page_ids] = values
        return
    levels = 2**layout.v_bits - 1
    qparams = choose_qparams(values, levels, dim=-1)
    codes = quantize(values, qparams, levels).transpose(-1, -2)
    field = layout.fields(pages)
    field.v_low[page_ids] = pack_tokens(codes & 3, dim=-1)
    field.v_qparams.scale[page_ids] = qparams.scale
    field.v_qparams.zero_point[page_ids] = qparams.zero_point
    if layout.v_bits == 4:
        field.v_high[page_ids] = pack_tokens(codes >> 2, dim=-1)


def dequantize_keys(pages: Tensor, layout: PageLayout, dtype: torch.dtype) -> Tensor:
    """Keys of `pages` (uint8 ``[num_pages, page_bytes]``): ``[num_pages, num_kv_heads, 128, head_dim]``."""
    if layout.dense:
        return layout.dense_keys(pages).to(dtype)
    field = layout.fields(pages)
    codes = unpack_tokens(field.k_low, dim=-2)
    if layout.num_boosted:
        high = unpack_tokens(field.k_high, dim=-2) << 2
        if layout.has_ids:
            # A page that is not written yet may hold any bytes; its keys are masked, but its ids must index something.
            index = field.boosted_channels.long().clamp_max(layout.head_dim - 1).unsqueeze(-2).expand_as(high)
            codes.scatter_add_(-1, index, high)
        else:
            codes += high
    return dequantize(codes, field.k_qparams, dtype)


def dequantize_values(pages: Tensor, valid: Tensor, layout: PageLayout, dtype: torch.dtype) -> Tensor:
    """Values of `pages`, zero where not valid, whatever bytes lie there.

    Args:
        pages: uint8 ``[num_pages, page_bytes]``.
        valid: bool ``[num_pages]``, whether the page's values have been packed.
    Returns:
        ``[num_pages, num_kv_heads, 128, head_dim]``.
    """
    invalid = ~valid[:, None, None, None]
    if layout.dense:
        return layout.dense_values(pages).masked_fill(invalid, 0).to(dtype)
    field = layout.fields(pages)
    codes = unpack_tokens(field.v_low, dim=-1)
    if layout.v_bits == 4:
        codes += unpack_tokens(field.v_high, dim=-1) << 2
    qparams = QParams(*(p.masked_fill(invalid, 0).transpose(-1, -2) for p in field.v_qparams))
    return dequantize(codes, qparams, dtype).transpose(-1, -2)
