"""The page pool under a random schedule, and its errors."""

from __future__ import annotations

import random

import pytest

from kitty_runtime.cache.page_pool import PagePool
from kitty_runtime.errors import PoolError


@pytest.mark.parametrize("seed", range(4))
def test_random_schedule(seed):
    rng = random.Random(seed)
    pool, tables = PagePool(3), [[] for _ in range(5)]
    shared = 0
    for _ in range(600):
        row, other = rng.sample(range(5), 2)
        action = rng.choice(["append", "append", "append", "fork", "free", "grow"])
        if action == "append":
            count = rng.randrange(4)
            if count > pool.num_free:
                before = (pool.num_pages, pool.num_free)
                with pytest.raises(PoolError):
                    pool.allocate(count)
                assert (pool.num_pages, pool.num_free) == before
            else:
                taken = pool.allocate(count)
                assert len(set(taken)) == count
                assert not set(taken) & {page for table in tables for page in table}
                tables[row] += taken
        elif action == "fork":
            pool.retain(tables[other])
            pool.release(tables[row])
            tables[row] = list(tables[other])
        elif action == "free":
            pool.release(tables[row])
            tables[row] = []
        elif pool.num_pages < 40:
            pool.grow(pool.num_pages + rng.randrange(3))
        pool.check_integrity(tables)
        held = {page for table in tables for page in table}
        assert pool.num_used == len(held)
        assert pool.num_used + pool.num_free == pool.num_pages
        shared += sum(map(len, tables)) > len(held)
    assert shared > 20  # the schedule did share pages
    for table in tables:
        pool.release(table)
    assert pool.num_free == pool.num_pages


def test_errors_take_nothing():
    pool = PagePool(4)
    pages = pool.allocate(3)
    with pytest.raises(PoolError, match="2 pages are needed, 1 of 4"):
        pool.allocate(2)
    free = next(page for page in range(4) if page not in pages)
    with pytest.raises(PoolError, match="free"):
        pool.retain([free])
    with pytest.raises(PoolError, match="released more often"):
        pool.release([free])
    pool.check_integrity([pages])


@pytest.mark.parametrize("action", ["retain", "release"])
def test_a_bad_page_in_the_middle_changes_no_count(action):
    pool = PagePool(4)
    pages = pool.allocate(3)
    free = next(page for page in range(4) if page not in pages)
    with pytest.raises(PoolError):
        getattr(pool, action)([pages[0], free, pages[1]])
    pool.check_integrity([pages])


def test_growing_keeps_and_never_shrinks():
    pool = PagePool()
    assert pool.num_pages == 0
    with pytest.raises(PoolError):
        pool.allocate(1)
    pool.grow(2)
    pages = pool.allocate(2)
    pool.grow(1)
    assert pool.num_pages == 2
    pool.grow(5)
    assert sorted(pages + pool.allocate(3)) == list(range(5))


def test_integrity_names_what_is_wrong():
    pool = PagePool(3)
    pages = pool.allocate(2)
    with pytest.raises(PoolError, match="references"):
        pool.check_integrity([pages, pages])
    with pytest.raises(PoolError, match="references"):
        pool.check_integrity([pages[:1]])
    with pytest.raises(PoolError, match="does not exist"):
        pool.check_integrity([[*pages, 7]])
    with pytest.raises(PoolError, match="-1 does not exist"):
        pool.check_integrity([[*pages, -1]])


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_that_does_not_exist_is_refused(page):
    pool = PagePool(4)
    pool.allocate(4)
    with pytest.raises(PoolError):
        pool.retain([page])
    with pytest.raises(PoolError):
        pool.release([page])
    pool.check_integrity([range(4)])
