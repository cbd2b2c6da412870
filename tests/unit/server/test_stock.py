"""The state of the cache server, in any order of events: every page accounted for, what is in use left alone."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.schedules import schedule_settings

from kvstore.chunks import ChunkRef, Outcome
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.protocol.runs import PAGE_BYTES
from kvstore.server.clients import OURSELVES, TCP
from kvstore.server.pool import FreePages
from kvstore.server.sessions import Lease, Peer, Session, Sessions
from kvstore.server.spaces import Chunk
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref

POOL_PAGES = 14
DISK_BYTES = 10 * PAGE_BYTES
LAYOUTS = [KVLayout((size,), 1, 16, 64) for size in (PAGE_BYTES // 4, PAGE_BYTES, 3 * PAGE_BYTES // 2)]
REFS = st.builds(make_ref, st.integers(0, 5), st.sampled_from([1, 4]))
SELDOM = st.integers(0, 9).map(lambda number: int(number == 0))
QUOTA_BYTES = 8 * PAGE_BYTES


class StockMachine(RuleBasedStateMachine):
    """Three namespaces, the last two with one quota, two clients each, and a disk whose work ends at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.free = FreePages(POOL_PAGES)
        self.stock = Stock(
            POOL_PAGES * PAGE_BYTES,
            self.free,
            disk_bytes=DISK_BYTES,
            policy="LRU",
            disk_policy="LRU",
            quotas={"2": QUOTA_BYTES},
        )
        self.sessions = Sessions(self.stock, POOL_PAGES * PAGE_BYTES, {TCP: 6})
        self.clients: list[Session] = []
        for number in range(6):
            space = self.stock.enter(Namespace({"model": "12"[number % 3 > 0]}), LAYOUTS[number % 3])
            assert space is not None
            self.clients.append(self.sessions.begin(Peer(TCP, bytes([number])), OURSELVES, space, b"", 0.0))
        self.loading: list[tuple[Chunk, Session]] = []
        self.writing: list[Chunk] = []

    @rule(who=st.integers(0, 5), ref=REFS)
    def reserve(self, who: int, ref: ChunkRef) -> None:
        session = self.clients[who]
        chunk = self.stock.reserve(session.space, ref)
        if chunk is not None:
            self.sessions.lease(session, chunk, is_write=True)

    @rule(who=st.integers(0, 5), refs=st.lists(REFS, min_size=1, max_size=4))
    def store(self, who: int, refs: list[ChunkRef]) -> None:
        """As engines do, who then want them on disk."""
        for ref in refs:
            session = self.clients[who]
            chunk = self.stock.reserve(session.space, ref)
            if chunk is not None:
                self._give_back(session, self.sessions.lease(session, chunk, is_write=True), is_whole=True)
                self._end_writes()

    @rule(who=st.integers(0, 5), ref=REFS)
    def acquire(self, who: int, ref: ChunkRef) -> None:
        session = self.clients[who]
        chunk = self.stock.acquire(session.space, ref)
        if isinstance(chunk, Outcome):
            assert chunk is Outcome.FAILED or ref not in session.space.chunks
        elif chunk.is_whole:
            self.sessions.lease(session, chunk, is_write=False)
        else:
            chunk.uses += 1  # the read's own
            self.loading.append((chunk, session))

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.HIT, Outcome.MISS, Outcome.FAILED]))
    def end_load(self, data: st.DataObject, outcome: Outcome) -> None:
        chunk, session = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        self.stock.loaded(chunk, outcome)
        if outcome is Outcome.HIT and not session.is_over:
            self.sessions.lease(session, chunk, is_write=False)
        else:
            self.stock.release(chunk)
        self.stock.release(chunk)

    @rule(data=st.data(), who=st.integers(0, 5), is_whole=st.booleans())
    def give_back(self, data: st.DataObject, who: int, is_whole: bool) -> None:
        session = self.clients[who]
        if not session.leases:
            return
        self._give_back(session, data.draw(st.sampled_from(list(session.leases.values()))), is_whole=is_whole)

    def _give_back(self, session: Session, lease: Lease, *, is_whole: bool) -> None:
        outcome = self.sessions.give_back(session, lease, is_whole=is_whole)
        if lease.is_write and outcome is Outcome.STORED:
            assert session.space.chunks[lease.chunk.ref] is lease.chunk
            if self.stock.prepare_write(lease.chunk, lease.chunk.size_bytes):
                self.writing.append(lease.chunk)

    def _end_writes(self) -> None:
        while self.writing:
            chunk = self.writing.pop()
            self.stock.written(chunk, chunk.size_bytes)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), is_written=st.booleans())
    def end_write(self, data: st.DataObject, is_written: bool) -> None:
        chunk = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self.stock.written(chunk, chunk.size_bytes if is_written else None)

    @rule(who=st.integers(0, 5), refs=st.lists(REFS, max_size=4))
    def look_up(self, who: int, refs: list[ChunkRef]) -> None:
        space = self.clients[who].space
        assert list(self.stock.lookup(space, refs)) == [ref in space.chunks for ref in refs]
        self.stock.touch(space, refs)

    @rule(who=st.integers(0, 5), refs=st.lists(REFS, max_size=3), chance=SELDOM)
    def remove(self, who: int, refs: list[ChunkRef], chance: int) -> None:
        refs = refs if chance else []
        space = self.clients[who].space
        self.stock.remove(space, refs)
        assert not any(ref in space.chunks for ref in refs)

    @rule(who=st.integers(0, 5), chance=SELDOM)
    def clear(self, who: int, chance: int) -> None:
        if not chance:
            return
        self.stock.clear(self.clients[who].space)
        assert not self.clients[who].space.chunks

    @rule(who=st.integers(0, 5), ref=REFS, end_s=st.integers(1, 20))
    def pin(self, who: int, ref: ChunkRef, end_s: int) -> None:
        self.stock.pin(self.clients[who].space, [ref], end_s)

    @rule(who=st.integers(0, 5), ref=REFS)
    def unpin(self, who: int, ref: ChunkRef) -> None:
        chunks = self.clients[who].space.chunks
        self.stock.unpin([chunks[ref]] if ref in chunks else [])

    @rule(now_s=st.integers(1, 20))
    def end_pins(self, now_s: int) -> None:
        self.stock.pins.expire(now_s)
        assert all(chunk.pin_end_s > now_s for chunk in self.stock.pins)

    @rule(who=st.integers(0, 5), chance=SELDOM)
    def vanish(self, who: int, chance: int) -> None:
        if not chance:
            return
        session = self.clients[who]
        self.sessions.end(session)
        self.clients[who] = self.sessions.begin(session.peer, OURSELVES, session.space, b"", 0.0)

    @invariant()
    def pages_add_up(self) -> None:
        """Each page is free, or belongs to one chunk: one that can be found, or one that is in use."""
        chunks: dict[int, Chunk] = {}
        for space in self.stock.spaces.values():
            chunks.update({id(chunk): chunk for chunk in space.chunks.values()})
        for session in self.clients:
            chunks.update({id(lease.chunk): lease.chunk for lease in session.leases.values()})
        chunks.update({id(chunk): chunk for chunk, _ in self.loading} | {id(chunk): chunk for chunk in self.writing})
        pages = [page for c in chunks.values() for first, count in c.runs for page in range(first, first + count)]
        assert len(pages) == len(set(pages)) == POOL_PAGES - self.free.num_free

    @invariant()
    def what_is_leased_has_its_pages(self) -> None:
        for session in self.clients:
            for lease in session.leases.values():
                assert sum(count for _, count in lease.chunk.runs) * PAGE_BYTES == lease.chunk.size_bytes
                assert lease.is_write or lease.chunk.is_whole

    @invariant()
    def namespaces_add_up(self) -> None:
        for space in self.stock.spaces.values():
            pending = [
                lease.chunk
                for session in self.clients
                for lease in session.leases.values()
                if lease.is_write and lease.chunk.space is space
            ]
            chunks = [*space.chunks.values(), *pending]
            assert space.used_bytes == sum(chunk.size_bytes for chunk in chunks)
        (quota,) = (quota for quota in self.stock.quotas if quota.name)
        shared = [space for space in self.stock.spaces.values() if space.quota is quota]
        assert quota.used_bytes == sum(space.used_bytes for space in shared) <= QUOTA_BYTES
        assert set(quota.by_age()) == {chunk for space in shared for chunk in space.chunks.values()}

    @invariant()
    def tiers_add_up(self) -> None:
        chunks = [chunk for space in self.stock.spaces.values() for chunk in space.chunks.values()]
        assert sum(chunk.disk_bytes for chunk in chunks) <= DISK_BYTES
        assert self.stock.num_on_disk == sum(chunk.disk_bytes > 0 for chunk in chunks)
        assert self.stock.num_in_memory == sum(bool(chunk.runs) for chunk in chunks)
        assert self.stock.pins.used_bytes == sum(chunk.size_bytes for chunk in chunks if chunk.is_pinned)
        assert set(self.stock.pins) == {chunk for chunk in chunks if chunk.is_pinned}
        assert all(chunk.runs or chunk.disk_bytes for chunk in chunks)

    @invariant()
    def leases_add_up(self) -> None:
        leases = [lease for session in self.clients for lease in session.leases.values()]
        assert self.sessions.num_leases == len(leases)
        assert self.sessions.leased_bytes == sum(lease.chunk.size_bytes for lease in leases)


@pytest.mark.schedules
def test_every_page_is_accounted_for_in_any_order() -> None:
    run_state_machine_as_test(StockMachine, settings=schedule_settings(40, stateful_step_count=60))
