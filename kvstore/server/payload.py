"""Payload in messages, for clients that do not map the pool. Copies and checksums run on separate threads."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import ProtocolError
from kvstore.model.threads import start
from kvstore.protocol import messages
from kvstore.protocol.outcomes import pack_outcomes
from kvstore.protocol.payload import Placing, checksum
from kvstore.server.clients import Shares
from kvstore.server.core import Core
from kvstore.server.sessions import MAX_PIECES, Lease, Session
from kvstore.server.spaces import Chunk

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_COPY_THREADS: Final = 4
_MAX_UNSENT_BYTES: Final = 256 << 20  # copies of leading blocks, outside the pool; one key may have half of it
_MAX_SESSION_UNSENT_BYTES: Final = MAX_PIECES * messages.PIECE_BYTES
_MAX_SUMS: Final = 256  # of one chunk, as many as a chunk of one GiB has pieces


class Payload:
    """Moves pieces between messages and pages. Belongs to the thread that decides.

    Args:
        core: the shared state of the server.
    """

    def __init__(self, core: Core) -> None:
        self.num_under_way = 0  # actions on threads
        self._core = core
        self._copiers = ThreadPoolExecutor(_copy_threads(), "kvstore-copy")
        self._unsent = Shares(_MAX_UNSENT_BYTES, by_sharer=_MAX_UNSENT_BYTES // 2)

    def answer(
        self, session: Session, request: messages.Piece | messages.Fetch | messages.Front, frames: Sequence[Buffer]
    ) -> messages.Answer | None:
        """Take a piece, or send a part of a chunk. The answer is sent later, if it can be done.

        Raises:
            ProtocolError: the part is not inside its chunk, or too many are under way.
        """
        if isinstance(request, messages.Piece):
            return self._take(session, request, frames[0])
        return self._hand_out(session, request)

    def _take(self, session: Session, request: messages.Piece, frame: Buffer) -> messages.Answer | None:
        """Start to copy a piece to its pages."""
        lease = session.leases.get(request.lease)
        if lease is None or not lease.is_write:
            return done(request, Outcome.FAILED)
        source = memoryview(frame)
        parts = self.parts(lease, request.offset_bytes, len(source))

        def copied(added_up: bytes | None) -> None:
            end_bytes = request.offset_bytes + len(source)
            is_sound = added_up == request.checksum and lease.note_arrived(request.offset_bytes, end_bytes)
            if is_sound:
                self._note(lease.chunk, (request.offset_bytes, len(source)), request.checksum)
            self.end(session, lease, is_sound=is_sound)
            self._core.send(session.peer, done(request, Outcome.STORED if is_sound else Outcome.FAILED), ())

        self.begin(session, lease)
        self.start(partial(_place, source, parts), copied)
        return None

    def _hand_out(self, session: Session, request: messages.Fetch | messages.Front) -> messages.Answer | None:
        """Send a part of a chunk, or of its leading blocks, with its checksum.

        It is sent at once if the checksum is known from an earlier piece or request.
        """
        lease = session.leases.get(request.lease)
        if lease is None or lease.is_write:
            return done(request, Outcome.FAILED)
        if isinstance(request, messages.Front):
            is_fair = session.unsent_bytes + request.num_bytes <= _MAX_SESSION_UNSENT_BYTES
            if not (is_fair and self._unsent.has_room(session.client, request.num_bytes)):
                self._core.deny(session.client, "bodies", "it has not received the bytes that it requested before")
                return done(request, Outcome.FAILED)
            self._add_up(session, request, lease, self._front(lease, request))
            return None
        parts = self.parts(lease, request.offset_bytes, request.num_bytes)
        known = lease.chunk.sums.get((request.offset_bytes, request.num_bytes))
        if known is not None:
            self._send(session, request, known, parts)
        else:
            self._add_up(session, request, lease, lambda: parts)
        return None

    def _add_up(
        self,
        session: Session,
        request: messages.Fetch | messages.Front,
        lease: Lease,
        find: Callable[[], Sequence[ByteArray]],
    ) -> None:
        """Start to find the requested bytes and to compute their checksum; then send the checksum and the bytes."""

        def add_up() -> tuple[bytes, Sequence[ByteArray]]:
            parts = find()
            return checksum(part.data for part in parts), parts

        def summed(found: tuple[bytes, Sequence[ByteArray]] | None) -> None:
            if found is None or lease.is_over:
                self._core.send(session.peer, done(request, Outcome.FAILED), ())
            else:
                added_up, parts = found
                if isinstance(request, messages.Front):
                    self._note_copies(session, parts)
                else:
                    self._note(lease.chunk, (request.offset_bytes, request.num_bytes), added_up)
                self._send(session, request, added_up, parts)
            self.end(session, lease, is_sound=found is not None)

        self.begin(session, lease)
        self.start(add_up, summed)

    def _note_copies(self, session: Session, parts: Sequence[ByteArray]) -> None:
        """Count copies, which take extra memory until they are sent, as a client may request much and read none."""
        for part in parts:
            session.unsent_bytes += part.nbytes
            self._unsent.take(session.client, part.nbytes)
            sent = weakref.finalize(part, self._core.report, partial(self._note_sent, session, part.nbytes))
            sent.atexit = False

    def _note_sent(self, session: Session, num_bytes: int) -> None:
        session.unsent_bytes -= num_bytes
        self._unsent.give(session.client, num_bytes)

    def _send(self, session: Session, request: messages.Request, added_up: bytes, parts: Sequence[ByteArray]) -> None:
        self._core.send(session.peer, messages.Data(request.serial, added_up), [part.data for part in parts])

    def close(self) -> None:
        """End the threads."""
        self._copiers.shutdown(wait=True, cancel_futures=True)

    def start(self, action: Callable[[], Result], ended: Callable[[Result | None], None]) -> None:
        """Run an action on a thread; the thread that decides calls ``ended`` with its result, None if there is none."""

        def look(future: Future[Result | None]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                logger.error("unexpected error on a copy thread of the cache server", exc_info=error)
            self._core.report(partial(tell, None if error is not None else future.result()))

        def tell(result: Result | None) -> None:
            self.num_under_way -= 1
            ended(result)

        self.num_under_way += 1
        start(self._copiers, action, lambda: None).add_done_callback(look)

    def begin(self, session: Session, lease: Lease) -> None:
        """Keep the pages of a lease until ``end``.

        Raises:
            ProtocolError: too many pieces of this client are under way.
        """
        if session.num_pieces >= MAX_PIECES:
            raise ProtocolError(f"more than {MAX_PIECES} pieces at once")
        session.num_pieces += 1
        lease.copies += 1

    @staticmethod
    def _note(chunk: Chunk, part: tuple[int, int], added_up: bytes) -> None:
        """Keep a checksum, so that readers need not wait for it. The bound suffices for every honest client."""
        if part in chunk.sums or len(chunk.sums) < _MAX_SUMS:
            chunk.sums[part] = added_up

    def end(self, session: Session, lease: Lease, *, is_sound: bool) -> None:
        """End a piece, which has arrived or will never be written to again."""
        session.num_pieces -= 1
        self._core.sessions.copied(lease, is_sound=is_sound)

    def parts(self, lease: Lease, offset_bytes: int, num_bytes: int) -> list[ByteArray]:
        """Return views of a part of a chunk's payload.

        Raises:
            ProtocolError: it is not inside its chunk.
        """
        if offset_bytes + num_bytes > lease.chunk.num_bytes:
            raise ProtocolError("the range exceeds the chunk")
        return self._core.pool.parts(lease.chunk.runs, offset_bytes, num_bytes)

    def _front(self, lease: Lease, request: messages.Front) -> Callable[[], Sequence[ByteArray]]:
        """Return a function that reads a part of a chunk's leading blocks, laid out as a shorter chunk, on any thread.

        The function joins the many short ranges, because that is faster than to send each as a frame.

        Raises:
            ProtocolError: the part is not inside the leading blocks, or these are all blocks of the chunk.
        """
        layout, ref, runs = lease.chunk.space.layout, lease.chunk.ref, lease.chunk.runs
        begin, end = request.offset_bytes, request.offset_bytes + request.num_bytes
        if request.front_blocks >= ref.num_blocks or end > layout.payload_bytes(request.front_blocks):
            raise ProtocolError("the range exceeds the chunk's leading blocks")

        def join() -> Sequence[ByteArray]:
            ranges = _between(layout.front_ranges(ref.num_blocks, request.front_blocks), begin, end)
            found = (self._core.pool.parts(runs, first, size_bytes) for first, size_bytes in ranges)
            return [np.concatenate([part for parts in found for part in parts])]

        return join


def _between(ranges: Iterable[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and length of each piece of the bytes ``begin`` to ``end`` of the concatenated ranges."""
    before = 0
    for first, last in ranges:
        skipped, wanted = max(0, begin - before), min(last - first, end - before)
        if skipped < wanted:
            yield first + skipped, wanted - skipped
        before += last - first


def _copy_threads() -> int:
    """Return at most half of the processors, because sending, receiving and deciding need the others."""
    return max(1, min(_MAX_COPY_THREADS, len(os.sched_getaffinity(0)) // 2))


def done(request: messages.Request, outcome: Outcome) -> messages.Done:
    """Return the answer to a request about one piece."""
    return messages.Done(request.serial, pack_outcomes([outcome]), messages.NO_USAGE)


def _place(source: memoryview, parts: Sequence[ByteArray]) -> bytes:
    """Copy bytes to parts that hold exactly as many; return the checksum of the copied bytes."""
    placing = Placing()
    begin = 0
    for part in parts:
        placing.copy(source[begin : begin + len(part)], part)
        begin += len(part)
    return placing.checksum
