"""Which pages are free and how often each is referenced. Host bookkeeping only: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kitty_runtime.errors import PoolError


class PagePool:
    """Owner of the free list and the reference counts; sequences own their tables of page ids."""

    def __init__(self, num_pages: int = 0) -> None:
        self._ref_counts: list[int] = []
        self._free: list[int] = []
        self.grow(num_pages)

    @property
    def num_pages(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def grow(self, num_pages: int) -> None:
        """Add free pages until the pool has `num_pages`; never shrinks."""
        new = range(self.num_pages, num_pages)
        self._ref_counts.extend(0 for _ in new)
        self._free.extend(reversed(new))

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference.

        Raises:
            PoolError: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise PoolError(f"{count} pages are needed, {self.num_free} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add a reference to each page.

        Raises:
            PoolError: a page is free or does not exist; no reference changes.
        """
        for page in pages:
            if page not in range(self.num_pages) or self._ref_counts[page] == 0:
                raise PoolError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference from each page; the last one frees it.

        Raises:
            PoolError: a page has fewer references; no reference changes.
        """
        for page, count in Counter(pages).items():
            if page not in range(self.num_pages) or self._ref_counts[page] < count:
                raise PoolError(f"page {page} is released more often than it was taken")
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify that the tables account for every reference and the free list for every other page.

        Raises:
            PoolError: names the first page that is wrong.
        """
        counted = Counter(page for table in tables for page in table)
        free = Counter(self._free)
        for page, references in enumerate(self._ref_counts):
            if counted[page] != references:
                raise PoolError(f"page {page} has {references} references, tables hold {counted[page]}")
            if free[page] != (references == 0):
                raise PoolError(f"page {page} with {references} references is {free[page]} times in the free list")
        unknown = [page for page in (*counted, *free) if not 0 <= page < self.num_pages]
        if unknown:
            raise PoolError(f"page {unknown[0]} does not exist; the pool has {self.num_pages}")
