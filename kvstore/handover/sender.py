"""Deliveries to one receiver, and the thread that sends them one after the other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvstore.handover.tracker import HandoverTracker, PushJob
from kvstore.handover.transport import Parcel, Receiver, Transport
from kvstore.model.chunks import Outcome
from kvstore.model.errors import KVStoreError, TierError
from kvstore.paged.base import PagedKV
from kvstore.paged.streams import DeviceEvent
from kvstore.protocol.progress import BEAT_S

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 10.0  # pause after a receiver's failure


class Delivery:
    """Chunks of one step for one receiver, shared by the model's thread, which gathers them, and the sender's."""

    def __init__(
        self,
        receiver: Receiver,
        jobs: Sequence[PushJob],
        parcels: Sequence[Parcel],
        slots: Sequence[int],
        paged: PagedKV,
    ) -> None:
        self.receiver = receiver
        self.jobs = jobs
        self.parcels = parcels
        self.slots = slots
        self._num_layers = paged.layout.num_layers
        self._reach = paged.streams.reach
        self._changed = threading.Condition()
        self._done_layers = 0
        self._event: DeviceEvent = None
        self._trusted: bool | None = None  # until the step has ended
        self._ended_s = 0.0

    def advance(self, done_layers: int, event: DeviceEvent) -> None:
        """Note that the first ``done_layers`` layers are in the buffer once ``event`` is reached."""
        with self._changed:
            self._done_layers, self._event = done_layers, event
            self._changed.notify_all()

    def end(self, *, trusted: bool) -> None:
        """Note the end of the step. If it is not ``trusted``, or a layer is missing, its chunks must not be found."""
        with self._changed:
            self._trusted = trusted and self._done_layers == self._num_layers
            self._ended_s = time.monotonic()
            self._changed.notify_all()

    def ready(self, beat: Callable[[], object]) -> Iterator[range]:
        """Yield the layers as they are gathered; the last one only when the step is known to be right.

        During waits ``beat`` is called every ``BEAT_S``.
        """
        sent_layers = 0
        while sent_layers < self._num_layers:
            usable_layers, event = self._wait_beyond(sent_layers, beat)
            if self._trusted is False:
                return
            self._reach(event)
            yield range(sent_layers, usable_layers)
            sent_layers = usable_layers

    def wait(self, beat: Callable[[], object]) -> None:
        """Wait until the step and all its gathers have ended; ``beat`` as in ``ready``."""
        while not self._waited(lambda: self._trusted is not None):
            beat()
        self._reach(self._event)

    def seconds_behind(self) -> float:
        """Return the seconds since the end of the step."""
        return time.monotonic() - self._ended_s

    def _wait_beyond(self, sent_layers: int, beat: Callable[[], object]) -> tuple[int, DeviceEvent]:
        while not self._waited(lambda: self._trusted is not None or self._usable_layers() > sent_layers):
            beat()
        with self._changed:
            return self._usable_layers(), self._event

    def _waited(self, has_come: Callable[[], bool]) -> bool:
        """Wait for a condition for ``BEAT_S``; False if it is not met by then."""
        with self._changed:
            return self._changed.wait_for(has_come, BEAT_S)

    def _usable_layers(self) -> int:
        return self._done_layers if self._trusted else min(self._done_layers, self._num_layers - 1)


class Sender:
    """Thread for one receiver, which sends deliveries one after the other.

    Args:
        receiver: the destination.
        connect: opens the transport to it, before the first delivery and after a failure.
        note: called for each delivery that has ended.
        tracker: tells which chunks are of use, and the progress to report to the receiver.
    """

    def __init__(
        self,
        receiver: Receiver,
        connect: Callable[[Receiver], Transport],
        note: Callable[[Delivery, Sequence[Outcome], KVStoreError | None], None],
        tracker: HandoverTracker,
    ) -> None:
        self.receiver = receiver
        self._connect = connect
        self._note = note
        self._tracker = tracker
        self._changed = threading.Condition()
        self._waiting: deque[Delivery] = deque()
        self._is_sending = False
        self._is_stopped = False
        self._has_news = False
        self._broken_until_s = 0.0
        self._transport: Transport | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-push", daemon=True)
        self._thread.start()

    @property
    def answers(self) -> bool:
        """True if there was no failure in the last ``PROBE_INTERVAL_S``."""
        return time.monotonic() >= self._broken_until_s

    @property
    def is_idle(self) -> bool:
        """True if no delivery is queued or under way."""
        with self._changed:
            return not self._waiting and not self._is_sending

    @property
    def is_alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    def send(self, delivery: Delivery) -> None:
        """Queue a delivery."""
        with self._changed:
            self._waiting.append(delivery)
            self._changed.notify_all()

    def tell(self) -> None:
        """Let the thread report the progress to the receiver, if it is connected."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all deliveries are sent or given up; False if time ran out first."""
        with self._changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            return self._changed.wait_for(lambda: not self._waiting and not self._is_sending, left_s)

    def retire(self) -> None:
        """End the thread once all deliveries are sent or given up; no more may be queued."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop queued deliveries, and end the thread after the delivery under way."""
        with self._changed:
            self._is_stopped = True
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for delivery in waiting:
            delivery.end(trusted=False)
            self._note(delivery, [Outcome.FAILED] * len(delivery.parcels), None)

    def join(self, deadline_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while not self._is_over():
            delivery = self._next()
            if delivery is not None:
                self._send(delivery)
            self._tell()
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
        self._hang_up()

    def _is_over(self) -> bool:
        """Wait for a delivery, for news or for the next beat; True once the sender is stopped and its queue empty."""
        timeout_s = BEAT_S if self._transport is not None else None
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._has_news or bool(self._waiting), timeout_s)
            return self._is_stopped and not self._waiting

    def _next(self) -> Delivery | None:
        """Return the next delivery; None if there is only progress to report."""
        with self._changed:
            self._has_news = False
            self._is_sending = True
            return self._waiting.popleft() if self._waiting else None

    def _send(self, delivery: Delivery) -> None:
        outcomes = [Outcome.FAILED] * len(delivery.parcels)
        error = self._attempt("handing KV over to", lambda: self._deliver(delivery, outcomes))
        delivery.wait(self._tell)
        self._note(delivery, outcomes, error)

    def _deliver(self, delivery: Delivery, outcomes: list[Outcome]) -> None:
        """Hand the chunks of a delivery over, and fill in their outcomes, unless none of them is of use."""
        if not self.answers or not any(map(self._tracker.wants, delivery.jobs)):
            return
        if self._transport is None:
            self._transport = self._connect(self.receiver)
        self._transport.tell(self._tracker.progress(self.receiver))
        found = self._transport.deliver(delivery.parcels, self._ready(self._transport, delivery))
        if len(found) != len(outcomes):
            raise TierError(f"the transport returned {len(found)} outcomes for {len(outcomes)} chunks")
        outcomes[:] = found

    def _ready(self, transport: Transport, delivery: Delivery) -> Iterator[range]:
        """Yield the layers as they are gathered, and report the progress of other hand-overs between them."""
        for layers in delivery.ready(lambda: transport.tell(self._tracker.progress(self.receiver))):
            transport.tell(self._tracker.progress(self.receiver))
            yield layers

    def _tell(self) -> None:
        """Report the progress, if connected. After an error the receiver stops waiting, as the connection ends."""
        if (transport := self._transport) is not None:
            self._attempt("reporting progress to", lambda: transport.tell(self._tracker.progress(self.receiver)))

    def _attempt(self, doing: str, call: Callable[[], object]) -> KVStoreError | None:
        """Make a call of the transport. After an error, disconnect, pause, and return the error if it is ours."""
        problem: KVStoreError | None = None
        try:
            call()
        except KVStoreError as error:
            problem = error
        except Exception:  # a bug of the transport, too, must not end the thread, which frees its part of the buffer
            logger.exception("a defect: %s %s has failed", doing, self.receiver)
        else:
            return None
        self._broken_until_s = time.monotonic() + PROBE_INTERVAL_S
        self._hang_up()
        return problem

    def _hang_up(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            self._attempt("disconnecting from", transport.close)
