"""The state of the cache server, under any order of events: every page accounted for, chunks in use left alone.

Work in steps is under way while anything else happens, and so is the dropping of cleared chunks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.schedules import schedule_settings
from support.shop import whole

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.quotas import owner_id
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.clients import OURSELVES, TCP
from kvstore.server.pool import FreePages
from kvstore.server.sessions import Lease, Peer, Session, Sessions
from kvstore.server.spaces import NO_QUOTA, Chunk, Quota, Space
from kvstore.server.stock import Stock
from kvstore.testing.harness import make_ref

POOL_PAGES = 14
DISK_BYTES = 10 * PAGE_BYTES
LAYOUTS = [KVLayout((size,), 1, 16, 64) for size in (PAGE_BYTES // 4, PAGE_BYTES, 3 * PAGE_BYTES // 2)]
REFS = st.builds(make_ref, st.integers(0, 5), st.sampled_from([1, 4]))
RESTS_MS = st.sampled_from([0, 0, 1, 5000, 10_000, 30_000])
SELDOM = st.integers(0, 9).map(lambda number: int(number == 0))
QUOTA_BYTES = 8 * PAGE_BYTES
OWNERS = {owner_id("tag:team", name): f"tag:team/{name}" for name in ("red", "blue")}
IDS = st.sampled_from([b"", *OWNERS, owner_id("tag:team", "unknown")])
RED, BLUE = OWNERS.values()
QUOTAS = [
    {"2": QUOTA_BYTES, RED: 4 * PAGE_BYTES},
    {},
    {"2": QUOTA_BYTES // 2},
    {"*": QUOTA_BYTES, BLUE: 6 * PAGE_BYTES},
    {"1": 6 * PAGE_BYTES, "2": QUOTA_BYTES, RED: 2 * PAGE_BYTES, BLUE: 4 * PAGE_BYTES},
]


class StockMachine(RuleBasedStateMachine):
    """Three namespaces, the last two with one quota, two clients each, and a disk whose work ends at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[bytes, Chunk] = {}
        self.now_s = 0.0
        self.open()

    def open(self) -> None:
        self.free = FreePages(POOL_PAGES)
        self.stock = Stock(
            POOL_PAGES * PAGE_BYTES,
            self.free,
            disk_bytes=DISK_BYTES,
            policy="LRU",
            disk_policy="LRU",
            quotas=QUOTAS[0],
            now=lambda: self.now_s,
        )
        self.sessions = Sessions(self.stock, POOL_PAGES * PAGE_BYTES, {TCP: 6})
        self.clients: list[Session] = []
        for number in range(6):
            space = self.stock.spaces.enter(Namespace({"model": "12"[number % 3 > 0]}), LAYOUTS[number % 3])
            assert space is not None
            session = self.sessions.begin(Peer(TCP, bytes([number])), OURSELVES, space, b"", 0.0)
            session.hears_ends = number < 3
            self.clients.append(session)
        self.loading: list[tuple[Chunk, Session]] = []
        self.writing: list[Chunk] = []
        self.in_vain: set[Chunk] = set()  # those of them whose files will be deleted at once
        self.under_way: list[Iterator[None]] = []
        self.is_changing = False  # the quotas
        self.has_changed = False

    @rule(chance=SELDOM)
    def restart(self, chance: int) -> None:
        """Restart: all files on disk are found again, and nothing else; chunks that were being written are lost."""
        if not chance:
            return
        self.open()
        for chunk in self.files.values():
            space = self.stock.spaces[chunk.space.id]
            found = {"disk_bytes": chunk.size_bytes, "until_s": chunk.until_s, "owner": chunk.owner}
            self.stock.adopt(Chunk(space, chunk.ref, **found))  # type: ignore[arg-type]
        self.files = {key: self.stock._chunks[key] for key in self.files}
        for _ in self.stock.change_quotas(self.stock.spaces.quotas.given):
            pass
        self.sweep()

    @rule(by_s=st.integers(1, 20))
    def pass_time(self, by_s: int) -> None:
        self.now_s += by_s

    @rule(is_slow=st.booleans())
    def expire(self, is_slow: bool) -> None:
        self.begin(self.stock.expire(), is_slow=is_slow)
        if not is_slow:
            assert not any(
                self.is_over(chunk) for space in self.stock.spaces.values() for chunk in space.chunks.values()
            )

    def is_over(self, chunk: Chunk) -> bool:
        return chunk.until_s is not None and chunk.until_s <= self.now_s

    @rule(who=st.integers(0, 5), ref=REFS, rest_ms=RESTS_MS)
    def prolong(self, who: int, ref: ChunkRef, rest_ms: int) -> None:
        chunk = self.clients[who].space.chunks.get(ref)
        if chunk is None:
            return
        before_s, asked_s = chunk.until_s, self.now_s + rest_ms / 1000 if rest_ms else math.inf
        is_changed = self.stock.lifetimes.prolong(chunk, rest_ms)
        end_s = math.inf if chunk.until_s is None else chunk.until_s
        if before_s is None or before_s <= self.now_s:
            assert (is_changed, chunk.until_s) == (False, before_s), "it has no end, or that was before"
        else:
            assert (is_changed, end_s) == (asked_s > before_s, max(before_s, asked_s))

    @rule(who=st.integers(0, 5), ref=REFS, is_slow=st.booleans(), rest_ms=RESTS_MS, owner=IDS)
    def reserve(self, who: int, ref: ChunkRef, is_slow: bool, rest_ms: int, owner: bytes) -> None:
        self.begin(self._reserve(self.clients[who], ref, rest_ms, owner), is_slow=is_slow)

    def _reserve(self, session: Session, ref: ChunkRef, rest_ms: int, owner: bytes) -> Iterator[None]:
        chunk = yield from self.watched(session.space, self.stock.reserve(session.space, ref, owner), owner)
        if chunk is not None:
            chunk.until_s = self.stock.lifetimes.end_in(rest_ms)
        if chunk is not None and session.is_over:
            self.stock.complete(chunk, is_whole=False)
        elif chunk is not None:
            self.sessions.lease(session, chunk, is_write=True)

    @rule(quotas=st.sampled_from(QUOTAS), is_slow=st.booleans(), chance=st.integers(0, 2))
    def change_quotas(self, quotas: dict[str, int], is_slow: bool, chance: int) -> None:
        if chance and not self.is_changing:
            self.begin(self._change_quotas(quotas), is_slow=is_slow)

    def _change_quotas(self, quotas: dict[str, int]) -> Iterator[None]:
        self.is_changing = self.has_changed = True
        yield from self.stock.change_quotas(quotas)
        self.is_changing = False
        for quota in self.stock.spaces.quotas:
            idle = [chunk for chunk in quota.by_age() if not chunk.is_gone and self.stock._may_go(chunk)]
            assert quota.used_bytes <= quota.limit_bytes or not idle

    def begin(self, work: Iterator[None], *, is_slow: bool) -> None:
        if is_slow:
            self.under_way.append(work)
        else:
            list(work)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), count=st.integers(1, 4))
    def go_on(self, data: st.DataObject, count: int) -> None:
        work = data.draw(st.sampled_from(range(len(self.under_way))))
        for _ in range(count):
            if next(self.under_way[work], self) is self:
                self.under_way.pop(work)
                return

    def quota_of(self, space: Space, owner: bytes) -> Quota:
        """Return the quota of an owner's chunks, as the configuration has it now."""
        named = (quota for quota in self.stock.spaces.quotas if quota.name == OWNERS.get(owner))
        return next(named, space.quota)

    def watched(
        self, space: Space, steps: Generator[None, None, Any], owner: bytes = b""
    ) -> Generator[None, None, Any]:
        """Run steps, and check that cleared chunks make room first: meanwhile none is evicted or refused."""
        begun = self.quota_of(space, owner)
        while True:
            has_limit = min(begun.limit_bytes, self.quota_of(space, owner).limit_bytes) < NO_QUOTA
            evicted = self.num_evicted()
            try:
                next(steps)
            except StopIteration as end:
                is_refused = end.value in (None, Outcome.FAILED)
                found = end.value
                break
            assert self.num_evicted() == evicted or has_limit or not self.idle_cleared()
            yield
        assert not (is_refused and self.idle_cleared() and not has_limit), "refused for its sake"
        return found

    def num_evicted(self) -> int:
        return sum(space.counters.evicted_chunks for space in self.stock.spaces.values())

    def cleared(self) -> list[Chunk]:
        piles = [chunk for chunks, _ in self.stock._cleared for chunk in chunks.values()]
        return [chunk for chunk in piles if not chunk.is_dropped]

    def idle_cleared(self) -> bool:
        return any(chunk.runs and not chunk.uses for chunk in self.cleared())

    @precondition(lambda self: self.stock.has_cleared)
    @rule(count=st.integers(1, 3))
    def drop_cleared(self, count: int) -> None:
        for _ in range(count):
            self.stock.drop_cleared()

    @rule(who=st.integers(0, 5), refs=st.lists(REFS, min_size=1, max_size=4), owner=IDS)
    def store(self, who: int, refs: list[ChunkRef], owner: bytes) -> None:
        """Store as engines do, which then want the chunks on disk."""
        for ref in refs:
            session = self.clients[who]
            chunk = whole(self.stock.reserve(session.space, ref, owner))
            if chunk is not None:
                self._give_back(session, self.sessions.lease(session, chunk, is_write=True), is_whole=True)
                self._end_writes()

    @rule(who=st.integers(0, 5), ref=REFS, is_slow=st.booleans())
    def acquire(self, who: int, ref: ChunkRef, is_slow: bool) -> None:
        self.begin(self._acquire(self.clients[who], ref), is_slow=is_slow)

    def _acquire(self, session: Session, ref: ChunkRef) -> Iterator[None]:
        wanted, hears_ends = session.space.chunks.get(ref), session.hears_ends
        is_hidden = wanted is not None and (self.is_over(wanted) or not (hears_ends or wanted.until_s is None))
        found = self.stock.acquire(session.space, ref, hears_ends=hears_ends)
        chunk = yield from self.watched(session.space, found)
        if isinstance(chunk, Outcome):
            is_gone = session.space.chunks.get(ref) is not wanted or wanted is None
            assert chunk is Outcome.MISS if is_hidden else chunk is Outcome.FAILED or is_gone
            return
        assert not is_hidden
        assert session.space.chunks[ref] is chunk, "found what was removed meanwhile"
        if session.is_over:
            self.stock.release(chunk)
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
        if outcome is Outcome.HIT and not session.is_over and not chunk.is_gone:
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
                self.sweep()
                self.writing.append(lease.chunk)

    def _end_writes(self) -> None:
        while self.writing:
            self._end_write(0, is_written=True)

    def _end_write(self, number: int, *, is_written: bool) -> None:
        """End writes of one file in order. A write that was overtaken is deleted before its end is reported."""
        key = self.writing[number].key
        chunk = self.writing.pop(next(place for place, other in enumerate(self.writing) if other.key == key))
        is_lost = chunk in self.in_vain
        self.in_vain.discard(chunk)
        if is_written and not is_lost:
            self.files[key] = chunk
        self.stock.written(chunk, chunk.size_bytes if is_written else None)

    def sweep(self) -> None:
        for space, ref in self.stock.take_removals():
            self.delete({space.key_of(ref)})

    def delete(self, keys: set[bytes]) -> None:
        self.in_vain.update(chunk for chunk in self.writing if chunk.key in keys)
        for key in keys:
            self.files.pop(key, None)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), is_written=st.booleans())
    def end_write(self, data: st.DataObject, is_written: bool) -> None:
        self._end_write(data.draw(st.integers(0, len(self.writing) - 1)), is_written=is_written)

    @rule(who=st.integers(0, 5), refs=st.lists(REFS, max_size=4))
    def look_up(self, who: int, refs: list[ChunkRef]) -> None:
        space, hears_ends = self.clients[who].space, self.clients[who].hears_ends
        found, rests_ms = self.stock.lookup(space, refs, hears_ends=hears_ends)
        for ref, is_found, rest_ms in zip(refs, found, rests_ms or [0] * len(refs), strict=True):
            chunk = space.chunks.get(ref)
            is_there = chunk is not None and not self.is_over(chunk)
            assert self.stock.why(space, ref).startswith(("memory", "disk")) == is_there
            until_s = None if chunk is None else chunk.until_s
            assert bool(is_found) == (is_there and (hears_ends or until_s is None))
            assert rest_ms == (round((until_s - self.now_s) * 1000) if is_found and until_s is not None else 0)
        assert any(rests_ms) == bool(rests_ms)
        self.stock.touch(space, refs)

    @rule(who=st.integers(0, 5), refs=st.lists(REFS, max_size=3), chance=SELDOM)
    def remove(self, who: int, refs: list[ChunkRef], chance: int) -> None:
        refs = refs if chance else []
        space = self.clients[who].space
        self.stock.remove(space, refs)
        assert not any(ref in space.chunks for ref in refs)

    @rule(who=st.integers(0, 5), chance=st.integers(0, 3).map(lambda number: int(number == 0)))
    def clear(self, who: int, chance: int) -> None:
        if not chance:
            return
        space = self.clients[who].space
        self.sweep()
        count = len(space.chunks)
        assert self.stock.clear(space) == count
        assert not space.chunks
        self.delete({chunk.key for chunk in [*self.files.values(), *self.writing] if chunk.space.id == space.id})

    @rule(who=st.integers(0, 5), ref=REFS, end_s=st.integers(1, 20))
    def pin(self, who: int, ref: ChunkRef, end_s: int) -> None:
        self.stock.pins.pin(self.clients[who].space, [ref], end_s)

    @rule(who=st.integers(0, 5), ref=REFS)
    def unpin(self, who: int, ref: ChunkRef) -> None:
        chunks = self.clients[who].space.chunks
        self.stock.pins.unpin([chunks[ref]] if ref in chunks else [])

    @rule(now_s=st.integers(1, 20))
    def end_pins(self, now_s: int) -> None:
        self.stock.pins.unpin(self.stock.pins.due(now_s))
        assert all(chunk.pin_end_s > now_s for chunk in self.stock.pins)

    @rule(who=st.integers(0, 5), chance=SELDOM)
    def vanish(self, who: int, chance: int) -> None:
        if not chance:
            return
        session = self.clients[who]
        ending = self.sessions.end(session)
        next(ending, None)
        self.clients.append(session)  # whose leases end one by one
        again = self.sessions.begin(session.peer, OURSELVES, session.space, b"", 0.0)
        again.hears_ends = session.hears_ends
        self.clients[who] = again
        self.begin(ending, is_slow=True)

    @invariant()
    def pages_add_up(self) -> None:
        """Each page is free, or belongs to one chunk, which can be found or is in use."""
        chunks: dict[int, Chunk] = {}
        for space in self.stock.spaces.values():
            chunks.update({id(chunk): chunk for chunk in space.chunks.values()})
        for session in self.clients:
            chunks.update({id(lease.chunk): lease.chunk for lease in session.leases.values()})
        chunks.update({id(chunk): chunk for chunk, _ in self.loading} | {id(chunk): chunk for chunk in self.writing})
        chunks.update({id(chunk): chunk for chunk in self.cleared()})
        pages = [page for c in chunks.values() for first, count in c.runs for page in range(first, first + count)]
        assert len(pages) == len(set(pages)) == POOL_PAGES - self.free.num_free

    @invariant()
    def what_is_leased_has_its_pages(self) -> None:
        for session in self.clients:
            for lease in session.leases.values():
                assert sum(count for _, count in lease.chunk.runs) * PAGE_BYTES == lease.chunk.size_bytes
                assert lease.is_write or lease.chunk.is_whole

    @invariant()
    def nothing_of_before_a_clear_is_found(self) -> None:
        for space in self.stock.spaces.values():
            assert not any(chunk.is_gone for chunk in space.chunks.values())
        assert not any(chunk.is_gone for chunk in self.stock.pins)

    @invariant()
    def files_are_those_of_what_is_there(self) -> None:
        """Chunks stored after a clear keep their files, and a restart finds none from before it."""
        self.sweep()
        assert all(not chunk.is_gone and chunk.disk_bytes for chunk in self.files.values())
        for space in self.stock.spaces.values():
            for chunk in space.chunks.values():
                assert not chunk.disk_bytes or chunk in self.writing or self.files[chunk.key] is chunk

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
            on_their_way = space.used_bytes - sum(chunk.size_bytes for chunk in chunks)
            assert on_their_way >= 0 if self.under_way else not on_their_way
            assert space.stored_bytes == sum(chunk.size_bytes for chunk in space.chunks.values())
            ending = [chunk for chunk in space.chunks.values() if chunk.until_s is not None]
            ending += [chunk for chunk in self.cleared() if chunk.space is space and chunk.until_s is not None]
            assert space.num_ending == len(ending)

    @invariant()
    def quotas_add_up(self) -> None:
        spaces = self.stock.spaces.values()
        assert {space.quota for space in spaces} <= {*self.stock.spaces.quotas}
        chunks = [chunk for space in spaces for chunk in space.chunks.values()]
        for account in [account for space in spaces for account in space.all_accounts()]:
            assert account.stored_bytes == sum(chunk.size_bytes for chunk in chunks if chunk.account is account)
        for space in spaces:
            assert space.used_bytes == sum(account.used_bytes for account in space.all_accounts())
        for chunk in chunks if not self.is_changing else ():
            assert chunk.quota is self.quota_of(chunk.space, chunk.owner)
        for quota in self.stock.spaces.quotas:
            shared = [account for space in spaces for account in space.all_accounts() if account.quota is quota]
            assert quota.used_bytes == sum(account.used_bytes for account in shared)
            assert quota.used_bytes <= quota.limit_bytes or self.has_changed
            known = set(quota.by_age()) - set(self.cleared())
            there = {chunk for chunk in chunks if chunk.quota is quota}
            if not self.is_changing:
                assert known == (there if quota.limit_bytes < NO_QUOTA else set())
                assert len(quota._chunks) == len(list(quota.by_age()))

    @invariant()
    def tiers_add_up(self) -> None:
        chunks = [chunk for space in self.stock.spaces.values() for chunk in space.chunks.values()]
        both = [*chunks, *self.cleared()]
        assert sum(chunk.disk_bytes for chunk in both) <= DISK_BYTES
        assert self.stock.num_on_disk == sum(chunk.disk_bytes > 0 for chunk in both)
        assert self.stock.num_in_memory == sum(bool(chunk.runs) for chunk in both)
        cleared = {chunk.key for chunk in self.cleared() if chunk.runs}
        assert set(self.stock._memory) - cleared == {c.key for c in chunks if c.runs and not c.is_pinned} - cleared
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
