"""Thread that reads clients' memory through a channel."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.channels.base import Channel, Peer, Reading, State
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ChannelError
from kvstore.model.throttle import Throttle

logger = logging.getLogger(__name__)

READ_S: Final = 4.0  # after which a read is given up; a client waits for 5 s by default
_LOOK_S: Final = 2e-4  # between two looks at reads that may soon end
_LATE_LOOK_S: Final = 0.05  # between two looks at reads that were given up
_END_WAIT_S: Final = 2.0
_MAX_HUNG: Final = 2  # memories; reads that hang there keep pages, up to a quarter of the pool each


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
                    self._channel.detach(source.peer)

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
                self._throttle.log("hung", "nothing more is attached: reads from %d clients' memories hang", _MAX_HUNG)
                return False
            try:
                self._sources[description] = _Source(self._channel.attach(description))
            except ChannelError:
                return False
            except Exception:  # a bug in the channel; the thread continues, for the other clients
                logger.exception("attaching a client's memory failed unexpectedly")
                return False
            return True
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
            reading = self._channel.read(source.peer, pull.offset_bytes, pull.parts)
        except ChannelError:
            pull.ended(False)
            return
        except Exception:  # a bug in the channel, which may have begun to write, so the pages stay in use
            logger.exception("reading a client's memory failed unexpectedly: nothing more is read from there")
            source.has_failed = True
            pull.given_up()
            return
        pull.deadline_s = time.monotonic() + READ_S
        source.pulls[reading] = pull
        self._look(source)

    def _look(self, source: _Source) -> None:
        for reading, pull in list(source.pulls.items()):
            state = self._state_of(reading)
            if state is not State.PENDING:
                del source.pulls[reading]
                pull.ended(state is State.DONE)
            elif not pull.is_late and time.monotonic() >= pull.deadline_s:
                pull.is_late = True
                pull.given_up()

    def _state_of(self, reading: Reading) -> State:
        try:
            return self._channel.look(reading)
        except Exception:  # a bug in the channel; the read may not have ended, so the pages stay in use
            if self._throttle.is_due("look"):
                logger.exception("looking at a read of a client's memory failed unexpectedly")
            return State.PENDING
