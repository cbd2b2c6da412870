"""Clients, and their leases of pages in the pool.

A *lease* is the right to read or write the pages of one chunk. Its number is never used again, so a late request with
an old number finds no lease.

A client that maps the pool can write to it until it is gone. So its leases end with its connection to the unix socket,
which only the client or its death closes, and never with a timer. Other clients send bytes in messages, and the server
copies them to their pages, so the leases of such a client also end when it was silent for a while.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ProtocolError
from kvstore.protocol.progress import SILENT_BEATS, Progress
from kvstore.server.clients import IPC, TCP, Client, Shares
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock

SILENCE_S = 30.0  # after which the leases of a client that does not map the pool end
FORGET_S = 600.0  # after which such a client is forgotten; it may say hello again
MAX_PIECES = 16  # under way for one client
_MAX_PARTS = 64  # of one chunk, with gaps between them
MAX_LATE = 16  # requests of one client that are answered later


@dataclass
class Lease:
    """The right to read, or write, the pages of a chunk.

    Attributes:
        number: its number.
        chunk: the chunk.
        since_s: time at which it began.
        is_write: True to write the chunk, False to read it.
        copies: number of pieces that the server is copying; the pages are kept until they have ended.
        arrived: begin and end of each range that has arrived, in order; adjacent pieces are one range.
        is_over: True once it was given back, and waits for ``copies`` to end.
        is_sound: True if the checksum of every piece so far was right.
    """

    number: int
    chunk: Chunk
    since_s: float
    is_write: bool
    copies: int = 0
    arrived: list[tuple[int, int]] = field(default_factory=list)
    is_over: bool = False
    is_sound: bool = True

    @property
    def is_covered(self) -> bool:
        """True if every byte of the chunk has arrived in a piece."""
        return self.arrived == [(0, self.chunk.num_bytes)]

    def note_arrived(self, begin: int, end: int) -> bool:
        """Note a piece; return False if a part of it has arrived already, or there are too many gaps to remember."""
        at = bisect(self.arrived, (begin, end))
        first = last = at
        if at and self.arrived[at - 1][1] >= begin:
            if self.arrived[at - 1][1] > begin:
                return False
            first, begin = at - 1, self.arrived[at - 1][0]
        if at < len(self.arrived) and self.arrived[at][0] <= end:
            if self.arrived[at][0] < end:
                return False
            last, end = at + 1, self.arrived[at][1]
        if len(self.arrived) - (last - first) >= _MAX_PARTS:
            return False
        self.arrived[first:last] = [(begin, end)]
        return True


@dataclass
class Session:
    """A client after its hello.

    Attributes:
        peer: its name at the sockets.
        client: its identity.
        space: the namespace that it uses.
        token: token of its connection to the unix socket; empty without one.
        heard_s: time of its last message.
        leases: its leases by number.
        leased_bytes: bytes of the pages of all its leases.
        num_pieces: number of pieces that are being copied for it.
        unsent_bytes: bytes of copies made for it that it has not received yet.
        num_late: number of its requests that are to be answered later, in slices or from disk.
        is_over: True once it has ended.
        fd: descriptor of its connection, if known; otherwise -1.
        progress: last report on the hand-overs that it sends; None if it sends no reports, or no longer.
        beat_s: longest time between two such reports, as promised by it; 0 without such a promise.
        attached: description of its memory that is read here; empty if none is.
        hears_ends: True if it knows times to live.
    """

    peer: Peer
    client: Client
    space: Space
    token: bytes
    heard_s: float
    leases: dict[int, Lease] = field(default_factory=dict)
    leased_bytes: int = 0
    num_pieces: int = 0
    unsent_bytes: int = 0
    num_late: int = 0
    is_over: bool = False
    fd: int = -1
    progress: Progress | None = None
    beat_s: float = 0.0
    attached: bytes = b""
    hears_ends: bool = True

    def begin_late(self) -> None:
        """Add to ``num_late`` a request that is answered later, and is to be subtracted then.

        Raises:
            ProtocolError: there are too many.
        """
        self.num_late += 1
        if self.num_late > MAX_LATE:
            raise ProtocolError(f"more than {MAX_LATE} slow requests at once")


class Peer(NamedTuple):
    """A client as the sockets know it.

    Attributes:
        socket: the number of the socket that it uses.
        name: the socket's name for it.
    """

    socket: int
    name: bytes


class Sessions:
    """All sessions and their leases. Belongs to the thread that decides.

    Args:
        stock: the chunks that are leased.
        pool_bytes: bytes of the pool. All leases together may hold three quarters, and those of one session a quarter.
        most: the most sessions by socket.
        num_sharers: number of tenants, and of keys without one. If there are several, each may have half of the
            sessions and of the bytes.
    """

    def __init__(self, stock: Stock, pool_bytes: int, most: Mapping[int, int], num_sharers: int = 0) -> None:
        self.by_peer: dict[Peer, Session] = {}
        self.num_leases = 0
        self._counts = Shares(sum(most.values()), most)
        far_bytes = {TCP: pool_bytes * 5 // 8} if IPC in most else None  # an eighth is left for this host
        self._leased = Shares(pool_bytes * 3 // 4, far_bytes)
        self._shares = most.get(TCP, 0) // 2, pool_bytes // 2
        self.share_between(num_sharers)
        self._by_token: dict[bytes, Session] = {}
        self._stock = stock
        self._max_session_bytes = max(pool_bytes // 4, 1)
        self._numbers = itertools.count(1)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the pages of all leases."""
        return self._leased.held

    def share_between(self, num_sharers: int) -> None:
        """Change the number of tenants and keys."""
        sessions, leased_bytes = self._shares if num_sharers > 1 else (None, None)
        self._counts.bound_sharers(sessions)
        self._leased.bound_sharers(leased_bytes)

    def may_begin(self, client: Client) -> bool:
        """Tell if a client may begin another session."""
        return self._counts.has_room(client, 1)

    def begin(self, peer: Peer, client: Client, space: Space, token: bytes, now_s: float) -> Session:
        """Begin the session of a client that said hello."""
        session = Session(peer, client, space, token, now_s)
        self._counts.take(client, 1)
        space.num_sessions += 1
        self.by_peer[peer] = session
        if token:
            self._by_token[token] = session
        return session

    def end(self, session: Session) -> Iterator[None]:
        """End the session of a client that is gone, and then one of its leases in each step."""
        if session.is_over:
            return
        session.is_over = True
        self._counts.give(session.client, 1)
        session.space.num_sessions -= 1
        self.by_peer.pop(session.peer, None)
        self._by_token.pop(session.token, None)
        for lease in list(session.leases.values()):
            self.give_back(session, lease, is_whole=False)
            yield

    def mapped(self) -> list[Session]:
        """Return the sessions of clients that map the pool, also of those that were disconnected for what they sent."""
        return list(self._by_token.values())

    def of_token(self, token: bytes) -> Session | None:
        """Return the session of a connection to the unix socket, if its client said hello."""
        return self._by_token.get(token)

    def may_lease(self, session: Session, num_bytes: int) -> bool:
        """Tell if a session may lease so many more bytes. One lease is always allowed, because a pool may be small."""
        if not self.num_leases:
            return True
        is_fair = not session.leases or session.leased_bytes + num_bytes <= self._max_session_bytes
        return is_fair and self._leased.has_room(session.client, num_bytes)

    def lease(self, session: Session, chunk: Chunk, *, is_write: bool) -> Lease:
        """Lease to a client a chunk whose use was counted already."""
        lease = Lease(next(self._numbers), chunk, session.heard_s, is_write)
        session.leases[lease.number] = lease
        session.leased_bytes += chunk.size_bytes
        self._leased.take(session.client, chunk.size_bytes)
        self.num_leases += 1
        return lease

    def give_back(self, session: Session, lease: Lease, *, is_whole: bool) -> Outcome:
        """End a lease, and return its outcome. A write succeeds if ``is_whole``, when all bytes have arrived."""
        del session.leases[lease.number]
        session.leased_bytes -= lease.chunk.size_bytes
        self._leased.give(session.client, lease.chunk.size_bytes)
        self.num_leases -= 1
        lease.is_over = True
        if lease.copies:  # it cannot be whole while pieces of it are being copied
            return Outcome.FAILED
        return self.finish(lease, is_whole=is_whole)

    def copied(self, lease: Lease, *, is_sound: bool) -> None:
        """Note that a piece of a lease was copied, and whether its checksum was right."""
        lease.copies -= 1
        lease.is_sound = lease.is_sound and is_sound
        if lease.is_over and not lease.copies:
            self.finish(lease, is_whole=False)

    def finish(self, lease: Lease, *, is_whole: bool) -> Outcome:
        """Tell the stock that the use of a chunk has ended."""
        if lease.is_write:
            return self._stock.complete(lease.chunk, is_whole=is_whole and lease.is_sound)
        self._stock.release(lease.chunk)
        return Outcome.HIT

    def expire(self, now_s: float) -> list[Session]:
        """Return the sessions of clients that do not map the pool and were silent for too long."""
        return [
            session
            for session in self.by_peer.values()
            if not session.token and now_s - session.heard_s > (SILENCE_S if session.leases else FORGET_S)
        ]

    def silent(self, now_s: float) -> list[Session]:
        """Return the sessions that hand over but have missed their beats, because they hang or their host is gone."""
        return [
            session
            for session in self.by_peer.values()
            if session.progress is not None
            and session.beat_s
            and now_s - session.heard_s > SILENT_BEATS * session.beat_s
        ]
