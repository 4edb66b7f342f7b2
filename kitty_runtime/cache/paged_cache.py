"""The paged cache of a batch of sequences: lengths, page tables, layers, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kitty_runtime.cache.page_pool import PagePool
from kitty_runtime.cache.paged_layer import PagedLayer
from kitty_runtime.cache.step import Step
from kitty_runtime.config import CacheConfig
from kitty_runtime.errors import PoolError, UnsupportedOperationError
from kitty_runtime.quant.boost import LayerBoost


@dataclass(frozen=True)
class CacheBytes:
    """Bytes by part: packed pages, full-precision sinks, full-precision rings, running query statistics."""

    pages: int
    sinks: int
    rings: int
    statistics: int

    @property
    def total(self) -> int:
        return self.pages + self.sinks + self.rings + self.statistics


class PagedCache:
    """Keys and values of `num_seqs` sequences on one page pool that all layers share.

    Args:
        config: settings.
        boosts: per layer of the model how it chooses boosted channels; None where the layer is not paged.
        num_seqs: sequences; each has one slot in every layer's sinks and rings.
    """

    def __init__(self, config: CacheConfig, boosts: Sequence[LayerBoost | None], num_seqs: int) -> None:
        self.config = config
        self.pool = PagePool()
        self.lens = [0] * num_seqs
        self.tables: list[list[int]] = [[] for _ in range(num_seqs)]
        self._boosts = boosts
        self._layers: dict[int, PagedLayer] = {}

    @property
    def num_seqs(self) -> int:
        return len(self.lens)

    @property
    def layers(self) -> list[PagedLayer]:
        """Layers that have stored something, in model order."""
        return [self._layers[index] for index in sorted(self._layers)]

    def begin_step(self, num_tokens: int, real: Tensor | None = None) -> Step:
        """Account for one forward pass: extends lengths and assigns the pages that it completes.

        Args:
            num_tokens: columns of the pass.
            real: bool ``[num_seqs, num_tokens]``, False at padding; None = all tokens are real.
        Raises:
            UnsupportedOperationError: a second many-token pass with ``prefill="full"``.
        """
        if real is not None and bool(real.all()):
            real = None
        past_lens = list(self.lens)
        new_lens = [num_tokens] * self.num_seqs if real is None else real.sum(1).tolist()
        if self.config.prefill == "full" and num_tokens > 1 and any(past_lens):
            raise UnsupportedOperationError(
                f"prefill='full' with {num_tokens} more tokens after {max(past_lens)}",
                "An unquantized prefill is one pass: start a new cache, or use prefill='paged'.",
            )
        wanted = [
            self.config.packed_pages(p + n)[0] - len(t)
            for p, n, t in zip(past_lens, new_lens, self.tables, strict=True)
        ]
        self._reserve(sum(wanted))
        for row, count in enumerate(wanted):
            self.tables[row] += self.pool.allocate(count)
            self.lens[row] += new_lens[row]
        tables = [list(table) for table in self.tables]
        return Step(self.config.windows, past_lens, new_lens, tables, real)

    def _reserve(self, count: int) -> None:
        """Make `count` pages free, growing the pool by at least half."""
        if count > self.pool.num_free:
            need = self.pool.num_used + count
            self.pool.grow(max(need, self.pool.num_pages * 3 // 2))

    def layer(self, index: int, keys: Tensor) -> PagedLayer:
        """Layer `index`, made on the first call for tensors like `keys`, with room for every page of the pool."""
        if index not in self._layers:
            boost = self._boosts[index]
            if boost is None:
                raise PoolError(f"layer {index} is not paged")
            self._layers[index] = PagedLayer(index, self.config, boost, keys)
        self._layers[index].ensure_pages(self.pool.num_pages)
        return self._layers[index]

    def reorder(self, rows: Tensor) -> None:
        """Sequence i becomes a copy of sequence ``rows[i]``; the number of sequences may change.

        Pages are shared by reference: a page is only written while its tokens are the same for all who share it.
        """
        order = rows.tolist()
        tables = [list(self.tables[row]) for row in order]
        for table in tables:
            self.pool.retain(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables = tables
        self.lens = [self.lens[row] for row in order]
        for layer in self.layers:
            layer.reorder(rows)

    def check_integrity(self) -> None:
        """Verify pool, tables and lengths against each other.

        Raises:
            PoolError: names what is wrong.
        """
        self.pool.check_integrity(self.tables)
        for row, (length, table) in enumerate(zip(self.lens, self.tables, strict=True)):
            expected = self.config.packed_pages(length)[0]
            if len(table) != expected:
                raise PoolError(f"sequence {row} of {length} tokens has {len(table)} pages, expected {expected}")
        for layer in self.layers:
            if layer.state.pages.shape[0] != self.pool.num_pages:
                raise PoolError(
                    f"layer {layer.index} stores {layer.state.pages.shape[0]} pages of {self.pool.num_pages}"
                )

    def allocated_bytes(self) -> CacheBytes:
        """Bytes of the live tensors."""
        return self._bytes([layer.state.pages.nbytes for layer in self.layers])

    def used_bytes(self) -> CacheBytes:
        """Bytes of the pages in use, and of all sinks, rings and statistics: a sequence owns its slot whole."""
        return self._bytes([self.pool.num_used * layer.state.layout.page_bytes for layer in self.layers])

    def _bytes(self, pages: list[int]) -> CacheBytes:
        states = [layer.state for layer in self.layers]
        stats = [s.query_sq_sum for s in states if s.query_sq_sum is not None]
        return CacheBytes(
            pages=sum(pages),
            sinks=sum(s.k_sink.nbytes + s.v_sink.nbytes for s in states),
            rings=sum(s.k_ring.nbytes + s.v_ring.nbytes for s in states),
            statistics=sum(t.nbytes for t in stats),
        )

    def dense_bytes(self) -> int:
        """Bytes of the same tokens at 16 bits."""
        per_token = sum(s.layout.num_kv_heads * s.layout.head_dim * 2 * 2 for s in (x.state for x in self.layers))
        return per_token * sum(self.lens)
