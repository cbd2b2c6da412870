"""A pool in pieces: all free pages can be used, and making room costs no more than it must."""

from __future__ import annotations

import random

import pytest
from support.shop import whole

from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.pool import FreePages
from kvstore.server.spaces import Space
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref

SMALL = KVLayout((3 * PAGE_BYTES,), 1, 16, 64)
LARGE = KVLayout((64 * PAGE_BYTES,), 1, 16, 64)  # 256 pages a chunk
POOL_PAGES = 3000


def enter(stock: Stock, model: str, layout: KVLayout) -> Space:
    space = stock.spaces.enter(Namespace({"model": model}), layout)
    assert space is not None
    return space


@pytest.mark.parametrize("policy", ["LRU", "ADAPTIVE"])
def test_a_large_chunk_displaces_no_more_than_it_needs(policy: str) -> None:
    """It is among small chunks whose age is unrelated to their place."""
    free = FreePages(POOL_PAGES)
    stock = Stock(POOL_PAGES * PAGE_BYTES, free, policy=policy)
    small, large = enter(stock, "small", SMALL), enter(stock, "large", LARGE)
    refs = [make_ref(number, 1) for number in range(POOL_PAGES // 3)]
    for ref in refs:
        chunk = whole(stock.reserve(small, ref))
        assert chunk is not None
        stock.complete(chunk, is_whole=True)
    random.Random(1).shuffle(refs)
    for ref in refs:
        stock.touch(small, [ref])
    for number in range(3):
        before, pages = len(small.chunks), free.num_free
        chunk = whole(stock.reserve(large, make_ref(number)))
        assert chunk is not None
        assert sum(length for _, length in chunk.runs) == 256
        assert before - len(small.chunks) <= -(-(256 - pages) // 3)
        stock.complete(chunk, is_whole=True)


def test_nothing_goes_for_a_quota_that_cannot_be_kept() -> None:
    stock = Stock(POOL_PAGES * PAGE_BYTES, FreePages(100), policy="LRU", quotas={"*": 12 * PAGE_BYTES})
    space = enter(stock, "small", SMALL)
    for number in range(4):
        chunk = whole(stock.reserve(space, make_ref(number, 1)))
        assert chunk is not None
        stock.complete(chunk, is_whole=True)
    whole(stock.acquire(space, make_ref(1, 1)))
    whole(stock.acquire(space, make_ref(2, 1)))
    assert whole(stock.reserve(space, make_ref(9, 4))) is None
    assert len(space.chunks) == 4


def test_a_quota_names_a_namespace_by_its_id_or_by_the_one_that_earlier_versions_showed() -> None:
    space = enter(Stock(PAGE_BYTES, FreePages(1), policy="LRU"), "small", SMALL)
    for name in (space.namespace.id.hex(), space.id.hex()):
        stock = Stock(PAGE_BYTES, FreePages(1), policy="LRU", quotas={name: 1000, "*": 9})
        assert enter(stock, "small", SMALL).quota.limit_bytes == 1000


class CountedDict(dict[int, int]):
    """Dictionary that counts how many entries are read in a row."""

    seen = 0

    def items(self) -> object:  # type: ignore[override]
        self.seen += len(self)
        return super().items()


def test_single_pages_are_found_without_looking_at_all() -> None:
    free = FreePages(20_000)
    held = [free.take(1) for _ in range(20_000)]
    for runs in held[::2]:
        assert runs is not None
        free.give(runs)
    free._lengths = counted = CountedDict(free._lengths)
    assert free.take(10_001) is None
    runs = free.take(50)
    assert runs is not None
    assert len(runs) == 50
    free.give(runs)
    assert free.num_free == 10_000
    assert counted.seen == 0


def test_the_rest_of_a_chunk_takes_the_run_that_fits_best() -> None:
    """The long runs stay for chunks that need them."""
    free = FreePages(100)
    a, b, c, d = (free.take(size) for size in (10, 1, 40, 1))
    e, f = free.take(3), free.take(45)
    assert a is not None and c is not None and e is not None and b and d and f  # noqa: PT018 - all of the pool
    for runs in (a, c, e):
        free.give(runs)
    assert free.take(43) == ((11, 40), (52, 3))
