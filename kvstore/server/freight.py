"""Payload in messages: pieces that clients elsewhere send and fetch. Copies and checksums run on their own threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.chunks import ByteArray, Outcome
from kvstore.errors import ProtocolError
from kvstore.protocol import messages
from kvstore.protocol.pieces import Placing, checksum
from kvstore.server.pool import Pool
from kvstore.server.sessions import MAX_PIECES, Lease, Peer, Session, Sessions
from kvstore.server.spaces import Chunk

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_MAX_COPY_THREADS: Final = 4
_MAX_SUMS: Final = 256  # of one chunk: those of all pieces of one GiB


@dataclass
class Ways:
    """How the service reaches the outside.

    Attributes:
        send: an answer, and frames of payload behind it, to a client.
        report: takes what is to be done by the thread that decides.
        is_open: whether a token is that of a connection to the unix socket.
        stats: everything counted.
        may_order: whether who just sent something is one of those who run the server.
        now: seconds.
    """

    send: Callable[[Peer, messages.Answer, Sequence[Buffer]], None]
    report: Callable[[Callable[[], None]], None]
    is_open: Callable[[bytes], bool]
    stats: Callable[[], dict[str, Any]]
    may_order: Callable[[Peer], bool]
    now: Callable[[], float]


class Freight:
    """Moves pieces between messages and pages. Belongs to the thread that decides.

    Args:
        pool: the memory.
        sessions: whose leases the pieces are about.
        ways: to the outside.
    """

    def __init__(self, pool: Pool, sessions: Sessions, ways: Ways) -> None:
        self._pool = pool
        self._sessions = sessions
        self._ways = ways
        self._copiers = ThreadPoolExecutor(_copy_threads(), "kvstore-copy")

    def take(self, session: Session, request: messages.Piece, frame: Buffer) -> None:
        """Put a piece where it belongs, and say so when it is there.

        Raises:
            ProtocolError: it does not belong into its chunk, or too many are under way.
        """
        lease = session.leases.get(request.lease)
        if lease is None or not lease.is_write:
            self._say(session, request.serial, Outcome.FAILED)
            return
        source = memoryview(frame)
        parts = self._parts(lease, request.offset_bytes, len(source))

        def copied(*, is_sound: bool) -> None:
            if is_sound:
                lease.copied_bytes += len(source)
                self._note(lease.chunk, (request.offset_bytes, len(source)), request.checksum)
            self._end(session, lease, is_sound=is_sound)
            self._say(session, request.serial, Outcome.STORED if is_sound else Outcome.FAILED)

        def copy() -> None:
            is_sound = _place(source, parts) == request.checksum
            self._ways.report(lambda: copied(is_sound=is_sound))

        self._begin(session, lease)
        self._start(copy, lambda: copied(is_sound=False))

    def hand_out(self, session: Session, request: messages.Fetch) -> None:
        """Send a part of a chunk, once its checksum is known: at once if it was sent or asked for like that before.

        Raises:
            ProtocolError: it is no part of its chunk, or too many are under way.
        """
        lease = session.leases.get(request.lease)
        if lease is None or lease.is_write:
            self._say(session, request.serial, Outcome.FAILED)
            return
        parts = self._parts(lease, request.offset_bytes, request.num_bytes)
        sums, part_of_chunk = lease.chunk.sums, (request.offset_bytes, request.num_bytes)

        def send(added_up: bytes) -> None:
            self._ways.send(session.peer, messages.Data(request.serial, added_up), [part.data for part in parts])

        if part_of_chunk in sums:
            send(sums[part_of_chunk])
            return

        def summed(added_up: bytes) -> None:
            if lease.is_over:
                self._say(session, request.serial, Outcome.FAILED)
            else:
                self._note(lease.chunk, part_of_chunk, added_up)
                send(added_up)
            self._end(session, lease, is_sound=True)

        def add_up() -> None:
            added_up = checksum(part.data for part in parts)
            self._ways.report(lambda: summed(added_up))

        def give_up() -> None:
            self._end(session, lease, is_sound=False)
            self._say(session, request.serial, Outcome.FAILED)

        self._begin(session, lease)
        self._start(add_up, give_up)

    def close(self) -> None:
        """End the threads."""
        self._copiers.shutdown(wait=True, cancel_futures=True)

    def _start(self, action: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Let a thread do something, and give it up if that raises: its pages would stay in use for ever."""

        def look(future: Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                logger.error("a thread of the cache server that copies failed", exc_info=error)
                self._ways.report(give_up)

        self._copiers.submit(action).add_done_callback(look)

    def _begin(self, session: Session, lease: Lease) -> None:
        if session.num_pieces >= MAX_PIECES:
            raise ProtocolError(f"more than {MAX_PIECES} pieces at once")
        session.num_pieces += 1
        lease.copies += 1

    @staticmethod
    def _note(chunk: Chunk, part: tuple[int, int], added_up: bytes) -> None:
        """Keep a checksum, so that it need not be calculated again; of honest clients all."""
        if part in chunk.sums or len(chunk.sums) < _MAX_SUMS:
            chunk.sums[part] = added_up

    def _end(self, session: Session, lease: Lease, *, is_sound: bool) -> None:
        session.num_pieces -= 1
        self._sessions.copied(lease, is_sound=is_sound)

    def _say(self, session: Session, serial: int, outcome: Outcome) -> None:
        self._ways.send(session.peer, messages.Done(serial, messages.pack_outcomes([outcome]), messages.NO_USAGE), ())

    def _parts(self, lease: Lease, offset_bytes: int, num_bytes: int) -> list[ByteArray]:
        """Views of a part of a chunk's payload."""
        if offset_bytes + num_bytes > lease.chunk.num_bytes:
            raise ProtocolError("a part of a chunk lies behind its end")
        return self._pool.parts(lease.chunk.runs, offset_bytes, num_bytes)


def _copy_threads() -> int:
    """For half of the processors at most: sending, receiving and deciding needs the others."""
    return max(1, min(_MAX_COPY_THREADS, len(os.sched_getaffinity(0)) // 2))


def _place(source: memoryview, parts: Sequence[ByteArray]) -> bytes:
    """Copy bytes to the places that take exactly as many; returns the checksum of what is there then."""
    placing = Placing()
    begin = 0
    for part in parts:
        placing.copy(source[begin : begin + len(part)], part)
        begin += len(part)
    return placing.checksum
