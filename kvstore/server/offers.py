"""Payload that the server reads from its clients' memory, through a channel.

The pages of a piece stay in use until the channel says that its read has ended, even if the client is gone or the read
was given up, because late bytes must not overwrite another chunk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvstore.channels.base import Channel, Peer, Reading, State
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import ChannelError, ProtocolError
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.payload import checksum
from kvstore.server.core import Core
from kvstore.server.payload import Payload, done
from kvstore.server.sessions import Session

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

READ_S: Final = 4.0  # after which a read is given up; a client waits for 5 s by default
_LOOK_S: Final = 2e-4  # between two looks at reads that may soon end
_LATE_LOOK_S: Final = 0.05  # between two looks at reads that were given up
_END_WAIT_S: Final = 2.0
_MAX_HUNG: Final = 2  # memories; reads that hang there keep pages, up to a quarter of the pool each
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
            raise ProtocolError("this client has attached its memory already")
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
        is_late = False

        def ended(is_read: bool) -> None:
            if is_read:
                self._payload.start(lambda: checksum(part.data for part in parts), settled)
            else:
                self._core.report(lambda: settled(None))

        def settled(added_up: bytes | None) -> None:
            session.num_pieces += is_late
            end_bytes = request.offset_bytes + request.num_bytes
            is_sound = added_up == request.checksum and lease.note_arrived(request.offset_bytes, end_bytes)
            self.read_bytes += request.num_bytes * is_sound
            self.num_failed += not is_sound
            self._payload.end(session, lease, is_sound=is_sound)
            if not is_late:
                self._answer(session, request, Outcome.STORED if is_sound else Outcome.FAILED)

        def given_up() -> None:
            self._core.report(leave_late)

        def leave_late() -> None:
            """Let the client begin another piece in its place, although nothing more is read from its memory."""
            nonlocal is_late
            is_late = True
            session.num_pieces -= 1
            self._answer(session, request, Outcome.FAILED)

        self._payload.begin(session, lease)
        self._puller.pull(Pull(session.attached, request.memory_offset_bytes, parts, given_up, ended))
        return None

    def _answer(self, session: Session, request: messages.Offer, outcome: Outcome) -> None:
        self._core.send(session.peer, done(request, outcome), ())


@dataclass
class Pull:
    """A read to be done.

    Attributes:
        description: description of the memory to read from.
        offset_bytes: offset in this memory.
        parts: parts of the pool to read to.
        given_up: called after ``READ_S`` if it has not ended; ``parts`` may still be written to.
        ended: called once, with True if all bytes were read; from then on ``parts`` are not written to any more.
    """

    description: bytes
    offset_bytes: int
    parts: Sequence[ByteArray]
    given_up: Callable[[], None]
    ended: Callable[[bool], None]
    is_late: bool = False
    deadline_s: float = 0.0


@dataclass
class _Source:
    """A peer, and the reads from it."""

    peer: Peer
    pulls: dict[Reading, Pull] = field(default_factory=dict)
    is_leaving: bool = False
    has_failed: bool = False

    @property
    def hangs(self) -> bool:
        """True if a read that was given up may still write."""
        return self.has_failed or any(pull.is_late for pull in self.pulls.values())


class Puller:
    """Attaches, reads and detaches in the order of the calls, on its thread. Thread-safe.

    Args:
        channel: a channel with the pool registered.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._sources: dict[bytes, _Source] = {}  # belongs to the thread
        self._throttle = Throttle(logger)
        self._thread = threading.Thread(target=self._run, name="kvstore-pull", daemon=True)
        self._thread.start()

    def attach(self, description: bytes, attached: Callable[[bool], None]) -> None:
        """Prepare to read from a client; ``attached`` is called with True if that is possible."""
        self._add(lambda: attached(self._attach(description)))

    def detach(self, description: bytes) -> None:
        """Detach a memory whose last client is gone, once its reads have ended."""
        self._add(lambda: self._detach(description))

    def pull(self, pull: Pull) -> None:
        """Queue a read."""
        self._add(lambda: self._begin(pull))

    def close(self) -> None:
        """End the thread and close the channel, so that nothing is written to any part any more. Takes bounded time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_END_WAIT_S)
        self._channel.close()

    def _add(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _run(self) -> None:
        while (jobs := self._next_jobs()) is not None:
            for job in jobs:
                job()
            for description, source in list(self._sources.items()):
                self._look(source)
                if source.is_leaving and not source.pulls and not source.has_failed:
                    del self._sources[description]
                    self._call(self._channel.detach, source.peer)

    def _next_jobs(self) -> list[Callable[[], None]] | None:
        """Wait for jobs, or until reads must be checked; return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._jobs), self._pause_s())
            jobs, self._jobs = list(self._jobs), deque()
            return None if self._is_closed else jobs

    def _pause_s(self) -> float | None:
        pulls = [pull for source in self._sources.values() for pull in source.pulls.values()]
        if not pulls:
            return None
        return _LATE_LOOK_S if all(pull.is_late for pull in pulls) else _LOOK_S

    def _attach(self, description: bytes) -> bool:
        """Attach a client's memory; return False if it cannot be read, or an abandoned read may still write."""
        source = self._sources.get(description)
        if source is None:
            if sum(known.hangs for known in self._sources.values()) >= _MAX_HUNG:
                self._throttle.log(
                    "hung", "attaching no more clients: reads from the memory of %d clients hang", _MAX_HUNG
                )
                return False
            try:
                peer = self._call(self._channel.attach, description, may_refuse=True)
            except ChannelError:
                return False
            if peer is not None:
                self._sources[description] = _Source(peer)
            return peer is not None
        source.is_leaving = False
        return not source.hangs

    def _detach(self, description: bytes) -> None:
        source = self._sources.get(description)
        if source is not None:
            source.is_leaving = True

    def _begin(self, pull: Pull) -> None:
        source = self._sources.get(pull.description)
        if source is None or source.hangs or source.is_leaving:
            pull.ended(False)
            return
        try:
            reading = self._call(self._channel.read, source.peer, pull.offset_bytes, pull.parts, may_refuse=True)
        except ChannelError:
            pull.ended(False)
            return
        if reading is None:  # it may have begun to write, so the pages stay in use
            source.has_failed = True
            pull.given_up()
            return
        pull.deadline_s = time.monotonic() + READ_S
        source.pulls[reading] = pull
        self._look(source)

    def _look(self, source: _Source) -> None:
        for reading, pull in list(source.pulls.items()):
            state = self._call(self._channel.look, reading) or State.PENDING  # unknown, so the pages stay in use
            if state is not State.PENDING:
                del source.pulls[reading]
                pull.ended(state is State.DONE)
            elif not pull.is_late and time.monotonic() >= pull.deadline_s:
                pull.is_late = True
                pull.given_up()

    def _call(self, call: Callable[..., Result], *args: object, may_refuse: bool = False) -> Result | None:
        """Call the channel; log an error that it does not promise, and return None, so that other clients are served.

        Raises:
            ChannelError: the call ``may_refuse``, and does.
        """
        try:
            return call(*args)
        except Exception as error:  # a bug in the channel, perhaps in reach of any client's description
            if may_refuse and isinstance(error, ChannelError):
                raise
            if self._throttle.is_due("bug"):
                logger.exception("unexpected error of the channel %s", self._channel.name)
            return None
