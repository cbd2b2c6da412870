"""A namespace is cleared at once, whatever its size; its chunks are dropped in slices, and delay no other client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.redis_server import wait_for
from support.shop import CHUNK_BYTES, HANG_GUARD_S, LATER_S, LAYOUT, ONE, THREE, TWO, Desk, Shop, whole

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ProtocolError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.core import SLICE_S
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.pool import FreePages
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref

REFS = [make_ref(number, 4) for number in range(8)]


def full(**options: int) -> Shop:
    """Return a shop whose memory is full of the chunks of one namespace."""
    shop = Shop(chunks=len(REFS), **options)
    for ref in REFS:
        shop.store(ref)
    return shop


def write(shop: Shop, chunk: Chunk) -> None:
    assert shop.stock.prepare_write(chunk, CHUNK_BYTES)
    shop.stock.written(chunk, CHUNK_BYTES)


def enter(stock: Stock, name: str, layout: KVLayout = LAYOUT) -> Space:
    space = stock.spaces.enter(Namespace({"model": name}), layout)
    assert space is not None
    return space


def drop_all(shop: Shop) -> None:
    while shop.stock.drop_cleared():
        pass


def test_nothing_is_found_before_anything_is_dropped() -> None:
    shop = full()
    shop.stock.touch(shop.space, REFS)
    assert shop.stock.clear(shop.space) == len(REFS)
    assert shop.free.num_free == 0
    assert not any(shop.stock.lookup(shop.space, REFS)[0])
    assert shop.acquire(ONE) is Outcome.MISS
    assert {shop.stock.why(shop.space, ref) for ref in REFS} == {"removed"}
    assert (len(shop.space.chunks), shop.space.used_bytes, shop.stock.remove(shop.space, REFS)) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["LRU", "LFU", "ARC", "S3FIFO", "ADAPTIVE"])
def test_it_makes_room_before_any_living_chunk(policy: str) -> None:
    """It does so for a large chunk, too, which needs the pages of many, and against the policy's preference."""
    large = KVLayout((4 * PAGE_BYTES,), 1, 16, 16)
    free = FreePages(10)
    stock = Stock(10 * PAGE_BYTES, free, policy=policy)
    small = KVLayout((PAGE_BYTES,), 1, 16, 16)
    kept, gone, newcomer = enter(stock, "kept", small), enter(stock, "gone", small), enter(stock, "new", large)
    for space, count in ((kept, 2), (gone, 8)):
        for number in range(count):
            chunk = whole(stock.reserve(space, make_ref(number, 1)))
            assert chunk is not None
            stock.complete(chunk, is_whole=True)
    for _ in range(3):
        stock.touch(gone, list(gone.chunks))
    assert stock.pins.pin(gone, list(gone.chunks)[:4], LATER_S) == 4
    stock.clear(gone)
    for number in range(2):
        chunk = whole(stock.reserve(newcomer, make_ref(number, 1)))
        assert chunk is not None, "refused"
        stock.complete(chunk, is_whole=True)
    assert len(kept.chunks) == 2, "displaced"
    assert not stock.has_cleared


def test_what_two_stores_at_once_need_is_dropped_for_both() -> None:
    shop = full()
    shop.stock.clear(shop.space)
    first = shop.stock.reserve(shop.space, ONE)
    next(first)
    assert shop.reserve(TWO) is not None, "takes what was dropped for the other"
    assert whole(first) is not None


def test_its_pins_count_no_more() -> None:
    shop = full()
    assert shop.stock.pins.pin(shop.space, REFS, LATER_S) == len(REFS) // 2
    shop.stock.clear(shop.space)
    assert (shop.stock.pins.used_bytes, list(shop.stock.pins), shop.stock.pins.due(LATER_S + 1)) == (0, [], [])
    again = [shop.store(ref) for ref in REFS[:4]]
    assert shop.stock.pins.pin(shop.space, REFS, LATER_S) == len(again)
    drop_all(shop)
    assert list(shop.stock.pins) == again


def test_what_is_stored_after_it_stays() -> None:
    """Chunks have the same names, an old one is read and another written meanwhile, and a second clear follows."""
    shop = full()
    reading, coming = shop.acquire(ONE), shop.stock.reserve(shop.space, THREE)
    assert isinstance(reading, Chunk)
    writing = whole(coming)
    assert writing is not None
    pages = reading.runs
    shop.stock.clear(shop.space)
    shop.store(ONE)
    shop.stock.clear(shop.space)
    fresh = [shop.store(ref) for ref in (ONE, TWO)]
    assert shop.stock.complete(writing, is_whole=True) is Outcome.FAILED
    drop_all(shop)
    assert list(shop.space.chunks.values()) == fresh
    assert (reading.runs, shop.space.used_bytes, shop.stock.num_in_memory) == (pages, 2 * CHUNK_BYTES, 2)
    shop.stock.release(reading)
    assert shop.free.num_free == 2 * (len(REFS) - 2)


