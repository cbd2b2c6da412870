"""Tests of a server's estate: whatever was done before, the successor has the same, and no page twice."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shop import CHUNK_BYTES, LATER_S, LAYOUT, Desk, whole

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ProtocolError
from kvstore.model.keys import Namespace
from kvstore.model.quotas import owner_id
from kvstore.protocol.payload import Run
from kvstore.server.clients import IPC, OURSELVES
from kvstore.server.pool import Pool, gaps
from kvstore.server.sessions import Peer, Session
from kvstore.server.spaces import Chunk, Space
from kvstore.server.succession import estate
from kvstore.server.succession.estate import ChunkRecord, Estate, draw_up, settle
from kvstore.testing.harness import make_ref

REFS = [make_ref(number, 1 + number % 4) for number in range(12)]
OWNERS = [b"", owner_id("tag:team", "red"), owner_id("tag:team", "unknown")]
QUOTAS = {"tenant/tag:team/red": 3 * CHUNK_BYTES, "tag:team/red": 4 * CHUNK_BYTES}
TOKENS = [bytes([number]) * 16 for number in range(3)]
numbers = st.integers(0, len(REFS) - 1)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 1), numbers),
        st.tuples(st.sampled_from(["read", "write"]), st.integers(0, len(TOKENS) - 1), numbers),
        st.tuples(st.sampled_from(["remove", "pin", "prolong", "clear"]), st.integers(0, 1), numbers),
    ),
    max_size=40,
)


class House:
    """State of a server, on which a test acts without clients."""

    def __init__(self, quotas: dict[str, int] | None = None) -> None:
        self.desk = Desk()
        self.core = self.desk.service._core
        self.stock, self.sessions = self.desk.stock, self.desk.sessions
        for _ in self.stock.change_quotas(quotas or {}):
            pass

    def space(self, number: int) -> Space:
        space = self.stock.spaces.enter(Namespace({"model": f"model {number}"}), LAYOUT, "" if number else "tenant")
        assert space is not None
        return space

    def session(self, token: bytes) -> Session:
        known = self.sessions.of_token(token)
        return known or self.sessions.begin(Peer(IPC, token), OURSELVES, self.space(token[0] % 2), token, 0.0)

    def act(self, name: str, who: int, number: int) -> None:
        ref = REFS[number]
        space = self.space(who % 2)
        if name == "store":
            chunk = whole(self.stock.reserve(space, ref, OWNERS[number // 2 % 3]))
            if chunk is not None:
                chunk.until_s = 1e6 if number % 3 == 0 else None
                assert self.stock.complete(chunk, is_whole=True) is Outcome.STORED
        elif name in {"read", "write"}:
            self.lease(TOKENS[who], ref, is_write=name == "write")
        elif name == "remove":
            self.stock.remove(space, [ref])
        elif name == "pin":
            self.stock.pins.pin(space, [ref], LATER_S)
        elif name == "prolong" and ref in space.chunks:
            self.stock.lifetimes.prolong(space.chunks[ref], 10_000_000_000)
        elif name == "clear":
            self.stock.clear(space)

    def lease(self, token: bytes, ref: ChunkRef, *, is_write: bool) -> None:
        session = self.session(token)
        if not is_write:
            found = whole(self.stock.acquire(session.space, ref))
            if isinstance(found, Chunk):
                self.sessions.lease(session, found, is_write=False)
        elif (reserved := whole(self.stock.reserve(session.space, ref, OWNERS[1]))) is not None:
            self.sessions.lease(session, reserved, is_write=True)

    def rest(self) -> None:
        """Finish what a pause waits for."""
        while self.stock.drop_cleared():
            pass

    def contents(self) -> dict[tuple[str, str], dict[ChunkRef, tuple[Any, ...]]]:
        return {
            (space.tenant, str(space.namespace.fields["model"])): {
                ref: (
                    chunk.runs,
                    chunk.is_whole,
                    chunk.disk_bytes,
                    chunk.pin_end_s,
                    chunk.until_s,
                    chunk.trail,
                    chunk.owner,
                )
                for ref, chunk in space.chunks.items()
            }
            for space in self.stock.spaces.values()
        }

    def quotas(self) -> dict[tuple[str, str], int]:
        return {(quota.tenant, quota.name): quota.used_bytes for quota in self.stock.spaces.quotas}

    def leases(self) -> dict[bytes, list[tuple[tuple[Run, ...], bool]]]:
        return {
            session.token: sorted((lease.chunk.runs, lease.is_write) for lease in session.leases.values())
            for session in self.sessions.by_peer.values()
            if session.leases
        }

    def uses(self) -> dict[ChunkRef, int]:
        return {ref: chunk.uses for space in self.stock.spaces.values() for ref, chunk in space.chunks.items()}


def succeed(before: House, quotas: dict[str, int] | None = None) -> tuple[House, list[Chunk]]:
    """Hand over to another house, through the bytes of an estate."""
    data = msgspec.msgpack.encode(draw_up(before.core, (), []))
    read = msgspec.msgpack.decode(data, type=Estate)
    after = House(quotas)
    after.stock._free.take(after.stock._free.num_free)
    after.stock._free.give(list(gaps([run for chunk in read.chunks for run in chunk.runs], 16)))
    return after, settle(read, after.core)


@given(actions)
def test_the_successor_has_the_same(steps: list[tuple[str, int, int]]) -> None:
    before = House(QUOTAS)
    for step in steps:
        before.act(*step)
    before.rest()
    after, _ = succeed(before, QUOTAS)
    assert after.quotas() == before.quotas()
    assert after.contents() == before.contents()
    assert after.leases() == before.leases()
    assert after.uses() == before.uses()
    assert after.stock.stamp > before.stock.stamp
    assert after.stock.pins.used_bytes == before.stock.pins.used_bytes
    assert after.stock._free.num_free == before.stock._free.num_free
    assert [(space.used_bytes, space.stored_bytes, space.counters) for space in after.stock.spaces.values()] == [
        (space.used_bytes, space.stored_bytes, space.counters) for space in before.stock.spaces.values()
    ]
    for house in (before, after):
        for session in list(house.sessions.by_peer.values()):
            for _ in house.sessions.end(session):
                pass
        chunks = [chunk for space in house.stock.spaces.values() for chunk in space.chunks.values()]
        held_bytes = sum(chunk.size_bytes for chunk in chunks)
        assert house.stock._free.num_free * CHUNK_BYTES // 2 + held_bytes == 8 * CHUNK_BYTES
        assert sum(space.used_bytes for space in house.stock.spaces.values()) == held_bytes
        assert house.sessions.leased_bytes == 0
        assert not any(chunk.uses for chunk in chunks)


def test_what_is_evicted_first_is_the_same() -> None:
    before = House()
    for number in range(8):
        before.act("store", 0, number)
    before.stock.touch(before.space(0), [REFS[0]])
    whole(before.stock.acquire(before.space(0), REFS[0]))
    order = [chunk.ref for chunk in before.stock.by_value()]
    after, _ = succeed(before)
    assert [chunk.ref for chunk in after.stock.by_value()] == order


def test_smaller_quotas_of_the_successor_bind_from_the_next_store_on() -> None:
    before = House()
    for number in range(3, 12, 4):  # whole chunks
        before.act("store", 1, number)
    after, _ = succeed(before, {"model 1": CHUNK_BYTES})
    assert after.space(1).quota.used_bytes == 3 * CHUNK_BYTES
    after.act("store", 1, 3)
    assert after.space(1).quota.used_bytes == CHUNK_BYTES


def test_chunks_that_wait_for_the_disk_are_named() -> None:
    before = House()
    before.act("store", 0, 1)
    before.act("store", 0, 2)
    waiting = [before.space(0).chunks[REFS[2]]]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(draw_up(before.core, waiting, [])), type=Estate)
    after = House()
    assert [chunk.ref for chunk in settle(read, after.core)] == [REFS[2]]


def record(**changes: Any) -> ChunkRecord:
    own: dict[str, Any] = {
        "space": 0,
        "prefix_key": REFS[3].prefix_key,
        "num_blocks": 4,
        "runs": [(0, 2)],
        "disk_bytes": 0,
        "pin_end_s": 0,
        "until_s": None,
        "trail": b"",
        "is_lost": False,
        "is_unwritten": False,
    }
    return ChunkRecord(**own | changes)


@pytest.mark.parametrize(
    ("chunks", "leases"),
    [([record(space=7)], []), ([record(), record()], []), ([record()], [estate.LeaseRecord(TOKENS[0], 1, False)])],
    ids=["no such namespace", "a chunk twice", "a lease of no chunk"],
)
def test_an_estate_that_contradicts_itself_is_refused(
    chunks: list[ChunkRecord], leases: list[estate.LeaseRecord]
) -> None:
    before = House()
    before.space(0)
    (space,) = draw_up(before.core, (), []).spaces
    with pytest.raises(ProtocolError, match="estate"):
        settle(Estate([space], chunks, leases, [], 0, 0.0), House().core)


def test_a_later_version_may_add_to_its_records() -> None:
    before = House()
    before.act("store", 0, 3)
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(draw_up(before.core, (), [])))
    for records in tree[:2]:
        for each in records:
            each.append("something new")
    tree[0][0][4]["a_counter_of_later"] = 7
    tree.append({"and": "more"})
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=Estate)
    after = House()
    settle(read, after.core)
    assert after.contents() == before.contents()


def test_an_estate_of_an_earlier_version_names_no_owners() -> None:
    before = House(QUOTAS)
    for number in (2, 6):
        before.act("store", 0, number)
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(draw_up(before.core, (), [])))
    assert {each.pop() for each in tree[1]} == {OWNERS[0], OWNERS[1]}
    after = House(QUOTAS)
    settle(msgspec.msgpack.decode(msgspec.msgpack.encode(tree), type=Estate), after.core)
    used_bytes = sum(before.quotas().values())
    assert after.quotas()["tenant", "tag:team/red"] == 0
    assert sum(after.quotas().values()) == used_bytes > 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=6))
def test_gaps_are_what_no_run_has(runs: list[Run]) -> None:
    taken = [page for first, length in runs for page in range(first, first + length)]
    if len(set(taken)) < len(taken) or max(taken, default=0) >= 32:
        with pytest.raises(ProtocolError, match="taken"):
            list(gaps(runs, 32))
    else:
        free = [page for first, length in gaps(runs, 32) for page in range(first, first + length)]
        assert sorted(free + taken) == list(range(32))


def test_memory_that_was_inherited_is_the_same() -> None:
    allocated: list[Run] = []
    with_pages = Pool(4 * CHUNK_BYTES, allocated.append)
    assert with_pages.wait_allocated(30.0)
    with_pages.bytes[:] = 7
    heir = Pool(4 * CHUNK_BYTES, allocated.append, fd=os.dup(with_pages.fd), taken=[(0, 3)])
    with_pages.close()
    assert heir.free.num_free == 5
    assert not heir.is_growing
    assert (heir.bytes == 7).all()
    heir.close()
