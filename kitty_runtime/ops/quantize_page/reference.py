"""Quantize and dequantize whole pages in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty_runtime.quant.affine import QParams, choose_qparams, dequantize, quantize
from kitty_runtime.quant.packing import PageLayout, pack_tokens, unpack_tokens


def quantize_keys(pages: Tensor, page_ids: Tensor, keys: Tensor, boosted_channels: Tensor, layout: PageLayout) -> None:
    """See `kitty_runtime.ops.quantize_page.api.quantize_keys`."""
    if layout.dense:
        layout.dense_keys(pages)[page_ids] = keys
        return
    levels = torch.full((*keys.shape[:-2], layout.head_dim), 3, device=keys.device)
    levels.scatter_(-1, boosted_channels, 15)
    levels = levels.unsqueeze(-2)
    qparams = choose_qparams(keys, levels, dim=-2)
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


def quantize_values(pages: Tensor, page_ids: Tensor, values: Tensor, layout: PageLayout) -> None:
    """See `kitty_runtime.ops.quantize_page.api.quantize_values`."""
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