def test_a_namespace_that_comes_again_is_none_of_its_business() -> None:
    shop = full()
    shop.stock.clear(shop.space)
    list(shop.stock.spaces.forget_empty())
    shop.space = enter(shop.stock, "mine")
    fresh = shop.store(ONE)
    drop_all(shop)
    assert (list(shop.space.chunks.values()), shop.free.num_free) == ([fresh], 2 * len(REFS) - 2)


def test_what_finds_room_while_it_is_cleared_is_not_there() -> None:
    """They are reads from disk and stores that had begun to make room before."""
    shop = Shop(chunks=1, disk_chunks=4)
    shop.stock.adopt(Chunk(shop.space, ONE, disk_bytes=CHUNK_BYTES))
    other = enter(shop.stock, "other", KVLayout((PAGE_BYTES // 2,), 1, 16, 16))
    for number in range(2):
        chunk = whole(shop.stock.reserve(other, make_ref(number, 1)))
        assert chunk is not None
        shop.stock.complete(chunk, is_whole=True)
    reading = shop.stock.acquire(shop.space, ONE)
    next(reading)
    shop.stock.clear(shop.space)
    assert whole(reading) is Outcome.MISS
    drop_all(shop)
    storing = shop.stock.reserve(shop.space, TWO)
    shop.stock.adopt(Chunk(shop.space, ONE, disk_bytes=CHUNK_BYTES))
    list(storing)
    shop.stock.clear(shop.space)
    assert (shop.space.chunks, shop.stock.num_on_disk) == ({}, 1)


def test_it_leaves_the_disk_before_any_living_chunk() -> None:
    shop = Shop(chunks=8, disk_chunks=4)
    kept = whole(shop.stock.reserve(enter(shop.stock, "other"), ONE))
    assert kept is not None
    shop.stock.complete(kept, is_whole=True)
    for chunk in (kept, *(shop.store(ref) for ref in REFS[:3])):
        write(shop, chunk)
    shop.stock.clear(shop.space)
    write(shop, shop.store(REFS[5]))
    assert kept.disk_bytes == CHUNK_BYTES


def test_its_files_are_left_to_who_deletes_all_of_them() -> None:
    """Deleted one by one they would delay the files that are written after the clear."""
    shop = full(disk_chunks=8)
    for chunk in list(shop.space.chunks.values())[:4]:
        write(shop, chunk)
    waiting = shop.space.chunks[REFS[5]]
    shop.stock.clear(shop.space)
    assert not shop.stock.prepare_write(waiting, CHUNK_BYTES), "written behind the clear"
    again = shop.store(ONE)
    drop_all(shop)
    assert shop.stock.take_removals() == []
    assert (shop.stock.num_on_disk, list(shop.space.chunks.values())) == (0, [again])


def test_no_search_for_room_looks_at_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all chunks may be pinned, and be the longest unused, so each store would look at all of them."""
    shop = full()
    assert shop.stock.pins.pin(shop.space, REFS, LATER_S) == 4
    looked_at: list[Chunk] = []
    may_go = shop.stock._may_go

    def look(chunk: Chunk) -> bool:
        looked_at.append(chunk)
        return may_go(chunk)

    monkeypatch.setattr(shop.stock, "_may_go", look)
    assert shop.reserve(make_ref(20, 4)) is not None
    assert {chunk.ref for chunk in looked_at} == {REFS[4]}
    shop.stock.pins.unpin(list(shop.stock.pins))
    shop.stock.remove(shop.space, REFS[5:])
    for number in range(30, 37):
        assert shop.reserve(make_ref(number, 4)) is not None, "what was pinned goes again"


# The server lets others have their turn


def stocked(desk: Desk) -> None:
    for ref in REFS[:6]:
        desk.store(ref)
    desk.step_s = SLICE_S  # each step is a slice


def settle(desk: Desk) -> None:
    while desk.reports:
        desk.settle(1)


def refs_of(*numbers: int) -> bytes:
    return messages.pack_refs([REFS[number] for number in numbers])


LONG: dict[str, Callable[[bytes], messages.Request]] = {
    "clear": lambda _: messages.Clear(7),
    "clear by an operator": lambda _: messages.ClearSpaces(7, b""),
    "remove": lambda _: messages.Remove(7, refs_of(*range(6))),
    "pin": lambda space_id: messages.Pin(7, space_id, refs_of(*range(4)), True),
    "explain": lambda space_id: messages.Explain(7, space_id, refs_of(*range(6))),
    "places": lambda _: messages.Reserve(7, messages.pack_refs([make_ref(number, 1) for number in range(20, 24)])),
}


@pytest.mark.parametrize("name", LONG)
def test_others_are_answered_in_between(desk: Desk, name: str) -> None:
    stocked(desk)
    (space,) = desk.stock.spaces.values()
    desk.ask(LONG[name](space.id))
    assert len(desk.reports) == 1
    turns = 0
    while desk.reports:
        asked = desk.ask(messages.Lookup(8, refs_of(0)))
        assert isinstance(asked, messages.Held)
        assert not (name.startswith("clear") and any(asked.found)), "found what was cleared"
        desk.settle(1)
        turns += 1
    assert turns > 2
    assert sum(answer.serial == 7 for answer in desk.sent) == 1


def test_the_leases_of_a_client_that_goes_end_bit_by_bit(desk: Desk) -> None:
    stocked(desk)
    desk.ask(messages.Acquire(7, refs_of(0, 1)))
    settle(desk)
    session = desk.sessions.by_peer[desk.peer]
    assert len(session.leases) == 2
    desk.service.end(session)
    assert (len(session.leases), desk.sessions.by_peer) == (1, {})
    settle(desk)
    assert (desk.sessions.num_leases, session.space.num_sessions) == (0, 0)


def test_pins_end_bit_by_bit(desk: Desk) -> None:
    stocked(desk)
    (space,) = desk.stock.spaces.values()
    desk.ask(messages.Pin(7, space.id, refs_of(0, 1, 2), True, 1))
    settle(desk)
    desk.now_s += 100
    desk.service.expire()
    left = set()
    while desk.reports:
        left.add(len(list(desk.stock.pins)))
        desk.settle(1)
    assert (left, desk.stock.pins.used_bytes) == ({0, 1, 2}, 0)


def test_a_second_clear_in_the_middle_of_the_first(desk: Desk) -> None:
    stocked(desk)
    desk.ask(messages.Clear(7))
    desk.step_s = 0.0
    (grant,) = desk.ask(messages.Reserve(8, refs_of(0))).grants
    desk.ask(messages.Clear(9))
    settle(desk)
    assert (desk.pool.used_bytes, desk.stock.has_cleared) == (CHUNK_BYTES, False)
    assert desk.commit(grant.lease) is Outcome.FAILED
    assert desk.pool.used_bytes == 0


def test_what_waited_for_a_clear_is_written(tmp_path: Path) -> None:
    """It has its share of the disk while cleared chunks are dropped."""
    desk, token = Desk(disk=DiskOptions(tmp_path / "disk", 64 * CHUNK_BYTES)), b"t" * messages.TOKEN_BYTES
    desk.open_tokens.add(token)
    desk.hello(token)

    def store(ref: ChunkRef) -> None:
        (grant,) = desk.ask(messages.Reserve(2, messages.pack_refs([ref]))).grants
        assert desk.commit(grant.lease) is Outcome.STORED

    def is_written() -> bool:
        settle(desk)
        return not desk.service.writes.is_changing_files

    for ref in REFS[:3]:
        store(ref)
    wait_for("the first are written", is_written)
    desk.step_s = SLICE_S
    desk.ask(messages.Clear(7))
    desk.step_s = 0.0
    store(ONE)
    assert desk.service.writes.num_unwritten == 1
    wait_for("it is written", is_written)
    (space,) = desk.stock.spaces.values()
    assert (space.chunks[ONE].disk_bytes > 0, desk.stock.num_on_disk) == (True, 1)
    assert desk.disk is not None
    desk.service.close()
    desk.disk.close(HANG_GUARD_S)
    desk.pool.close()


def test_requests_that_take_long_are_bounded(desk: Desk) -> None:
    stocked(desk)
    for _ in range(16):
        desk.ask(messages.Remove(7, refs_of(*range(6))))
    with pytest.raises(ProtocolError, match="16 slow requests"):
        desk.ask(messages.Remove(7, refs_of(*range(6))))


def test_an_operator_hears_how_many_were_cleared(desk: Desk) -> None:
    stocked(desk)
    desk.ask(messages.ClearSpaces(7, b""))
    settle(desk)
    reports = [answer for answer in desk.sent if isinstance(answer, messages.Report)]
    assert [json.loads(answer.body) for answer in reports] == [{"chunks": 6}]
