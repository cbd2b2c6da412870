"""A namespace is cleared at once, however much it has; what it had is dropped some at a time, and is never found."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from support.server_desk import CHUNK_BYTES, LAYOUT, Desk, Shop

from kvstore.chunks import Outcome
from kvstore.keys import Namespace
from kvstore.protocol import messages
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import MAX_DROPPED
from kvstore.testing.harness import make_ref

REFS = [make_ref(number, 4) for number in range(3 * MAX_DROPPED)]
ONE, TWO, THREE = REFS[:3]


@pytest.fixture
def shop() -> Shop:
    """Chunks of one namespace fill the memory."""
    shop = Shop(chunks=len(REFS), disk_chunks=len(REFS))
    for ref in REFS:
        shop.store(ref)
    return shop


def enter_other(shop: Shop) -> Space:
    space = shop.stock.enter(Namespace({"model": "other"}), LAYOUT)
    assert space is not None
    return space


def test_a_clear_drops_nothing_and_hides_all(shop: Shop) -> None:
    assert list(shop.stock.clear(shop.space)) == REFS
    assert shop.stock.num_in_memory == len(REFS)
    assert (len(shop.space.chunks), shop.space.used_bytes) == (0, 0)
    assert not any(shop.stock.lookup(shop.space, REFS))
    assert shop.stock.acquire(shop.space, ONE) is Outcome.MISS
    assert shop.stock.why(shop.space, ONE) == "removed"


def test_few_are_dropped_at_a_time(shop: Shop) -> None:
    shop.stock.clear(shop.space)
    left = []
    while shop.stock.has_cleared:
        shop.stock.drop_cleared()
        left.append(shop.stock.num_in_memory)
    assert left[:3] == [2 * MAX_DROPPED, MAX_DROPPED, 0]
    assert len(left) <= 4
    assert shop.free.num_free == 2 * len(REFS)


def test_what_is_stored_after_a_clear_survives_it(shop: Shop) -> None:
    """Under the names of what is yet to be dropped, too, twice over, and while one of these is read."""
    old = shop.stock.acquire(shop.space, REFS[-1])
    assert isinstance(old, Chunk)
    pages = old.runs
    shop.stock.clear(shop.space)
    fresh = [shop.store(ref) for ref in (ONE, REFS[-1], make_ref(10_000, 4), ONE)][1:]
    while shop.stock.has_cleared:
        shop.stock.drop_cleared(1)
    assert list(shop.space.chunks.values()) == fresh
    assert (shop.stock.num_in_memory, shop.space.used_bytes) == (3, 3 * CHUNK_BYTES)
    assert old.runs == pages, "its reader still has them"
    shop.stock.release(old)
    assert shop.free.num_free == 2 * (len(REFS) - 3)


def test_two_clears_in_a_row(shop: Shop) -> None:
    shop.stock.clear(shop.space)
    shop.store(ONE)
    shop.stock.clear(shop.space)
    last = shop.store(ONE)
    while shop.stock.has_cleared:
        shop.stock.drop_cleared(7)
    assert list(shop.space.chunks.values()) == [last]
    assert shop.free.num_free == 2 * (len(REFS) - 1)


def test_what_was_cleared_makes_room_before_others_do(shop: Shop) -> None:
    other = enter_other(shop)
    shop.stock.remove(shop.space, [ONE])
    kept = shop.stock.reserve(other, ONE, 1 << 60)
    assert kept is not None
    shop.stock.complete(kept, is_whole=True)
    for ref in REFS[1:]:  # so that the policy would rather evict the other's
        assert isinstance(shop.stock.acquire(shop.space, ref), Chunk)
        shop.stock.release(shop.space.chunks[ref])
    shop.stock.clear(shop.space)
    before = shop.stock.num_displaced
    for number in range(MAX_DROPPED):
        shop.store(make_ref(10_000 + number, 4))
    assert kept.ref in other.chunks
    assert shop.stock.num_displaced - before == MAX_DROPPED


def write(shop: Shop, chunk: Chunk) -> None:
    assert shop.stock.prepare_write(chunk, CHUNK_BYTES)
    shop.stock.written(chunk, CHUNK_BYTES)


def test_what_was_cleared_leaves_the_disk_before_others_do() -> None:
    shop = Shop(chunks=8, disk_chunks=4)
    kept = shop.stock.reserve(enter_other(shop), ONE, 1 << 60)
    assert kept is not None
    shop.stock.complete(kept, is_whole=True)
    for chunk in (kept, *(shop.store(ref) for ref in REFS[:3])):
        write(shop, chunk)
    shop.stock.clear(shop.space)
    write(shop, shop.store(make_ref(10_000, 4)))
    assert kept.disk_bytes == CHUNK_BYTES
    assert shop.stock.num_on_disk == 2


def test_nothing_of_it_is_written_to_disk(shop: Shop) -> None:
    """Its file would come after those that the clear has deleted, and be found by the next server."""
    chunk = shop.space.chunks[ONE]
    shop.stock.clear(shop.space)
    assert not shop.stock.prepare_write(chunk, CHUNK_BYTES)


def test_files_are_left_to_who_deletes_all_of_them(shop: Shop) -> None:
    """Deleted one by one they would take the place of those that are written after the clear."""
    write(shop, shop.space.chunks[ONE])
    shop.stock.clear(shop.space)
    again = shop.store(ONE)
    while shop.stock.has_cleared:
        shop.stock.drop_cleared()
    assert shop.stock.take_removals() == []
    assert (shop.stock.num_on_disk, shop.space.chunks[ONE]) == (0, again)


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A server that drops one chunk at a time."""
    desk = Desk()
    assert isinstance(desk.hello(), messages.Welcome)
    desk.stock.drop_cleared = partial(desk.stock.drop_cleared, 1)  # type: ignore[method-assign]
    yield desk
    desk.service.close()
    desk.pool.close()


@pytest.mark.parametrize("request_", [messages.Clear(7), messages.ClearSpaces(7, b"")], ids=["client", "operator"])
def test_others_have_their_turn_while_a_namespace_is_cleared(desk: Desk, request_: messages.Request) -> None:
    for ref in REFS[:6]:
        desk.store(ref)
    desk.ask(request_)
    for left in (5, 4, 3):
        assert desk.stock.num_in_memory == left
        assert not any(desk.ask(messages.Lookup(8, messages.pack_refs(REFS[:6]))).found), "nor does this drop more"
        desk.settle(1)
    lease = desk.lease(messages.Reserve, ONE)
    desk.send(lease, bytes(CHUNK_BYTES))
    leases = desk.sessions.by_peer[desk.peer].leases
    while leases[lease].copies:
        desk.settle(1)
    assert desk.commit(lease) is Outcome.STORED
    while desk.reports:
        desk.settle(1)
    (space,) = desk.stock.spaces.values()
    assert (list(space.chunks), desk.stock.num_in_memory) == ([ONE], 1)
    assert desk.reports == []
