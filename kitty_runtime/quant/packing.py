"""The page format: bit order, byte offsets, packing and unpacking. The only owner of all of these.

A page holds the keys and values of 128 tokens of one layer. Per KV head, one after another, each plane on a
16-byte boundary (32 bytes, the unit of a GPU's memory, for all common shapes):

    k_low    uint16 [16][head_dim]          bits 2i, 2i+1 of word j: low two bits of token 16 i + j
    v_low    uint16 [head_dim][16]          the same bit order along a value's tokens
    v_high   uint16 [head_dim][16]          4-bit values only
    k_scale, k_zero_point   fp16 [head_dim]
    v_scale, v_zero_point   fp16 [128]
    k_high   uint16 [16][num_boosted]       the high two bits of the boosted channels, the order of k_low

and after all heads, for each of them,

    boosted_channels        uint8 [num_boosted], ascending; absent when all channels are boosted (4-bit keys)

What depends on num_boosted comes last in a head: kernels know all other offsets when they are compiled. The ids, 16
bytes of most heads, stand apart so that the planes of the next head do not straddle units of memory.

At 16 bits a page is instead ``keys [128][head_dim]`` then ``values [128][head_dim]`` in the model's dtype.

Source: Kitty, section 4.1 (dense low plane, compact high plane). Differs: channel ids are one byte each, planes are
word-transposed so that a kernel loads them straight into matrix operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kitty_runtime.config import PAGE_SIZE
from kitty_runtime.errors import ConfigError
from kitty_runtime.quant.affine import QParams

LAYOUT_VERSION = 1
"""Raised when the meaning of a page's bytes changes."""

ALIGNMENT = 16
WORDS = PAGE_SIZE // 8
"""uint16 words per channel and plane: 8 two-bit codes in a word."""


