"""What each request does. Runs on the one thread that decides; copies, checksums and the disk are left to others."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ProtocolError
from kvstore.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.messages import Refusal
from kvstore.server.freight import Freight, Ways
from kvstore.server.orders import Orders, report
from kvstore.server.owner import Owner
from kvstore.server.places import Places
from kvstore.server.pool import Pool
from kvstore.server.sessions import MAX_SESSIONS, Peer, Session, Sessions
from kvstore.server.shelves import Shelves
from kvstore.server.spaces import NO_QUOTA, Chunk, Space
from kvstore.server.stock import Stock

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger(__name__)

_MAX_UNWRITTEN: Final = 65_536  # chunks that wait for the disk; they are in memory, and beyond that stay there only
_NO_OPERATOR: Final = (
    "this is for those who run the server: ask over its kvs+ipc address, or as one of its server_operators"
)
_MAX_TOUCHES: Final = 256  # lookups that the policies are yet to hear of


class Service:
    """Requests of all clients. Belongs to the thread that decides.

    Args:
        pool: the memory.
        stock: what is where.
        sessions: who is there.
        shelves: the disk, or None.
        ways: to the outside.
        max_writes: chunks on their way to disk at once.
        pin_max_s: how long a pin lasts at most.
        owner: the engine whose chunks are the only ones taken; None for everybody's.
    """

    def __init__(
        self,
        pool: Pool,
        stock: Stock,
        sessions: Sessions,
        shelves: Shelves | None,
        ways: Ways,
        *,
        max_writes: int,
        pin_max_s: float,
        owner: Owner | None = None,
    ) -> None:
        self.is_closing = False
        self.num_writing = 0
        self._pool = pool
        self._stock = stock
        self._sessions = sessions
        self._shelves = shelves
        self._ways = ways
        self._max_writes = max_writes
        self._owner = owner
        self._touches: deque[tuple[Space, Sequence[ChunkRef]]] = deque(maxlen=_MAX_TOUCHES)
        self._unwritten: deque[Chunk] = deque(maxlen=_MAX_UNWRITTEN)
        self._places = Places(pool, stock, sessions, shelves, ways, keeper=self)
        self._orders = Orders(stock, ways, pin_max_s, self._clear_space)
        self._freight = Freight(pool, sessions, ways)

    @property
    def num_unwritten(self) -> int:
        """Chunks on their way to disk, or waiting for it."""
        return self.num_writing + len(self._unwritten)

    @property
    def is_changing_files(self) -> bool:
        """Whether chunks are on their way to disk, or files of those that have gone are still there."""
        return bool(self.num_unwritten) or (self._shelves is not None and self._shelves.is_busy)

    def handle(self, peer: Peer, message: Sequence[Buffer]) -> None:
        """Carry out a request: a frame, and behind it none or one of payload.

        Raises:
            ProtocolError: it is malformed: its sender is to lose the connection.
        """
        if not 1 <= len(message) <= 2:
            raise ProtocolError(f"a message of {len(message)} frames")
        request, frames = messages.decode_request(memoryview(message[0])), message[1:]
        if isinstance(request, messages.Piece) != bool(frames):
            raise ProtocolError("payload stands behind a piece, and behind nothing else")
        answer = self._answer_anybody(peer, request)
        if answer is not None:
            self._ways.send(peer, answer, ())
        elif (session := self._sessions.by_peer.get(peer)) is None:
            refusal = messages.Refused(request.serial, Refusal.NO_SESSION, "say hello first")
            self._ways.send(peer, refusal, ())
        else:
            session.heard_s = self._ways.now()
            self._serve(session, request, frames)
        self.sweep()

    @property
    def has_leisure_work(self) -> bool:
        """Whether something is left that can wait until nobody asks for anything."""
        return bool(self._touches)

    @property
    def is_behind(self) -> bool:
        """Whether more of that waits than can be remembered."""
        return len(self._touches) == _MAX_TOUCHES

    def do_leisure_work(self) -> None:
        """Do a little of that."""
        if self._touches:
            self._stock.touch(*self._touches.popleft())

    def hang_up(self, token: bytes) -> None:
        """A connection to the unix socket was closed: its client can no longer touch the pool."""
        session = self._sessions.of_token(token)
        if session is not None:
            self.end(session)

    def end(self, session: Session) -> None:
        """A client is gone."""
        self._sessions.end(session)
        self.sweep()

    def expire(self) -> None:
        """End the clients of whom nothing was heard for too long, and whatever else has had its time."""
        for session in self._sessions.expire(self._ways.now()):
            self.end(session)
        self._stock.pins.expire(self._ways.now())
        self._stock.forget_empty()
        self.sweep()

    def enter(self, namespace: Namespace) -> None:
        """The owner's chunks are of another namespace from now on: those of others go, and who sent them."""
        assert self._owner is not None
        self._owner.namespace = namespace
        for session in list(self._sessions.by_peer.values()):
            if not session.token and session.space.namespace.id != namespace.id:
                self.end(session)
        for space in self._stock.spaces.values():
            if space.namespace.id != namespace.id:
                self._stock.clear(space)
        self.sweep()

    def sweep(self) -> None:
        """Let the files go of chunks that have gone."""
        removals, forgotten = self._stock.take_removals(), self._stock.take_forgotten()
        if self._shelves is not None:
            if removals:
                self._shelves.remove(removals)
            for space in forgotten:
                self._shelves.forget(space)

    def close(self) -> None:
        """End the threads."""
        self._freight.close()

    def _answer_anybody(self, peer: Peer, request: messages.Request) -> messages.Answer | None:
        """The answer to what may be asked without a session; None if it is something else."""
        match request:
            case messages.Hello():
                return self._hello(peer, request)
            case messages.Ping():
                return report(request, {"status": "closing" if self.is_closing else "ok"})
            case messages.Stats():
                return report(request, self._ways.stats())
            case (
                messages.ClearSpaces() | messages.Pin() | messages.Explain() | messages.Pins() | messages.UnpinSpaces()
            ):
                if not self._ways.may_order(peer):
                    return messages.Refused(request.serial, Refusal.NO_OPERATOR, _NO_OPERATOR)
                return self._orders.carry_out(request)
        return None

    def _serve(self, session: Session, request: messages.Request, frames: Sequence[Buffer]) -> None:
        match request:
            case messages.Piece():
                self._freight.take(session, request, frames[0])
            case messages.Fetch():
                self._freight.hand_out(session, request)
            case messages.Release():
                self._release(session, request)
            case _:
                answer = self._answer(session, request)
                if answer is not None:
                    self._ways.send(session.peer, answer, ())

    def _answer(self, session: Session, request: messages.Request) -> messages.Answer | None:
        """The answer to a client; None if it will be sent later."""
        match request:
            case messages.Lookup():
                return self._lookup(session, request)
            case messages.Acquire():
                return self._places.find(session, request)
            case messages.Reserve():
                return self._places.find(session, request)
            case messages.Commit():
                return self._commit(session, request)
            case messages.Remove():
                self._stock.remove(session.space, messages.unpack_refs(request.refs))
            case messages.Clear():
                return self._clear(session, request)
            case messages.Scan():
                return self._scan(session, request)
        return self._done(session, request)

    def _usage(self, space: Space) -> messages.Usage:
        return messages.Usage(self._stock.stamp, space.used_bytes)

    def _done(self, session: Session, request: messages.Request, outcomes: Sequence[Outcome] = ()) -> messages.Done:
        return messages.Done(request.serial, messages.pack_outcomes(outcomes), self._usage(session.space))

    # -- of anybody --------------------------------------------------------------------------------------------------

    def _hello(self, peer: Peer, request: messages.Hello) -> messages.Answer:
        if request.version != messages.PROTOCOL_VERSION:
            message = f"this server speaks version {messages.PROTOCOL_VERSION} of the protocol, not {request.version}"
            return messages.Refused(request.serial, Refusal.VERSION, message)
        if self.is_closing:
            return messages.Refused(request.serial, Refusal.CLOSING, "the server is closing")
        if request.token and not self._ways.is_open(request.token):
            return messages.Refused(request.serial, Refusal.TOKEN, "the connection to the unix socket is gone")
        if self._owner is not None and (objection := self._owner.objection(request)):
            return messages.Refused(request.serial, Refusal.FOREIGN, objection)
        old = self._sessions.by_peer.get(peer) or (request.token and self._sessions.of_token(request.token))
        if old:
            raise ProtocolError("hello was said already")
        if len(self._sessions.by_peer) >= MAX_SESSIONS:
            return messages.Refused(request.serial, Refusal.LIMIT, f"there are {MAX_SESSIONS} clients already")
        if messages.fields_bytes(request.fields) > messages.MAX_FIELDS_BYTES:
            message = f"the fields of a namespace have at most {messages.MAX_FIELDS_BYTES} bytes"
            return messages.Refused(request.serial, Refusal.LIMIT, message)
        layout = request.geometry.layout()
        if layout.payload_bytes(layout.blocks_per_chunk) > self._pool.num_bytes:
            message = f"a chunk of {layout.slot_bytes} bytes does not fit into the server's {self._pool.num_bytes}"
            return messages.Refused(request.serial, Refusal.LIMIT, message)
        space = self._stock.enter(messages.namespace_of(request.fields), layout)
        if space is None:
            return messages.Refused(request.serial, Refusal.LIMIT, "there are too many namespaces")
        capacity_bytes = request.capacity_bytes or NO_QUOTA
        self._stock.limit(space, capacity_bytes)
        self._sessions.begin(peer, space, capacity_bytes, request.token, self._ways.now())
        return messages.Welcome(request.serial, self._pool.num_bytes, self._usage(space))

    # -- of clients --------------------------------------------------------------------------------------------------

    def _lookup(self, session: Session, request: messages.Lookup) -> messages.Answer:
        refs = messages.unpack_pairs(request.refs)
        found = self._stock.lookup(session.space, refs)
        self._touches.append((session.space, refs))
        return messages.Held(request.serial, found, self._usage(session.space))

    def _commit(self, session: Session, request: messages.Commit) -> messages.Answer:
        outcomes = [self._commit_one(session, number, is_whole=request.is_whole) for number in request.leases]
        return self._done(session, request, outcomes)

    def _commit_one(self, session: Session, number: int, *, is_whole: bool) -> Outcome:
        lease = session.leases.get(number)
        if lease is None or not lease.is_write:
            return Outcome.FAILED
        is_here = bool(session.token) or lease.copied_bytes == lease.chunk.num_bytes
        outcome = self._sessions.give_back(session, lease, is_whole=is_whole and is_here)
        if outcome is Outcome.STORED:
            self._write_behind(lease.chunk)
        return outcome

    def _release(self, session: Session, request: messages.Release) -> None:
        for number in request.leases:
            lease = session.leases.get(number)
            if lease is not None and not lease.is_write:
                self._sessions.give_back(session, lease, is_whole=True)

    def _clear(self, session: Session, request: messages.Clear) -> messages.Answer | None:
        """Forget the chunks of a namespace; the answer says that they do not come back either."""

        def cleared(is_clear: bool) -> None:
            refusal = messages.Refused(request.serial, Refusal.DISK, "the disk has not let go of all chunks yet")
            if not session.is_over:
                self._ways.send(session.peer, self._done(session, request) if is_clear else refusal, ())

        self._clear_space(session.space, cleared)
        return None if self._shelves is not None else self._done(session, request)

    def _clear_space(self, space: Space, cleared: Callable[[bool], None] = lambda _: None) -> int:
        """Forget the chunks of a namespace, and start to forget their files; how many there were."""
        self.sweep()
        count = self._stock.clear(space)
        refs = [ref for _, ref in self._stock.take_removals()]
        if self._shelves is not None:
            self._shelves.clear(space, refs, cleared)
        return count

    def _scan(self, session: Session, request: messages.Scan) -> messages.Answer:
        chunks = session.space.chunks
        part = islice(chunks, min(request.first, len(chunks)), request.first + messages.MAX_REFS)
        return messages.Listing(request.serial, messages.pack_refs(part), len(chunks), self._usage(session.space))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _write_behind(self, chunk: Chunk) -> None:
        if self._shelves is None:
            return
        if self.num_writing >= self._max_writes:
            self._unwritten.append(chunk)
            return
        if not self._stock.prepare_write(chunk, self._shelves.size_of(chunk.space, chunk.ref)):
            return
        self.sweep()  # before it: what has given way must be gone first
        self.num_writing += 1

        def written(size_bytes: int | None) -> None:
            self.num_writing -= 1
            self._stock.written(chunk, size_bytes)
            while self._unwritten and self.num_writing < self._max_writes:
                self._write_behind(self._unwritten.popleft())
            self.sweep()

        self._shelves.write(chunk, self._pool.parts(chunk.runs, 0, chunk.size_bytes), written)
