"""Times to live at the cache server: who hears of them, who changes them, and their end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.shop import CHUNK_BYTES, LATER_S, ONE, THREE, TWO, Desk, Shop

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ProtocolError
from kvstore.protocol import messages
from kvstore.protocol.outcomes import outcome_of
from kvstore.server.disk_tiers import DiskOptions

REST_MS = 10_000
REFS = [ONE, TWO, THREE]


def store(desk: Desk, ref: ChunkRef, rest_ms: int = 0) -> None:
    lease = desk.lease(messages.Reserve, ref)
    if rest_ms:
        assert desk.ask(messages.Expire(5, lease, rest_ms)) is None
    desk.send(lease, bytes(CHUNK_BYTES))
    desk.settle(1)
    assert desk.commit(lease) is Outcome.STORED


def rests_ms(desk: Desk) -> list[int | None]:
    """Return the rests of all chunks by a lookup; None for those that are not found."""
    answer = desk.ask(messages.Lookup(6, messages.pack_refs(REFS)))
    rests = answer.rests_ms if isinstance(answer, messages.Lasting) else [0] * len(REFS)
    return [rest if found else None for found, rest in zip(answer.found, rests, strict=True)]


def prolong(desk: Desk, ref: ChunkRef, rest_ms: int) -> None:
    assert isinstance(desk.ask(messages.Prolong(7, messages.pack_refs([ref]), [rest_ms])), messages.Done)


def read(desk: Desk, ref: ChunkRef) -> Outcome:
    (grant,) = desk.ask(messages.Acquire(8, messages.pack_refs([ref]))).grants
    return outcome_of(grant.outcome)


def test_who_writes_a_chunk_tells_its_end(desk: Desk) -> None:
    store(desk, ONE, REST_MS)
    store(desk, TWO)
    desk.now_s += 4
    reading = desk.lease(messages.Acquire, TWO)
    desk.ask(messages.Expire(5, reading, 1))
    desk.ask(messages.Expire(5, 12345, 1))
    assert rests_ms(desk) == [REST_MS - 4000, 0, None], "nobody else does"
    store(desk, ONE)
    assert rests_ms(desk) == [0, 0, None], "the last writer's counts"
    assert type(desk.ask(messages.Lookup(6, messages.pack_refs(REFS)))) is messages.Held


def test_a_chunk_is_over_at_once_and_gone_soon(desk: Desk) -> None:
    store(desk, ONE, REST_MS)
    store(desk, TWO, REST_MS + 1)
    desk.now_s += REST_MS / 1000
    assert rests_ms(desk) == [None, 1, None]
    assert (read(desk, ONE), read(desk, TWO)) == (Outcome.MISS, Outcome.HIT)
    (space,) = desk.stock.spaces.values()
    assert desk.stock.why(space, ONE) == "removed"
    used_bytes = space.used_bytes
    desk.service.expire()
    assert (list(space.chunks), space.used_bytes) == ([TWO], used_bytes - CHUNK_BYTES)
    assert space.counters.expired_chunks == 1
    desk.now_s += 1
    assert rests_ms(desk) == [None, None, None]


@pytest.mark.parametrize(
    ("rest_ms", "expected_ms"),
    [(1, REST_MS), (REST_MS, REST_MS), (REST_MS + 1, REST_MS + 1), (0, 0)],
    ids=["earlier", "equal", "later", "endless"],
)
def test_an_end_becomes_later_only(desk: Desk, rest_ms: int, expected_ms: int) -> None:
    store(desk, ONE, REST_MS)
    store(desk, TWO)
    for ref in REFS:
        prolong(desk, ref, rest_ms)
    assert rests_ms(desk) == [expected_ms, 0, None]
    desk.now_s += LATER_S
    list(desk.stock.expire())
    assert rests_ms(desk) == [None if rest_ms else 0, 0, None]


def test_what_is_over_does_not_return(desk: Desk) -> None:
    store(desk, ONE, REST_MS)
    desk.now_s += REST_MS / 1000
    prolong(desk, ONE, 0)
    assert rests_ms(desk)[0] is None
    store(desk, ONE, REST_MS)
    assert rests_ms(desk)[0] == REST_MS


def test_times_for_other_chunks_are_refused(desk: Desk) -> None:
    for rests in ([], [1, 2]):
        with pytest.raises(ProtocolError, match="times for 1 chunks"):
            desk.ask(messages.Prolong(7, messages.pack_refs([ONE]), rests))


@pytest.mark.parametrize("version", range(messages.OLDEST_VERSION, messages.ENDS_VERSION))
def test_who_does_not_hear_of_ends_finds_no_such_chunk(desk: Desk, version: int) -> None:
    """An older engine would keep its copy for longer."""
    store(desk, ONE, REST_MS)
    store(desk, TWO)
    for session in [*desk.sessions.by_peer.values()]:
        desk.service.end(session)
    assert isinstance(desk.hello(version=version), messages.Welcome)
    assert rests_ms(desk) == [None, 0, None]
    assert (read(desk, ONE), read(desk, TWO)) == (Outcome.MISS, Outcome.HIT)
    store(desk, ONE)
    assert rests_ms(desk) == [0, 0, None], "what it stores has no end"
    assert read(desk, ONE) is Outcome.HIT


def test_an_end_is_stronger_than_pins_and_readers() -> None:
    shop = Shop()
    chunk = shop.reserve(ONE)
    assert chunk is not None
    chunk.until_s = 0.0  # long ago
    assert shop.stock.complete(chunk, is_whole=True) is Outcome.STORED
    shop.stock.pins.set(chunk, LATER_S)
    chunk.uses += 1
    list(shop.stock.expire())
    assert (list(shop.space.chunks), list(shop.stock.pins), shop.free.num_free) == ([], [], 2)
    shop.stock.release(chunk)
    assert shop.free.num_free == 4


def test_a_cleared_chunk_ends_once(desk: Desk) -> None:
    store(desk, ONE, REST_MS)
    (space,) = desk.stock.spaces.values()
    desk.stock.clear(space)
    desk.now_s += LATER_S
    list(desk.stock.expire())
    while desk.stock.drop_cleared():
        pass
    assert (space.num_ending, desk.pool.free.num_free) == (0, desk.pool.num_bytes // (CHUNK_BYTES // 2))


def test_many_ends_at_one_moment_delay_nobody(desk: Desk) -> None:
    for ref in REFS:
        store(desk, ref, REST_MS)
    (space,) = desk.stock.spaces.values()
    desk.now_s += REST_MS / 1000
    desk.step_s = 1.0  # longer than a slice
    desk.service.expire()
    assert 0 < len(space.chunks) < len(REFS)
    assert rests_ms(desk) == [None, None, None]
    desk.step_s = 0.0
    while desk.reports:
        desk.settle(1)
    assert not space.chunks


def test_ends_that_became_later_delay_nobody(desk: Desk) -> None:
    for ref in REFS:
        store(desk, ref, REST_MS)
        prolong(desk, ref, 3 * REST_MS)
    desk.now_s += 2 * REST_MS / 1000
    steps = sum(1 for _ in desk.stock.expire())
    assert steps == len(REFS), "a step for each, in which nothing ends"
    assert rests_ms(desk) == [REST_MS] * 3


def test_the_disk_is_told_the_last_end(tmp_path: Path) -> None:
    """One change of a chunk at a time, however many are asked for meanwhile."""
    desk, noted = Desk(disk=DiskOptions(tmp_path, 1 << 20)), list[tuple[float | None, Callable[[], None]]]()
    with closing(desk.service), closing(desk.pool):
        desk.hello()
        store(desk, ONE, REST_MS)
        desk.settle(1)
        assert desk.disk is not None
        (space,) = desk.stock.spaces.values()
        chunk = space.chunks[ONE]
        assert chunk.disk_bytes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(desk.disk, "limit", lambda _chunk, until_s, done: noted.append((until_s, done)))
            for longer_ms in range(1000, 5000, 1000):
                prolong(desk, ONE, REST_MS + longer_ms)
            assert [until_s for until_s, _ in noted] == [11.0]
            noted[0][1]()
            assert [until_s for until_s, _ in noted] == [11.0, 14.0]
            noted[1][1]()
            assert len(noted) == 2
        desk.disk.close(10.0)
