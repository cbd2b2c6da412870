"""Quotas bound the sum of all namespaces of one name, and a tenant's name is that of its key."""

from __future__ import annotations

import pytest
from support.shop import CHUNK_BYTES, LAYOUT, ONE, THREE, TWO, whole

from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import Namespace
from kvstore.server.pool import FreePages
from kvstore.server.registry import MAX_FAR_SPACES, MAX_SPACES, MAX_TENANT_SPACES
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref

QUOTAS = {"model": 2 * CHUNK_BYTES, "team": 2 * CHUNK_BYTES, "*": CHUNK_BYTES}


@pytest.fixture
def stock() -> Stock:
    return Stock(64 * CHUNK_BYTES, FreePages(128), policy="LRU", quotas=QUOTAS)


def enter(stock: Stock, tenant: str = "", **fields: str) -> Space:
    space = stock.spaces.enter(Namespace({"model": "model", **fields}), LAYOUT, tenant)
    assert space is not None
    return space


def store(stock: Stock, space: Space, ref: ChunkRef) -> None:
    chunk = whole(stock.reserve(space, ref))
    assert chunk is not None
    stock.complete(chunk, is_whole=True)


def held(*spaces: Space) -> list[list[ChunkRef]]:
    return [list(space.chunks) for space in spaces]


def test_all_shards_of_a_model_have_one(stock: Stock) -> None:
    shards = [enter(stock, shard=f"{number}/4") for number in range(4)]
    for ref in (ONE, TWO):
        for shard in shards:
            store(stock, shard, ref)
    assert held(*shards) == [[], [], [TWO], [TWO]], "the least recently used went, whosever they were"
    assert sum(shard.used_bytes for shard in shards) == shards[0].quota.used_bytes == 2 * CHUNK_BYTES


def test_a_change_takes_as_many_steps_as_there_are_chunks_and_namespaces() -> None:
    """Or a tenant with many namespaces would hold up the stores of all others, which are refused meanwhile."""
    stock = Stock(512 * CHUNK_BYTES, FreePages(1024), policy="LRU", quotas={"*": 512 * CHUNK_BYTES})
    refs, large = [make_ref(number) for number in range(100)], enter(stock, "large")
    for ref in refs:
        store(stock, large, ref)
    for number in range(50):
        store(stock, enter(stock, "small", shard=str(number)), ONE)
    steps = sum(1 for _ in stock.change_quotas({"*": 256 * CHUNK_BYTES}))
    assert 150 <= steps <= 4 * (150 + 51)


def test_what_was_read_stays_longer(stock: Stock) -> None:
    one, two = enter(stock, shard="0"), enter(stock, shard="1")
    store(stock, one, ONE)
    store(stock, two, ONE)
    chunk = whole(stock.acquire(one, ONE))
    assert not isinstance(chunk, str)
    stock.release(next(iter(one.chunks.values())))
    store(stock, two, TWO)
    assert held(one, two) == [[ONE], [TWO]]


def test_a_tenant_has_its_own_whatever_it_calls_its_models(stock: Stock) -> None:
    spaces = [enter(stock, "team", model=name) for name in ("model", "other", "*")]
    for number, space in enumerate(spaces):
        store(stock, space, make_ref(number, 4))
    assert [len(refs) for refs in held(*spaces)] == [0, 1, 1]
    ours = enter(stock)
    store(stock, ours, ONE)
    store(stock, ours, TWO)
    assert [len(refs) for refs in held(*spaces)] == [0, 1, 1], "one tenant's chunks never go for those of another"


def test_those_not_named_share_one_and_each_tenant_not_named_has_one(stock: Stock) -> None:
    spaces = [enter(stock, model="made up 1"), enter(stock, model="made up 2"), enter(stock, "a"), enter(stock, "b")]
    for space in spaces:
        store(stock, space, ONE)
    assert held(*spaces) == [[], [ONE], [ONE], [ONE]]


