"""The page format a second time, in numpy and plain loops, from the text of its specification.

Nothing here comes from kitty_runtime: tests compare bytes and numbers against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

TOKENS = 128


@dataclass(frozen=True)
class Spec:
    """One KV head of a page; `num_boosted` counts channels with 4 bits, all of them for 4-bit keys."""

    head_dim: int
    k_bits: int
    v_bits: int
    num_boosted: int
    dense_itemsize: int = 2

    @property
    def sizes(self) -> list[tuple[str, int]]:
        d = self.head_dim
        if self.k_bits == 16:
            return [("keys", 128 * d * self.dense_itemsize), ("values", 128 * d * self.dense_itemsize)]
        return [
            ("k_low", d * 128 * 2 // 8),
            ("v_low", d * 128 * 2 // 8),
            ("v_high", d * 128 * 2 // 8 if self.v_bits == 4 else 0),
            ("k_scale", d * 2),
            ("k_zero_point", d * 2),
            ("v_scale", 128 * 2),
            ("v_zero_point", 128 * 2),
            ("k_high", self.num_boosted * 128 * 2 // 8),
            ("boosted_channels", self.num_boosted if 0 < self.num_boosted < d else 0),
        ]

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Name to (first byte, end)."""
        spans, at = {}, 0
        for name, size in self.sizes:
            spans[name] = (at, at + size)
            at += size
            while at % 16:
                at += 1
        return spans

    @property
    def head_bytes(self) -> int:
        """Planes and ids of one head; in a page the ids of all heads follow the planes of all heads."""
        return sum((size + 15) // 16 * 16 for _, size in self.sizes)

    @property
    def ids_bytes(self) -> int:
        return (dict(self.sizes).get("boosted_channels", 0) + 15) // 16 * 16

    def head_in_page(self, page: np.ndarray, head: int, num_heads: int) -> np.ndarray:
        """One head's bytes, its planes and then its ids."""
        return page[self._places(head, num_heads)]

    def put_head(self, page: np.ndarray, head: int, num_heads: int, data: bytes) -> None:
        page[self._places(head, num_heads)] = np.frombuffer(data, np.uint8)

    def _places(self, head: int, num_heads: int) -> np.ndarray:
        planes = self.head_bytes - self.ids_bytes
        ids = num_heads * planes + head * self.ids_bytes
        return np.r_[head * planes : (head + 1) * planes, ids : ids + self.ids_bytes]


def affine(x: np.ndarray, levels: int, clips: tuple[float, ...] = ()) -> tuple[np.float16, np.float16, list[int]]:
    """Scale, zero point and codes of one group; of clipped ranges too, the one with the least error."""
    x = np.clip(x.astype(np.float32), np.float32(-65504), np.float32(65504))
    low, spread = x.min(), x.max() - x.min()
    tried = [_affine(x, low + spread * np.float32(c), x.max() - spread * np.float32(c), levels) for c in (0, *clips)]
    return min(tried, key=lambda found: _error(x, found, spread))  # of equals the first


def _error(x: np.ndarray, found: tuple[np.float16, np.float16, list[int]], spread: np.float32) -> int:
    scale, zero_point, codes = found
    back = np.array(codes, np.float32) * np.float32(scale) + np.float32(zero_point)
    off = (x - back) * (np.float32(1) / max(spread, np.float32(1e-6)))
    return int(sum(int(e) for e in np.minimum(off * off, np.float32(1)) * np.float32(2**23)))


def _affine(x: np.ndarray, low: np.float32, high: np.float32, levels: int) -> tuple[np.float16, np.float16, list[int]]:
    scale = np.float16(max((high - low) / np.float32(levels), np.float32(1e-6)))
    zero_point = np.float16(low)
    if float(zero_point) + levels * float(scale) >= 65520:  # would come back as infinity in fp16
        scale = np.nextafter(scale, np.float16(0))
    codes = np.rint((x - np.float32(zero_point)) * (np.float32(1) / np.float32(scale)))
    return scale, zero_point, np.clip(codes, 0, levels).astype(int).tolist()


def words_of(two_bit_codes: list[int]) -> list[int]:
    """128 codes to 16 words: bits 2i and 2i+1 of word j are token 16 i + j."""
    words = [0] * 16
    for token, code in enumerate(two_bit_codes):
        i, j = divmod(token, 16)
        words[j] |= code << (2 * i)
    return words


def hadamard(x: np.ndarray) -> np.ndarray:
    """``[..., head_dim]`` times the Hadamard matrix, in blocks of the largest power of two; by sums and differences."""
    block, size = 1, x.shape[-1]
    while size % (2 * block) == 0:
        block *= 2
    out, half = x.astype(np.float32), 1
    while half < block:
        pairs = out.reshape(*x.shape[:-1], -1, 2, half)
        out = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        half *= 2
    return out * np.float32(block**-0.5)


def encode_keys(spec: Spec, keys: np.ndarray, boosted: list[int], clips: tuple[float, ...] = ()) -> dict[str, bytes]:
    """Fields of one head's keys ``[128, head_dim]``."""
    scales, zero_points, low, high = [], [], [], []
    for channel in range(spec.head_dim):
        scale, zero_point, codes = affine(keys[:, channel], 15 if channel in boosted else 3, clips)
        scales.append(scale)
        zero_points.append(zero_point)
        low.append(words_of([code % 4 for code in codes]))
        if channel in boosted:
            high.append(words_of([code // 4 for code in codes]))
    fields = {
        "k_low": np.array(low, np.uint16).T.tobytes(),
        "k_scale": np.array(scales, np.float16).tobytes(),
        "k_zero_point": np.array(zero_points, np.float16).tobytes(),
    }
    if boosted:
        fields["k_high"] = np.array(high, np.uint16).T.tobytes()
        if len(boosted) < spec.head_dim:
            fields["boosted_channels"] = bytes(boosted)
    return fields


def encode_values(spec: Spec, values: np.ndarray) -> dict[str, bytes]:
    """Fields of one head's values ``[128, head_dim]``."""
    scales, zero_points, rows = [], [], []
    for token in range(TOKENS):
        scale, zero_point, codes = affine(values[token], 2**spec.v_bits - 1)
        scales.append(scale)
        zero_points.append(zero_point)
        rows.append(codes)
    columns = np.array(rows).T.tolist()
    fields = {
        "v_low": np.array([words_of([code % 4 for code in column]) for column in columns], np.uint16).tobytes(),
        "v_scale": np.array(scales, np.float16).tobytes(),
        "v_zero_point": np.array(zero_points, np.float16).tobytes(),
    }
    if spec.v_bits == 4:
        fields["v_high"] = np.array(
            [words_of([code // 4 for code in column]) for column in columns], np.uint16
        ).tobytes()
    return fields


def _two_bit(words: np.ndarray) -> np.ndarray:
    """uint16 ``[n, 16]`` to codes ``[n, 128]``."""
    codes = np.zeros((words.shape[0], TOKENS), np.int64)
    for token in range(TOKENS):
        i, j = divmod(token, 16)
        codes[:, token] = (words[:, j].astype(np.int64) >> (2 * i)) & 3
    return codes


@lru_cache
def decode_keys(spec: Spec, head: bytes) -> np.ndarray:
    """Keys of one head's bytes, float64 ``[128, head_dim]`` (16 bits: in float64 pages)."""

    def field(name: str, dtype: type) -> np.ndarray:
        return np.frombuffer(head[slice(*spec.spans[name])], dtype)

    if spec.k_bits == 16:
        return field("keys", np.float64).reshape(TOKENS, spec.head_dim).copy()
    codes = _two_bit(field("k_low", np.uint16).reshape(16, spec.head_dim).T)
    if spec.num_boosted:
        high = _two_bit(field("k_high", np.uint16).reshape(16, spec.num_boosted).T)
        every = spec.num_boosted == spec.head_dim
        for row, channel in enumerate(range(spec.head_dim) if every else field("boosted_channels", np.uint8)):
            codes[channel] += 4 * high[row]
    scale, zero_point = (field(f"k_{name}", np.float16).astype(np.float64) for name in ("scale", "zero_point"))
    return (codes * scale[:, None] + zero_point[:, None]).T


@lru_cache
def decode_values(spec: Spec, head: bytes) -> np.ndarray:
    """Values of one head's bytes, float64 ``[128, head_dim]``."""

    def field(name: str, dtype: type) -> np.ndarray:
        return np.frombuffer(head[slice(*spec.spans[name])], dtype)

    if spec.k_bits == 16:
        return field("values", np.float64).reshape(TOKENS, spec.head_dim).copy()
    codes = _two_bit(field("v_low", np.uint16).reshape(spec.head_dim, 16))
    if spec.v_bits == 4:
        codes += 4 * _two_bit(field("v_high", np.uint16).reshape(spec.head_dim, 16))
    scale, zero_point = (field(f"v_{name}", np.float16).astype(np.float64) for name in ("scale", "zero_point"))
    return codes.T * scale[:, None] + zero_point[:, None]


def random_head(spec: Spec, rng: np.random.Generator) -> bytearray:
    """Valid bytes of one head: random codes, sane scales, ascending distinct channels; 16 bits: float64 pages."""
    head = bytearray(rng.bytes(spec.head_bytes))

    def put(name: str, array: np.ndarray) -> None:
        first, end = spec.spans[name]
        head[first:end] = array.tobytes()

    if spec.k_bits == 16:
        put("keys", rng.standard_normal((TOKENS, spec.head_dim)))
        put("values", rng.standard_normal((TOKENS, spec.head_dim)))
        return head
    for part, count in (("k", spec.head_dim), ("v", TOKENS)):
        put(f"{part}_scale", rng.uniform(0.05, 0.4, count).astype(np.float16))
        put(f"{part}_zero_point", rng.uniform(-2, 0.5, count).astype(np.float16))
    if 0 < spec.num_boosted < spec.head_dim:
        channels = np.sort(rng.choice(spec.head_dim, spec.num_boosted, replace=False))
        put("boosted_channels", channels.astype(np.uint8))
    return head
