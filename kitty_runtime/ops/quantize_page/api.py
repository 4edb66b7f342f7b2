"""Quantize pages of keys and values into the pool: validation and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE
from kitty_runtime.errors import ShapeError
from kitty_runtime.ops.quantize_page import reference
from kitty_runtime.quant.packing import PageLayout


def quantize_keys(pages: Tensor, page_ids: Tensor, keys: Tensor, boosted_channels: Tensor, layout: PageLayout) -> None:
    """Write the keys of whole pages, per channel asymmetric min-max, boosted channels at 4 bits.

    Args:
        pages: uint8 ``[num_pages, page_bytes]``, changed in place.
        page_ids: int64 ``[n]``, distinct.
        keys: float ``[n, num_kv_heads, 128, head_dim]``, after RoPE.
        boosted_channels: int64 ``[n, num_kv_heads, num_boosted]``, ascending.
        layout: of these pages.
    Raises:
        ShapeError: the shapes do not fit the layout.
    Source: Kitty, sections 3 and 4.1.
    """
    _check(pages, page_ids, keys, layout)
    expected = (len(page_ids), layout.num_kv_heads, layout.num_boosted)
    if not layout.dense and boosted_channels.shape != expected:
        raise ShapeError(f"boosted_channels is {tuple(boosted_channels.shape)}, expected {expected}")
    reference.quantize_keys(pages, page_ids, keys, boosted_channels, layout)


def quantize_values(pages: Tensor, page_ids: Tensor, values: Tensor, layout: PageLayout) -> None:
    """Write the values of whole pages, per token asymmetric min-max over head_dim.

    Args, Raises: as `quantize_keys`; values float ``[n, num_kv_heads, 128, head_dim]``.
    Source: KIVI, section 3; Kitty, section 2.2.
    """
    _check(pages, page_ids, values, layout)
    reference.quantize_values(pages, page_ids, values, layout)


def _check(pages: Tensor, page_ids: Tensor, tokens: Tensor, layout: PageLayout) -> None:
    if pages.dtype != torch.uint8 or pages.shape[1:] != (layout.page_bytes,):
        raise ShapeError(f"pages is {pages.dtype} {tuple(pages.shape)}, expected uint8 [n, {layout.page_bytes}]")
    expected = (len(page_ids), layout.num_kv_heads, PAGE_SIZE, layout.head_dim)
    if tokens.shape != expected:
        raise ShapeError(f"page tokens are {tuple(tokens.shape)}, expected {expected}")
