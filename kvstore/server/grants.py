"""Grants of pages of the pool, for a client to write a chunk to, or to read it from once it is in memory.

Nothing is evicted while the pool still allocates pages; requests that need those wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ProtocolError
from kvstore.protocol import messages
from kvstore.protocol.outcomes import number_of
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.core import Core
from kvstore.server.pool import pages_of
from kvstore.server.sessions import Session
from kvstore.server.spaces import Chunk


@dataclass
class _Batch:
    """Grants that are being collected.

    Attributes:
        session: the client's session.
        serial: the serial number of the request.
        refs: the chunks wanted.
        is_write: True to write them, False to read.
        owner: of chunks to write, as the client names it.
        grants: grants of the first chunks, so far.
        num_waiting: number of these chunks that are being read from disk.
    """

    session: Session
    serial: int
    refs: list[ChunkRef]
    is_write: bool
    owner: bytes
    grants: list[messages.Grant] = field(default_factory=list)
    num_waiting: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.grants) == len(self.refs) and not self.num_waiting


class Grants:
    """Answers requests for pages. Belongs to the thread that decides.

    Args:
        core: the shared state of the server.
    """

    def __init__(self, core: Core) -> None:
        self.num_reading = 0  # chunks, on threads of the disk
        self._core = core
        self._loading: dict[Chunk, list[Callable[[Outcome], None]]] = {}
        self._waiting: deque[_Batch] = deque()  # for pages

    def find(self, session: Session, request: messages.Reserve | messages.ReserveFor | messages.Acquire) -> None:
        """Find or make the chunks of a request, and send the answer, perhaps later.

        Raises:
            ProtocolError: there can be no such chunks, or too many such requests of this client are unanswered.
        """
        refs = messages.unpack_refs(request.refs)
        if not all(map(session.space.has_size, refs)):
            raise ProtocolError(f"a chunk of this namespace has 1 to {session.space.layout.blocks_per_chunk} blocks")
        session.begin_late()
        owner = request.owner if isinstance(request, messages.ReserveFor) else b""
        batch = _Batch(session, request.serial, refs, not isinstance(request, messages.Acquire), owner)
        self._core.slices.begin(self._collect(batch))

    def go_on(self) -> None:
        """Continue the requests that wait for pages, in order, until one still lacks some."""
        waiting, self._waiting = self._waiting, deque()
        while waiting and not self._waiting:
            self._core.slices.begin(self._collect(waiting.popleft()))
        self._waiting.extend(waiting)

    def _collect(self, batch: _Batch) -> Iterator[None]:
        for ref in batch.refs[len(batch.grants) :]:
            yield
            if batch.session.is_over:
                return
            if self._lacks_pages(batch, ref):
                self._waiting.append(batch)
                return
            is_refused = batch.is_write and self._core.is_closed_to(batch.session.client)
            if is_refused or not self._may_lease(batch.session, ref):
                batch.grants.append(_no_grant(Outcome.FAILED))
            elif batch.is_write:
                yield from self._reserve(batch, ref)
            else:
                yield from self._acquire(batch, ref)
        self._answer_if_done(batch)

    def _lacks_pages(self, batch: _Batch, ref: ChunkRef) -> bool:
        """Tell if a chunk needs pages that the pool will have soon."""
        pool, space = self._core.pool, batch.session.space
        if not pool.is_growing or self._core.is_closing:
            return False
        chunk = space.chunks.get(ref)
        if not batch.is_write and (chunk is None or chunk.runs):
            return False
        return pages_of(space.layout.payload_bytes(ref.num_blocks)) > pool.free.num_free

    def _reserve(self, batch: _Batch, ref: ChunkRef) -> Iterator[None]:
        session = batch.session
        chunk = yield from self._core.stock.reserve(session.space, ref, batch.owner)
        if chunk is None:
            batch.grants.append(_no_grant(Outcome.FULL))
        elif self._may_still_lease(session, ref):
            batch.grants.append(self._grant(session, chunk, Outcome.STORED))
        else:
            batch.grants.append(_no_grant(self._core.stock.complete(chunk, is_whole=False)))

    def _acquire(self, batch: _Batch, ref: ChunkRef) -> Iterator[None]:
        session = batch.session
        chunk = yield from self._core.stock.acquire(session.space, ref, hears_ends=session.hears_ends)
        if isinstance(chunk, Outcome):
            batch.grants.append(_no_grant(chunk))
        elif not self._may_still_lease(session, ref):
            batch.grants.append(_no_grant(Outcome.FAILED))
            self._core.stock.release(chunk)
        elif chunk.is_whole:
            batch.grants.append(self._grant(session, chunk, Outcome.HIT))
        else:
            number = len(batch.grants)
            batch.grants.append(_no_grant(Outcome.FAILED))
            batch.num_waiting += 1
            self._load(chunk, partial(self._arrived, batch, number, chunk))

    def _answer_if_done(self, batch: _Batch) -> None:
        if batch.is_done and not batch.session.is_over:
            batch.session.num_late -= 1
            usage = self._core.usage(batch.session.space)
            self._core.send(batch.session.peer, messages.Granted(batch.serial, batch.grants, usage), ())

    def _load(self, chunk: Chunk, arrived: Callable[[Outcome], None]) -> None:
        """Read a chunk in use from disk to its pages; all requests for it share one read."""
        waiting = self._loading.setdefault(chunk, [])
        waiting.append(arrived)
        if len(waiting) > 1:
            return
        core = self._core
        assert core.disk is not None
        chunk.uses += 1  # the read's own

        def done(outcome: Outcome) -> None:
            core.stock.loaded(chunk, outcome)
            for waiter in self._loading.pop(chunk):
                waiter(outcome)
            core.sweep()

        parts = core.pool.parts(chunk.runs, 0, chunk.size_bytes)

        def freed() -> None:
            self.num_reading -= 1
            core.stock.release(chunk)

        self.num_reading += 1
        core.disk.read(chunk, parts, done, freed)

    def _arrived(self, batch: _Batch, number: int, chunk: Chunk, outcome: Outcome) -> None:
        if outcome is Outcome.HIT and chunk.is_gone:
            outcome = Outcome.MISS
        if outcome is Outcome.HIT and not batch.session.is_over:
            batch.grants[number] = self._grant(batch.session, chunk, outcome)
        else:
            batch.grants[number] = _no_grant(outcome)
            self._core.stock.release(chunk)
        batch.num_waiting -= 1
        self._answer_if_done(batch)

    def _may_lease(self, session: Session, ref: ChunkRef) -> bool:
        payload_bytes = session.space.layout.payload_bytes(ref.num_blocks)
        may = self._core.sessions.may_lease(session, pages_of(payload_bytes) * PAGE_BYTES)
        if not may:
            self._core.deny(session.client, "leases", "its leases, or those of all clients, have reached their limit")
        return may

    def _may_still_lease(self, session: Session, ref: ChunkRef) -> bool:
        """Check the lease again once pages are found, because other requests may have been served meanwhile."""
        return not session.is_over and self._may_lease(session, ref)

    def _grant(self, session: Session, chunk: Chunk, outcome: Outcome) -> messages.Grant:
        lease = self._core.sessions.lease(session, chunk, is_write=outcome is Outcome.STORED)
        if outcome is Outcome.HIT:
            chunk.note_read()
            self._core.stock.holds.note_read(chunk, by_owner=bool(session.token))
        return messages.Grant(number_of(outcome), lease.number, chunk.runs)


def _no_grant(outcome: Outcome) -> messages.Grant:
    return messages.Grant(number_of(outcome))
