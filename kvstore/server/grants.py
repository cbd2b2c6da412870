"""Grants: which pages of the pool a client may write a chunk to, or read it from once it is in memory.

Until the pool has all of its pages, nothing is evicted for those that are yet to come: who needs them waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ProtocolError
from kvstore.protocol import messages
from kvstore.protocol.outcomes import number_of
from kvstore.protocol.runs import PAGE_BYTES
from kvstore.server.core import Core
from kvstore.server.pool import pages_of
from kvstore.server.sessions import MAX_LATE, Session
from kvstore.server.spaces import Chunk

_MAX_DISPLACED: Final = 256  # chunks evicted for one request before others have their turn: some milliseconds


@dataclass
class _Batch:
    """Grants that are being collected.

    Attributes:
        session: whose.
        serial: of the request.
        refs: the chunks wanted.
        is_write: whether to write them.
        grants: for the first chunks, so far.
        num_waiting: of these, the ones being read from disk.
        is_late: the answer does not follow the request at once.
    """

    session: Session
    serial: int
    refs: list[ChunkRef]
    is_write: bool
    grants: list[messages.Grant] = field(default_factory=list)
    num_waiting: int = 0
    is_late: bool = False

    @property
    def is_done(self) -> bool:
        return len(self.grants) == len(self.refs) and not self.num_waiting


class Grants:
    """Belongs to the thread that decides.

    Args:
        core: what the parts of the server share.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._loading: dict[Chunk, list[Callable[[Outcome], None]]] = {}
        self._waiting: deque[_Batch] = deque()  # for pages

    def find(self, session: Session, request: messages.Reserve | messages.Acquire) -> messages.Granted | None:
        """The grants that a client asks for; None if the answer is sent later.

        Raises:
            ProtocolError: there can be no such chunks, or too many such requests of this client are unanswered.
        """
        refs = messages.unpack_refs(request.refs)
        if not all(map(session.space.has_size, refs)):
            raise ProtocolError(f"a chunk of this namespace has 1 to {session.space.layout.blocks_per_chunk} blocks")
        return self._collect(_Batch(session, request.serial, refs, isinstance(request, messages.Reserve)))

    def go_on(self) -> None:
        """Go on, in order, with requests that wait for pages, until one still lacks some."""
        waiting, self._waiting = self._waiting, deque()
        while waiting and not self._waiting:
            self._resume(waiting.popleft())
        self._waiting.extend(waiting)

    def _collect(self, batch: _Batch) -> messages.Granted | None:
        """Find pages for the chunks; go on later after some evictions, so that others have their turn."""
        stock = self._core.stock
        most = stock.num_displaced + _MAX_DISPLACED
        while len(batch.grants) < len(batch.refs):
            if stock.num_displaced >= most:
                self._be_late(batch)
                self._core.report(partial(self._resume, batch))
                return None
            ref = batch.refs[len(batch.grants)]
            if self._lacks_pages(batch, ref):
                self._be_late(batch)
                self._waiting.append(batch)
                return None
            if batch.is_write:
                batch.grants.append(self._reserve(batch.session, ref))
            else:
                self._acquire(batch, ref)
        if batch.is_done:
            return self._granted(batch)
        self._be_late(batch)
        return None

    def _lacks_pages(self, batch: _Batch, ref: ChunkRef) -> bool:
        """Whether a chunk needs pages that the pool will have soon."""
        pool, space = self._core.pool, batch.session.space
        if not pool.is_growing or self._core.is_closing:
            return False
        chunk = space.chunks.get(ref)
        if not batch.is_write and (chunk is None or chunk.runs):
            return False
        return pages_of(space.layout.payload_bytes(ref.num_blocks)) > pool.free.num_free

    def _resume(self, batch: _Batch) -> None:
        granted = None if batch.session.is_over else self._collect(batch)
        if granted is not None:
            self._core.send(batch.session.peer, granted, ())
        self._core.sweep()

    def _be_late(self, batch: _Batch) -> None:
        if not batch.is_late:
            batch.is_late = True
            batch.session.num_late += 1
            if batch.session.num_late > MAX_LATE:
                raise ProtocolError(f"more than {MAX_LATE} requests for grants at once")

    def _reserve(self, session: Session, ref: ChunkRef) -> messages.Grant:
        if self._core.is_closing or not self._may_lease(session, ref):
            return _no_grant(Outcome.FAILED)
        chunk = self._core.stock.reserve(session.space, ref, session.capacity_bytes)
        if chunk is None:
            return _no_grant(Outcome.FULL)
        return self._grant(session, chunk, Outcome.STORED)

    def _acquire(self, batch: _Batch, ref: ChunkRef) -> None:
        number, session = len(batch.grants), batch.session
        batch.grants.append(_no_grant(Outcome.FAILED))
        if not self._may_lease(session, ref):
            return
        chunk = self._core.stock.acquire(session.space, ref)
        if isinstance(chunk, Outcome):
            batch.grants[number] = _no_grant(chunk)
        elif chunk.is_whole:
            batch.grants[number] = self._grant(session, chunk, Outcome.HIT)
        else:
            batch.num_waiting += 1
            self._load(chunk, partial(self._arrived, batch, number, chunk))

    def _granted(self, batch: _Batch) -> messages.Granted:
        batch.session.num_late -= batch.is_late
        return messages.Granted(batch.serial, batch.grants, self._core.usage(batch.session.space))

    def _load(self, chunk: Chunk, arrived: Callable[[Outcome], None]) -> None:
        """Read a chunk, which is in use, from disk to its pages; several requests wait for one read."""
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
        core.disk.read(chunk, parts, done, lambda: core.stock.release(chunk))

    def _arrived(self, batch: _Batch, number: int, chunk: Chunk, outcome: Outcome) -> None:
        if outcome is Outcome.HIT and chunk.is_gone:
            outcome = Outcome.MISS
        if outcome is Outcome.HIT and not batch.session.is_over:
            batch.grants[number] = self._grant(batch.session, chunk, outcome)
        else:
            batch.grants[number] = _no_grant(outcome)
            self._core.stock.release(chunk)
        batch.num_waiting -= 1
        if batch.is_done and not batch.session.is_over:
            self._core.send(batch.session.peer, self._granted(batch), ())

    def _may_lease(self, session: Session, ref: ChunkRef) -> bool:
        payload_bytes = session.space.layout.payload_bytes(ref.num_blocks)
        return self._core.sessions.may_lease(session, pages_of(payload_bytes) * PAGE_BYTES)

    def _grant(self, session: Session, chunk: Chunk, outcome: Outcome) -> messages.Grant:
        lease = self._core.sessions.lease(session, chunk, is_write=outcome is Outcome.STORED)
        if outcome is Outcome.HIT:
            self._core.stock.note_read(chunk)
            self._core.stock.holds.note_read(chunk, by_owner=bool(session.token))
        return messages.Grant(number_of(outcome), lease.number, chunk.runs)


def _no_grant(outcome: Outcome) -> messages.Grant:
    return messages.Grant(number_of(outcome))