class PackedPage(NamedTuple):
    """Field views of pages, ``[num_pages, num_kv_heads, ...]``; writing to them writes the page."""

    k_low: Tensor
    k_high: Tensor
    v_low: Tensor
    v_high: Tensor
    k_qparams: QParams
    v_qparams: QParams
    boosted_channels: Tensor


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets within a page of one layer.

    Attributes:
        num_kv_heads: KV heads of the layer on this device.
        head_dim: 16 to 256, a multiple of 16: channel ids are bytes, planes are whole 16-byte words.
        k_bits, v_bits: 2 or 4, or 16 for both.
        num_boosted: key channels with 4 bits; `head_dim` when k_bits is 4.
        dtype: the model's, in which 16-bit pages hold keys and values.
    Raises:
        ConfigError: a shape that the format cannot hold.
    """

    num_kv_heads: int
    head_dim: int
    k_bits: int
    v_bits: int
    num_boosted: int
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            raise ConfigError(f"head_dim is {self.head_dim}", "Pages hold head sizes from 16 to 256 in steps of 16.")
        if not 0 <= self.num_boosted <= self.head_dim:
            raise ConfigError(f"num_boosted is {self.num_boosted}", f"Use 0 to {self.head_dim} channels.")
        if self.k_bits == 4 and self.num_boosted != self.head_dim:
            raise ConfigError(
                f"k_bits 4 with num_boosted {self.num_boosted}",
                f"4-bit keys boost all {self.head_dim} channels.",
            )

    @property
    def dense(self) -> bool:
        """True for 16-bit pages."""
        return self.k_bits == 16

    @property
    def has_ids(self) -> bool:
        return not self.dense and 0 < self.num_boosted < self.head_dim

    @cached_property
    def _fields(self) -> dict[str, tuple[int, int]]:
        """Name to (offset, bytes) within one KV head, in storage order; offsets are aligned."""
        d, plane = self.head_dim, WORDS * 2
        if self.dense:
            sizes = {"keys": PAGE_SIZE * d * self.dtype.itemsize, "values": PAGE_SIZE * d * self.dtype.itemsize}
        else:
            sizes = {
                "k_low": d * plane,
                "v_low": d * plane,
                "v_high": d * plane if self.v_bits == 4 else 0,
                "k_scale": 2 * d,
                "k_zero_point": 2 * d,
                "v_scale": 2 * PAGE_SIZE,
                "v_zero_point": 2 * PAGE_SIZE,
                "k_high": self.num_boosted * plane,
            }
        fields, offset = {}, 0
        for name, size in sizes.items():
            fields[name] = (offset, size)
            offset += _aligned(size)
        return fields

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one page and KV head, padding included, without the ids of boosted channels."""
        offset, size = list(self._fields.values())[-1]
        return _aligned(offset + size)

    @property
    def ids_bytes(self) -> int:
        """Bytes of the ids of one KV head's boosted channels, padding included."""
        return _aligned(self.num_boosted) if self.has_ids else 0

    @property
    def ids_offset(self) -> int:
        """Byte offset within a page of the first head's ids."""
        return self.num_kv_heads * self.head_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page of this layer, all its KV heads."""
        return self.num_kv_heads * (self.head_bytes + self.ids_bytes)

    @property
    def dense_page_bytes(self) -> int:
        """What the same tokens take at 16 bits."""
        return self.num_kv_heads * PAGE_SIZE * self.head_dim * 2 * 2

    def offset(self, field: str) -> int:
        """Byte offset of `field` within a KV head."""
        return self._fields[field][0]

    def _view(self, pages: Tensor, field: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """`field` of uint8 pages ``[num_pages, page_bytes]`` as ``[num_pages, num_kv_heads, *shape]``, no copy."""
        offset, size = self._fields[field]
        heads = pages[:, : self.ids_offset].view(pages.shape[0], self.num_kv_heads, self.head_bytes)
        field_bytes = heads[..., offset : offset + size].view(dtype)
        return field_bytes.view(*heads.shape[:2], *shape)

    def fields(self, pages: Tensor) -> PackedPage:
        """Views of every field of quantized pages.

        Args:
            pages: uint8 ``[num_pages, page_bytes]``, contiguous.
        """
        d, half = self.head_dim, torch.float16
        empty = pages.new_empty((pages.shape[0], self.num_kv_heads, 0), dtype=torch.int16)
        k_high = self._view(pages, "k_high", torch.int16, (WORDS, self.num_boosted)) if self.num_boosted else empty
        return PackedPage(
            k_low=self._view(pages, "k_low", torch.int16, (WORDS, d)),
            k_high=k_high,
            v_low=self._view(pages, "v_low", torch.int16, (d, WORDS)),
            v_high=self._view(pages, "v_high", torch.int16, (d, WORDS)) if self.v_bits == 4 else empty,
            k_qparams=QParams(
                self._view(pages, "k_scale", half, (1, d)), self._view(pages, "k_zero_point", half, (1, d))
            ),
            v_qparams=QParams(
                self._view(pages, "v_scale", half, (PAGE_SIZE, 1)),
                self._view(pages, "v_zero_point", half, (PAGE_SIZE, 1)),
            ),
            boosted_channels=self._ids(pages) if self.has_ids else empty.to(torch.uint8),
        )

    def _ids(self, pages: Tensor) -> Tensor:
        """Ids of the boosted channels, ``[num_pages, num_kv_heads, num_boosted]``, no copy."""
        ids = pages[:, self.ids_offset :].view(pages.shape[0], self.num_kv_heads, self.ids_bytes)
        return ids[..., : self.num_boosted]

    def dense_keys(self, pages: Tensor) -> Tensor:
        """Keys of 16-bit pages as a view ``[num_pages, num_kv_heads, 128, head_dim]``."""
        return self._view(pages, "keys", self.dtype, (PAGE_SIZE, self.head_dim))

    def dense_values(self, pages: Tensor) -> Tensor:
        """Values of 16-bit pages as a view ``[num_pages, num_kv_heads, 128, head_dim]``."""
        return self._view(pages, "values", self.dtype, (PAGE_SIZE, self.head_dim))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack_tokens(codes: Tensor, dim: int) -> Tensor:
    """Two-bit codes of 128 tokens along `dim` into 16 words along `dim`.

    Args:
        codes: integers in 0..3; ``codes.shape[dim] == 128``.
    Returns:
        int16 holding the uint16 bit pattern: bits 2i, 2i+1 of word j are token 16 i + j.
    """
    dim = dim % codes.dim()
    shape = (*codes.shape[:dim], 8, WORDS, *codes.shape[dim + 1 :])
    lanes = codes.to(torch.int32).reshape(shape).unbind(dim)
    words = lanes[0].clone()
    for i, lane in enumerate(lanes[1:], start=1):
        words |= lane << 2 * i
    return words.to(torch.int16)


def unpack_tokens(words: Tensor, dim: int) -> Tensor:
    """Inverse of `pack_tokens`: int16 words, 16 along `dim`, to int16 codes in 0..3, 128 along `dim`."""
    dim = dim % words.dim()
    return torch.stack([(words >> 2 * i) & 3 for i in range(8)], dim=dim).flatten(dim, dim + 1)
