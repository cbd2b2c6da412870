"""Payload that the server reads from its clients' memory, through a channel.

The pages of a piece stay in use until the channel says that its read has ended, even if the client is gone or the read
was given up, because late bytes must not overwrite another chunk.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Final

from kvstore.channels.base import Channel
from kvstore.model.chunks import Outcome
from kvstore.model.errors import ProtocolError
from kvstore.protocol import messages
from kvstore.protocol.payload import checksum
from kvstore.server.core import Core
from kvstore.server.file_order import Once
from kvstore.server.payload import Payload, done
from kvstore.server.pulling import Pull, Puller
from kvstore.server.sessions import Session

_MAX_ATTACHED: Final = 256  # attached memories of clients


class Offers:
    """Reads pieces that clients offer in their memory. Belongs to the thread that decides.

    Args:
        core: the shared state of the server.
        payload: keeps pages in use, and runs checksums on its threads.
        channel: a channel with the pool registered; None if nothing is read.

    Attributes:
        read_bytes: bytes that were read with the right checksum.
        num_failed: number of other reads.
    """

    def __init__(self, core: Core, payload: Payload, channel: Channel | None) -> None:
        self.read_bytes = 0
        self.num_failed = 0
        self._core = core
        self._payload = payload
        self._name = channel.name if channel is not None else ""
        self._puller = Puller(channel) if channel is not None else None
        self._clients: Counter[bytes] = Counter()  # by the descriptions of their memory

    def stats(self) -> dict[str, object]:
        """Return counters for a report; empty without a channel."""
        if self._puller is None:
            return {}
        counted = {"name": self._name, "attached": len(self._clients)}
        return {"channel": {**counted, "read_bytes": self.read_bytes, "failed": self.num_failed}}

    def answer(self, session: Session, request: messages.Attach | messages.Offer) -> messages.Answer | None:
        """Attach a client's memory, or start to read a piece from it. The answer is sent later, if it can be done.

        Raises:
            ProtocolError: something is attached already; the piece is not inside its chunk; too many are under way.
        """
        return self._attach(session, request) if isinstance(request, messages.Attach) else self._take(session, request)

    def leave(self, session: Session) -> None:
        """Detach the memory of a client that is gone, unless other clients share it."""
        description, session.attached = session.attached, b""
        if description and self._puller is not None:
            self._clients[description] -= 1
            if not self._clients[description]:
                del self._clients[description]
                self._puller.detach(description)

    def close(self) -> None:
        """End reading."""
        if self._puller is not None:
            self._puller.close()

    def _attach(self, session: Session, request: messages.Attach) -> messages.Answer | None:
        if session.attached:
            raise ProtocolError("a client attaches its memory once")
        description = request.description
        has_room = description in self._clients or len(self._clients) < _MAX_ATTACHED
        if self._puller is None or request.channel != self._name or not description or not has_room:
            return done(request, Outcome.FAILED)
        session.attached = description
        self._clients[description] += 1

        def attached(can_be_read: bool) -> None:
            outcome = Outcome.STORED if can_be_read else Outcome.FAILED
            self._core.report(lambda: self._core.send(session.peer, done(request, outcome), ()))

        self._puller.attach(description, attached)
        return None

    def _take(self, session: Session, request: messages.Offer) -> messages.Answer | None:
        lease = session.leases.get(request.lease)
        if lease is None or not lease.is_write or not session.attached or self._puller is None:
            return done(request, Outcome.FAILED)
        parts = self._payload.parts(lease, request.offset_bytes, request.num_bytes)
        answer = Once(partial(self._answer, session, request))
        is_late = False

        def ended(is_read: bool) -> None:
            if is_read:
                self._payload.start(verify, lambda: settled(is_sound=False))
            else:
                self._core.report(lambda: settled(is_sound=False))

        def verify() -> None:
            is_sound = checksum(part.data for part in parts) == request.checksum
            self._core.report(lambda: settled(is_sound=is_sound))

        def settled(*, is_sound: bool) -> None:
            session.num_pieces += is_late
            end_bytes = request.offset_bytes + request.num_bytes
            is_sound = is_sound and lease.note_arrived(request.offset_bytes, end_bytes)
            self._count(request, is_sound=is_sound)
            self._payload.end(session, lease, is_sound=is_sound)
            answer(Outcome.STORED if is_sound else Outcome.FAILED)

        def given_up() -> None:
            self._core.report(leave_late)

        def leave_late() -> None:
            """Let the client begin another piece in its place, although nothing more is read from its memory."""
            nonlocal is_late
            is_late = True
            session.num_pieces -= 1
            answer(Outcome.FAILED)

        self._payload.begin(session, lease)
        self._puller.pull(Pull(session.attached, request.memory_offset_bytes, parts, given_up, ended))
        return None

    def _answer(self, session: Session, request: messages.Offer, outcome: Outcome) -> None:
        self._core.send(session.peer, done(request, outcome), ())

    def _count(self, request: messages.Offer, *, is_sound: bool) -> None:
        if is_sound:
            self.read_bytes += request.num_bytes
        else:
            self.num_failed += 1