def test_a_tenant_cannot_take_all_namespaces() -> None:
    stock = Stock(64 * CHUNK_BYTES, FreePages(128), policy="LRU")
    for number in range(MAX_TENANT_SPACES):
        enter(stock, "a", model=str(number)).num_sessions = 1
    assert stock.spaces.enter(Namespace({"model": "more"}), LAYOUT, "a") is None
    assert stock.spaces.enter(Namespace({"model": "more"}), LAYOUT, "b", MAX_FAR_SPACES) is not None
    for number in range(MAX_SPACES):
        space = stock.spaces.enter(Namespace({"model": f"any {number}"}), LAYOUT, "", MAX_FAR_SPACES)
        if space is not None:
            space.num_sessions = 1
    assert len(stock.spaces) == MAX_FAR_SPACES
    assert stock.spaces.enter(Namespace({"model": "ours"}), LAYOUT) is not None, "there is room left for this host"


def test_other_limits(stock: Stock) -> None:
    """Each namespace counts against the quota of its name, and what exceeds one goes, the oldest first."""
    one, other, team = enter(stock), enter(stock, model="other"), enter(stock, "team")
    for space in (one, other, team):
        store(stock, space, ONE)
        store(stock, space, TWO)
    assert held(one, other, team) == [[ONE, TWO], [TWO], [ONE, TWO]]
    list(stock.change_quotas({"team": CHUNK_BYTES, "other": 3 * CHUNK_BYTES}))
    assert held(one, other, team) == [[ONE, TWO], [TWO], [TWO]]
    assert {(quota.tenant, quota.name) for quota in stock.spaces.quotas} == {("", ""), ("", "other"), ("team", "team")}
    for ref in (ONE, THREE):
        store(stock, other, ref)
        store(stock, one, ref)
    list(stock.change_quotas({"*": 2 * CHUNK_BYTES}))
    assert held(one, other, team) == [[THREE], [THREE], [TWO]], "those without an order are mixed evenly"
    assert {(quota.tenant, quota.name) for quota in stock.spaces.quotas} == {("", "*"), ("team", "*")}
    for quota in stock.spaces.quotas:
        assert quota.used_bytes == sum(space.used_bytes for space in (one, other, team) if space.quota is quota)


def test_stores_while_quotas_change() -> None:
    """A quota gives no room by evictions before it knows its chunks, of which it may count others' as well."""
    stock = Stock(64 * CHUNK_BYTES, FreePages(128), policy="LRU", quotas={"*": 4 * CHUNK_BYTES})
    one, two = enter(stock, model="one"), enter(stock, model="two")
    for space in (one, two):
        store(stock, space, ONE)
        store(stock, space, TWO)
    change = stock.change_quotas({"*": 2 * CHUNK_BYTES, "one": 2 * CHUNK_BYTES})
    next(change)
    assert whole(stock.reserve(two, THREE)) is None
    assert held(one, two) == [[ONE, TWO], [ONE, TWO]]
    list(change)
    assert held(one, two) == [[ONE, TWO], [ONE, TWO]]
    store(stock, two, THREE)
    assert held(one, two) == [[ONE, TWO], [TWO, THREE]]


def test_what_is_in_use_stays_until_room_is_needed(stock: Stock) -> None:
    space = enter(stock)
    store(stock, space, ONE)
    store(stock, space, TWO)
    chunk = whole(stock.acquire(space, ONE))
    assert isinstance(chunk, Chunk)
    list(stock.change_quotas({"model": CHUNK_BYTES}))
    assert held(space) == [[ONE]]
    list(stock.change_quotas({"model": CHUNK_BYTES - 1}))
    assert held(space) == [[ONE]]
    stock.release(chunk)
    assert whole(stock.reserve(space, THREE)) is None
    assert held(space) == [[ONE]], "nothing goes for a chunk that never fits"


def test_a_namespace_that_comes_to_a_quota_is_not_the_first_to_go() -> None:
    """The order of use between both is not known, so both lose as many."""
    quotas = {"*": 8 * CHUNK_BYTES, "own": 8 * CHUNK_BYTES}
    stock = Stock(64 * CHUNK_BYTES, FreePages(128), policy="LRU", quotas=quotas)
    own, other = enter(stock, model="own"), enter(stock, model="other")
    for number in range(4):
        store(stock, other, make_ref(number, 4))
        store(stock, own, make_ref(number, 4))
    list(stock.change_quotas({"*": 4 * CHUNK_BYTES}))
    assert [len(refs) for refs in held(own, other)] == [2, 2]
    assert held(own)[0] == [make_ref(number, 4) for number in (2, 3)]
