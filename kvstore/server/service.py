"""Handlers of requests. They run on the one thread that decides; other threads do copies, checksums and disk I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstore.channels.base import Channel
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ProtocolError
from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.keyfiles import NEEDED, Right, is_allowed, names_of
from kvstore.protocol.messages import Refusal
from kvstore.protocol.outcomes import pack_outcomes
from kvstore.protocol.progress import Progress
from kvstore.server.clients import IPC, Client
from kvstore.server.core import Core
from kvstore.server.grants import Grants
from kvstore.server.offers import Offers
from kvstore.server.operators import Orders, part_of_stats, report
from kvstore.server.owner import Owner
from kvstore.server.payload import Payload
from kvstore.server.registry import MAX_FAR_SPACES, MAX_SPACES
from kvstore.server.sessions import Peer, Session
from kvstore.server.spaces import Chunk, Space, fields_bytes
from kvstore.server.write_behind import WriteBehind
from kvstore.tiers.base import MAX_NEAREST

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NO_OPERATOR: Final = (
    "only operators may do this: connect over the kvs+ipc address, or with a key that has the right operate"
)
_MAX_TOUCHES: Final = 256  # parts of lookups that were not reported to the policies yet
_TOUCHED: Final = 256  # chunks in such a part: about a millisecond


class Service:
    """Handles the requests of all clients. Belongs to the thread that decides.

    Args:
        core: the shared state of the server.
        max_writes: number of chunks that are written to disk at once.
        pin_max_s: longest time for which a chunk may be pinned.
        owner: the engine whose chunks alone are taken; None to take those of all engines.
        channel: the channel through which clients' memory is read; None for none. The service closes it.

    Attributes:
        offers: the reads through the channel.
        payload: the copies on other threads.
        writes: the writes to disk.
    """

    def __init__(
        self,
        core: Core,
        *,
        max_writes: int,
        pin_max_s: float,
        owner: Owner | None = None,
        channel: Channel | None = None,
    ) -> None:
        self._is_dropping = False  # cleared chunks
        self._is_expiring = False
        self._is_changing_quotas = False
        self._quotas: Mapping[str, int] | None = None  # to be applied next
        self._core = core
        self._owner = owner
        self._touches: deque[tuple[Space, Sequence[ChunkRef]]] = deque(maxlen=_MAX_TOUCHES)
        self.writes = WriteBehind(core, max_writes)
        self.grants = Grants(core)
        self._orders = Orders(core, pin_max_s, self._clear_space)
        self.payload = Payload(core)
        self.offers = Offers(core, self.payload, channel)

    def handle(self, peer: Peer, message: Sequence[Buffer]) -> None:
        """Carry out a request of one frame, or of two for a piece, where the second is payload.

        Raises:
            ProtocolError: it is malformed, and its sender must lose the connection.
        """
        if not 1 <= len(message) <= 2:
            raise ProtocolError(f"a message with {len(message)} frames")
        request, payload = messages.decode_request(memoryview(message[0])), message[1:]
        if isinstance(request, messages.Piece) != bool(payload):
            raise ProtocolError("payload must follow a piece, and only a piece")
        client = self._core.sender(peer)
        session = self._core.sessions.by_peer.get(peer)
        if session is not None and session.client != client:
            session = None  # of another client, which had this name before
        if not is_allowed(type(request), client.rights):
            answer: messages.Answer | None = self._deny(client, request)
        elif isinstance(request, messages.Order):
            self._core.slices.begin(self._order(peer, client, request))
            answer = None
        elif isinstance(request, messages.Hello | messages.Ping | messages.Stats):
            answer = self._answer_anybody(peer, client, session, request)
        elif session is None:
            answer = messages.Refused(request.serial, Refusal.NO_SESSION, "say hello first")
        elif self._core.turns_away(client, request):
            answer = messages.Refused(request.serial, Refusal.CLOSING, "the engine is about to end")
        else:
            session.heard_s = self._core.now()
            answer = self._answer(session, request, payload)
        if answer is not None:
            self._core.send(peer, answer, ())
        self._core.sweep()

    @property
    def has_leisure_work(self) -> bool:
        """True if lookups are not yet reported to the policies, which can wait until there are no requests."""
        return bool(self._touches)

    @property
    def is_behind(self) -> bool:
        """True if as many lookups wait as can be remembered."""
        return len(self._touches) == _MAX_TOUCHES

    def do_leisure_work(self) -> None:
        """Report a part of a lookup to the policies."""
        if self._touches:
            self._core.stock.touch(*self._touches.popleft())

    def hang_up(self, token: bytes) -> None:
        """End the client of a closed connection to the unix socket, which can no longer touch the pool."""
        session = self._core.sessions.of_token(token)
        if session is not None:
            self.end(session)

    def end(self, session: Session) -> None:
        """End the session of a client that is gone."""
        self._core.slices.begin(self._core.sessions.end(session))
        self.offers.leave(session)
        self._note_progress(session, None)

    def expire(self) -> None:
        """End silent clients, expired pins and chunks whose time is over, and forget empty namespaces."""
        if not self._is_expiring:
            self._is_expiring = True
            self._core.slices.begin(self._expire())

    def _expire(self) -> Iterator[None]:
        sessions, stock, now_s = self._core.sessions, self._core.stock, self._core.now()
        for session in sessions.expire(now_s):
            if session.heard_s <= now_s:  # still
                self.end(session)
            yield
        for chunk in stock.pins.due(now_s):
            if chunk.pin_end_s <= now_s:  # still
                stock.pins.unpin([chunk])
            yield
        stock.holds.expire(now_s)
        yield from stock.expire()
        yield from stock.spaces.forget_empty()
        self._is_expiring = False

    def change(self, quotas: Mapping[str, int] | None, pin_max_s: float) -> None:
        """Apply other bounds, the quotas in slices; None leaves the quotas as they are."""
        self._orders.pin_max_s = pin_max_s
        if quotas is None:
            return
        self._quotas = quotas
        if not self._is_changing_quotas:
            self._is_changing_quotas = True
            self._core.slices.begin(self._change_quotas())

    def _change_quotas(self) -> Iterator[None]:
        while self._quotas is not None:
            quotas, self._quotas = self._quotas, None
            yield from self._core.stock.change_quotas(quotas)
        self._is_changing_quotas = False

    def forget_silent(self) -> None:
        """Forget the progress of silent clients, so that no engine waits for their hand-overs."""
        for session in self._core.sessions.silent(self._core.now()):
            self._note_progress(session, None)

    def enter(self, namespace: Namespace) -> None:
        """Change the owner's namespace, clear all others, and end the clients that use them."""
        assert self._owner is not None
        self._owner.namespace = namespace
        for session in list(self._core.sessions.by_peer.values()):
            if not session.token and not self._is_owners(session.space):
                self.end(session)
        for space in self._core.stock.spaces.values():
            if not self._is_owners(space):
                self._clear_space(space)

    def let_go(self, refs: Sequence[ChunkRef]) -> None:
        """Release the holds on these chunks of the owner."""
        for space in self._core.stock.spaces.values():
            for chunk in map(space.chunks.get, refs if self._is_owners(space) else ()):
                if chunk is not None:
                    self._core.stock.holds.drop(chunk)

    def _is_owners(self, space: Space) -> bool:
        return self._owner is not None and self._owner.owns(space.namespace)

    def close(self) -> None:
        """End the threads."""
        self.offers.close()
        self.payload.close()

    def _deny(self, client: Client, request: messages.Request) -> messages.Refused:
        needed = NEEDED[type(request)]
        kind = type(request).__name__
        why = f"{kind} needs the right {names_of(needed)}, and this client has {names_of(client.rights)}"
        self._core.deny(client, names_of(needed), why)
        if needed == Right.OPERATE:
            why = f"{_NO_OPERATOR}; {why}"
        return messages.Refused(request.serial, Refusal.NO_RIGHT, why)

    def _answer_anybody(
        self,
        peer: Peer,
        client: Client,
        session: Session | None,
        request: messages.Hello | messages.Ping | messages.Stats,
    ) -> messages.Answer:
        """Answer a request that needs no session."""
        match request:
            case messages.Hello():
                return self._hello(peer, client, request)
            case messages.Ping():
                return report(request, {"status": self._core.status})
            case messages.Stats():
                return report(request, self._stats(client, session))

    def _order(self, peer: Peer, client: Client, order: messages.Order) -> Iterator[None]:
        answer = yield from self._orders.carry_out(client, order)
        self._core.send(peer, answer, ())

    def _stats(self, client: Client, session: Session | None) -> dict[str, object]:
        """Report the stats that a client may see: all, those of its tenant, or those of the namespace that it uses."""
        if client.runs_all:
            return self._core.stats()
        if client.rights & Right.OPERATE:
            spaces = [space for space in self._core.stock.spaces.values() if space.tenant == client.tenant]
        else:
            spaces = [session.space] if session is not None else []
        return part_of_stats(self._core, spaces)

    def _answer(self, session: Session, request: messages.Request, payload: Sequence[Buffer]) -> messages.Answer | None:
        """Answer a request of a session; None if it has no answer, or if the answer is sent later."""
        match request:
            case messages.Lookup() | messages.Ask():
                return self._lookup(session, request)
            case messages.Acquire() | messages.Reserve() | messages.ReserveFor():
                self.grants.find(session, request)
                return None
            case messages.Commit():
                return self._commit(session, request)
            case messages.Nearest():
                return self._nearest(session, request)
            case messages.Release():
                self._release(session, request)
                return None
            case messages.Describe() | messages.Expire():
                self._describe(session, request)
                return None
            case messages.Sending():
                session.beat_s = request.beat_ms / 1000
                told = Progress(request.sender, request.following, dict(request.open), dict(request.lost))
                self._note_progress(session, told)
                return None
            case messages.Piece() | messages.Fetch() | messages.Front():
                return self.payload.answer(session, request, payload)
            case messages.Attach() | messages.Offer():
                return self.offers.answer(session, request)
            case messages.Clear():
                return self._clear(session, request)
            case messages.Scan():
                return self._scan(session, request)
            case messages.Remove() | messages.Prolong():
                session.begin_late()
                self._core.slices.begin(self._change(session, request))
                return None
        return self._done(session, request)

    def _done(self, session: Session, request: messages.Request, outcomes: Sequence[Outcome] = ()) -> messages.Done:
        return messages.Done(request.serial, pack_outcomes(outcomes), self._core.usage(session.space))

    # -- without a session -------------------------------------------------------------------------------------------

    def _hello(self, peer: Peer, client: Client, request: messages.Hello) -> messages.Answer:
        def refused(reason: Refusal, message: str) -> messages.Refused:
            return messages.Refused(request.serial, reason, message)

        def limited(lacked: str, message: str) -> messages.Refused:
            self._core.deny(client, lacked, message)
            return refused(Refusal.LIMIT, message)

        sessions, stock, pool_bytes = self._core.sessions, self._core.stock, self._core.pool.num_bytes
        if not messages.OLDEST_VERSION <= request.version <= messages.PROTOCOL_VERSION:
            spoken = f"{messages.OLDEST_VERSION} to {messages.PROTOCOL_VERSION}"
            return refused(
                Refusal.VERSION, f"this server speaks versions {spoken} of the protocol, not {request.version}"
            )
        if self._core.is_closed_to(client):
            return refused(Refusal.CLOSING, "the server is closing")
        if request.token and not self._core.is_open(request.token):
            return refused(Refusal.TOKEN, "the connection to the unix socket is closed")
        if self._owner is not None and (objection := self._owner.objection(request)):
            return refused(Refusal.FOREIGN, objection)
        if peer in sessions.by_peer or (request.token and sessions.of_token(request.token)):
            raise ProtocolError("this client has a session already")
        if not sessions.may_begin(client):
            return limited("sessions", "too many clients use this key or this address")
        if fields_bytes(request.fields) > messages.MAX_FIELDS_BYTES:
            return refused(Refusal.LIMIT, f"the fields of a namespace have at most {messages.MAX_FIELDS_BYTES} bytes")
        layout = request.geometry.layout()
        if layout.payload_bytes(layout.blocks_per_chunk) > pool_bytes:
            return refused(
                Refusal.LIMIT, f"a chunk of {layout.slot_bytes} bytes does not fit into the server's {pool_bytes}"
            )
        most = MAX_SPACES if client.socket == IPC else MAX_FAR_SPACES
        space = stock.spaces.enter(Namespace(dict(request.fields)), layout, client.tenant, most)
        if space is None:
            return limited("namespaces", "too many namespaces are in use")
        session = sessions.begin(peer, client, space, request.token, self._core.now())
        session.hears_ends = request.version >= messages.ENDS_VERSION
        return messages.Welcome(request.serial, pool_bytes, self._core.usage(space))

    # -- of clients --------------------------------------------------------------------------------------------------

    def _lookup(self, session: Session, request: messages.Lookup | messages.Ask) -> messages.Answer:
        refs = messages.unpack_pairs(request.refs)
        found, rests_ms = self._core.stock.lookup(session.space, refs, hears_ends=session.hears_ends)
        if isinstance(request, messages.Lookup):
            session.space.counters.count_lookup(found)
            self._touches.extend((session.space, refs[at : at + _TOUCHED]) for at in range(0, len(refs), _TOUCHED))
        if session.progress is not None:  # it hands over, and does not send chunks again that are there
            self._hold(chunk for ref in refs if (chunk := session.space.chunks.get(ref)) is not None)
        held = request.serial, found, self._core.usage(session.space)
        return messages.Lasting(*held, rests_ms) if rests_ms else messages.Held(*held)

    def _nearest(self, session: Session, request: messages.Nearest) -> messages.Answer:
        """Answer with as much as a message may hold; trails beyond that get no neighbours."""
        named: list[list[bytes]] = []
        left_bytes = messages.MAX_MESSAGE_BYTES
        for trail in request.trails:
            near = list(session.space.trails.closest(trail, MAX_NEAREST))
            left_bytes -= sum(map(len, near))
            named.append(near if left_bytes >= 0 else [])
        return messages.Named(request.serial, named)

    def _describe(self, session: Session, request: messages.Describe | messages.Expire) -> None:
        """Note the trail, or the end, of a chunk that is being written."""
        lease = session.leases.get(request.lease)
        if lease is None or not lease.is_write:
            return
        if isinstance(request, messages.Describe):
            lease.chunk.describe(request.trail)
        else:
            lease.chunk.until_s = self._core.stock.lifetimes.end_in(request.rest_ms)

    def _commit(self, session: Session, request: messages.Commit) -> messages.Answer:
        outcomes = [self._commit_one(session, number, is_whole=request.is_whole) for number in request.leases]
        return self._done(session, request, outcomes)

    def _commit_one(self, session: Session, number: int, *, is_whole: bool) -> Outcome:
        lease = session.leases.get(number)
        if lease is None or not lease.is_write:
            return Outcome.FAILED
        is_here = bool(session.token) or lease.is_covered
        outcome = self._core.sessions.give_back(session, lease, is_whole=is_whole and is_here)
        if outcome is Outcome.STORED:
            self.writes.begin(lease.chunk)
            if not session.token:
                self._hold([lease.chunk])
        return outcome

    def _release(self, session: Session, request: messages.Release) -> None:
        for number in request.leases:
            lease = session.leases.get(number)
            if lease is not None and not lease.is_write:
                self._core.sessions.give_back(session, lease, is_whole=True)

    def _change(self, session: Session, request: messages.Remove | messages.Prolong) -> Iterator[None]:
        """Remove or prolong chunks, in steps."""
        space, refs = session.space, messages.unpack_refs(request.refs)
        if isinstance(request, messages.Remove):
            for ref in refs:
                self._core.stock.remove(space, [ref])
                yield
        else:
            if len(refs) != len(request.rests_ms):
                raise ProtocolError(f"{len(request.rests_ms)} times for {len(refs)} chunks")
            for ref, rest_ms in zip(refs, request.rests_ms, strict=True):
                self._prolong(space.chunks.get(ref), rest_ms)
                yield
        session.num_late -= 1
        self._core.send(session.peer, self._done(session, request), ())

    def _prolong(self, chunk: Chunk | None, rest_ms: int) -> None:
        if chunk is not None and self._core.stock.lifetimes.prolong(chunk, rest_ms):
            self.writes.note_end(chunk)

    def _clear(self, session: Session, request: messages.Clear) -> messages.Answer | None:
        """Forget the chunks of a namespace. The answer is sent once no crash can bring them back."""

        def cleared(is_clear: bool) -> None:
            refusal = messages.Refused(request.serial, Refusal.DISK, "the disk has not deleted all chunks yet")
            if not session.is_over:
                self._core.send(session.peer, self._done(session, request) if is_clear else refusal, ())

        self._clear_space(session.space, cleared)
        return None if self._core.disk is not None else self._done(session, request)

    def _clear_space(self, space: Space, cleared: Callable[[bool], None] = lambda _: None) -> int:
        """Forget the chunks of a namespace, and start to delete their files; return their number."""
        self._core.sweep()
        count = self._core.stock.clear(space)
        if self._core.disk is not None:
            self._core.disk.clear(space, cleared)
        if not self._is_dropping:
            self._is_dropping = True
            self._core.slices.begin(self._drop_cleared())
        return count

    def _drop_cleared(self) -> Iterator[None]:
        while self._core.stock.drop_cleared():
            yield
        self._is_dropping = False
        yield from self.writes.go_on()

    def _hold(self, chunks: Iterable[Chunk]) -> None:
        """Hold chunks that were handed over until the owner has read them."""
        if self._owner is not None and self._owner.hold_s:
            end_s = self._core.now() + self._owner.hold_s
            for chunk in chunks:
                readers = self._owner.num_readers(chunk.space.namespace)
                self._core.stock.holds.hold(chunk, end_s, readers)

    def _note_progress(self, session: Session, now: Progress | None) -> None:
        """Report a client's progress to the owner, if it has changed."""
        before, session.progress = session.progress, now
        if self._owner is not None and now != before:
            self._owner.senders.note(session.peer, before, now)

    def _scan(self, session: Session, request: messages.Scan) -> messages.Answer:
        chunks = session.space.chunks
        part = islice(chunks, min(request.first, len(chunks)), request.first + messages.MAX_REFS)
        usage = self._core.usage(session.space)
        return messages.Listing(request.serial, messages.pack_refs(part), len(chunks), usage)
