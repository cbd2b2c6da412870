"""Trails at the server, which say where the blocks of a chunk end: who sends them, what is kept, who gets them."""

from __future__ import annotations

import pytest
from support.shop import CHUNK_BYTES, ONE, THREE, TWO, Desk, whole

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.pool import FreePages
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref


def trail_of(ref: ChunkRef, first: int = 50) -> bytes:
    """Return a trail that begins with a block of this number."""
    keys = [make_ref(first + number, 1).prefix_key for number in range(ref.num_blocks - 1)]
    return b"".join([*keys, ref.prefix_key])


def nearest(desk: Desk, *trails: bytes) -> list[list[bytes]]:
    named: list[list[bytes]] = desk.ask(messages.Nearest(6, list(trails))).trails
    return named


def store_with_trail(desk: Desk, ref: ChunkRef, trail: bytes) -> None:
    lease = desk.lease(messages.Reserve, ref)
    assert desk.ask(messages.Describe(5, lease, trail)) is None
    desk.send(lease, bytes(CHUNK_BYTES))
    desk.settle(1)
    assert desk.commit(lease) is Outcome.STORED


def test_who_writes_a_chunk_tells_its_trail(desk: Desk) -> None:
    asked = trail_of(THREE)
    store_with_trail(desk, ONE, trail_of(ONE))
    assert nearest(desk, asked, trail_of(THREE, 90)) == [[trail_of(ONE)], []]
    store_with_trail(desk, TWO, trail_of(TWO, 70))
    read = desk.lease(messages.Acquire, TWO)
    desk.ask(messages.Describe(5, read, asked[:-16] + TWO.prefix_key))
    desk.ask(messages.Describe(5, 12345, trail_of(TWO)))
    assert nearest(desk, asked, trail_of(THREE, 70)) == [[trail_of(ONE)], [trail_of(TWO, 70)]], "nobody else does"
    store_with_trail(desk, ONE, trail_of(ONE, 80))
    assert nearest(desk, asked, trail_of(THREE, 80)) == [[], [trail_of(ONE, 80)]], "the last writer's counts"
    desk.ask(messages.Remove(7, messages.pack_refs([ONE, TWO])))
    assert nearest(desk, trail_of(THREE, 80)) == [[]]
    assert nearest(desk, trail_of(THREE, 70)) == [[]], "and a reader cannot keep a trail beyond its chunk"


@pytest.mark.parametrize(
    "trail",
    [trail_of(TWO), trail_of(ONE)[16:], trail_of(ONE)[:-1], trail_of(make_ref(1, 9)), bytes(7) + trail_of(ONE)],
)
def test_a_trail_of_something_else_is_not_kept(desk: Desk, trail: bytes) -> None:
    store_with_trail(desk, ONE, trail)
    assert not list(next(iter(desk.stock.spaces.values())).trails)


def test_a_trail_as_large_as_its_chunk_is_not_kept() -> None:
    """A geometry of tiny blocks would otherwise take more memory for the names than the pool has for the bytes."""
    tiny = KVLayout((16,), 1, 1, 4)
    stock = Stock(64 * PAGE_BYTES, FreePages(64))
    space = stock.spaces.enter(Namespace({"model": "tiny"}), tiny)
    assert space is not None
    chunk = whole(stock.reserve(space, ONE))
    assert chunk is not None
    chunk.describe(trail_of(ONE))
    stock.complete(chunk, is_whole=True)
    assert not list(space.trails)


def test_what_is_named_fits_into_a_message(desk: Desk) -> None:
    asked = [trail_of(THREE)] * messages.MAX_TRAILS
    store_with_trail(desk, ONE, trail_of(ONE))
    space = next(iter(desk.stock.spaces.values()))
    long = trail_of(ONE)[:16] + bytes(60_000)
    space.trails.add(long)
    named = nearest(desk, *asked)
    assert len(named) == len(asked)
    assert sum(len(trail) for near in named for trail in near) <= messages.MAX_MESSAGE_BYTES
    assert named[0]
    assert not named[-1]


def test_a_client_that_tells_no_trail_takes_none_away(desk: Desk) -> None:
    """An older client stores the same chunk again."""
    store_with_trail(desk, ONE, trail_of(ONE))
    desk.store(ONE)
    assert nearest(desk, trail_of(THREE)) == [[trail_of(ONE)]]
