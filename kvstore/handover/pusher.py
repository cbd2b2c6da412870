"""Hands what a model computes over to other engines: gathers it layer by layer, and sends it beside the model.

The blocks are copied to a buffer of the pusher's own while the step that computes them runs, so they are free as soon
as it ends, however slow a receiver is. What a step computes in vain, because something before it could not be loaded,
is never completed: the last layer is not named to the transport before the step is known to be right.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import KVStoreError
from kvstore.handover.transport import Parcel, Transport
from kvstore.memory.slabs import SlabPool
from kvstore.paged.base import BlockIds, ChunkBlocks, PagedKV
from kvstore.paged.staging import Moment
from kvstore.throttle import Throttle

logger = logging.getLogger(__name__)

MAX_RECEIVERS = 64  # with a thread and a connection each; beyond that the longest unused goes
STALL_S = 1.0  # how long a step waits for room in the buffer, in all: a receiver computes what it does not get
PROBE_INTERVAL_S = 10.0  # how long a receiver that failed is left alone


class Receiver(NamedTuple):
    """Where an engine takes chunks: its host, and the port of this rank."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class PushJob(NamedTuple):
    """A chunk to hand over: its blocks will be complete after the step."""

    ref: ChunkRef
    block_ids: BlockIds


@dataclass
class PushCounters:
    """Chunks since the start, by what became of them, and their bytes. Read without its lock."""

    sent: int = 0  # the receiver has them now, or had them
    refused: int = 0  # no room there, or here
    failed: int = 0
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)


class Pusher:
    """One worker's hand-overs. ``begin`` and what it returns are for the model's thread.

    Args:
        paged: the model's KV cache.
        buffer_bytes: for what has been gathered and not yet sent.
        connect: opens the way to a receiver.
        counters: where to count.
    """

    def __init__(
        self,
        paged: PagedKV,
        buffer_bytes: int,
        connect: Callable[[Receiver], Transport],
        counters: PushCounters,
    ) -> None:
        layout = paged.layout
        self.counters = counters
        self._paged = paged
        self._connect = connect
        self._pool = SlabPool(max(1, buffer_bytes // layout.slot_bytes), layout.slot_bytes)
        self._room = _Room(self._pool.num_slots)
        self._senders: OrderedDict[Receiver, _Sender] = OrderedDict()  # the longest unused first
        self._leaving: list[_Sender] = []  # get nothing more
        self._throttle = Throttle(logger)
        self._seconds: list[float] = []

    def begin(self, pushes: Sequence[tuple[Receiver, Sequence[PushJob]]]) -> StepPush:
        """Take up the hand-overs of a step, which is about to compute; the same receiver may occur several times."""
        step = StepPush(self._paged, self._room, self._pool, self._refuse)
        for receiver, jobs in pushes:
            sender = self._sender(receiver)
            if sender is not None:
                step.add(jobs, sender)
        return step

    def change(self, connect: Callable[[Receiver], Transport]) -> None:
        """Between steps: open the ways to receivers like this from now on. What is on its way goes on as it began."""
        former, self._senders, self._connect = self._senders, OrderedDict(), connect
        self._leave(former.values())

    def take_seconds(self) -> list[float]:
        """For each delivery since the last call, how long after its step all of it was there."""
        with self.counters.lock:
            seconds, self._seconds = self._seconds, []
            return seconds

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything gathered so far was sent, or given up; False if time ran out first."""
        deadline_s = time.monotonic() + timeout_s
        return all(sender.flush(deadline_s) for sender in [*self._senders.values(), *self._leaving])

    def close(self, timeout_s: float) -> None:
        """Let what is under way end within the bound, then hang up."""
        self.flush(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        senders = [*self._senders.values(), *self._leaving]
        for sender in senders:
            sender.stop()
        for sender in senders:
            sender.join(deadline_s)
        if any(sender.is_alive for sender in senders):
            logger.warning("a receiver of KV does not answer, and is left behind")
        else:
            self._pool.close()

    def _sender(self, receiver: Receiver) -> _Sender | None:
        """The thread for a receiver; None while it is left alone, or if there are too many others."""
        sender = self._senders.get(receiver)
        if sender is None:
            if len(self._senders) >= MAX_RECEIVERS and not self._drop_idle():
                return None
            sender = self._senders[receiver] = _Sender(receiver, self._connect, self._note)
        self._senders.move_to_end(receiver)
        return sender if sender.answers else None

    def _drop_idle(self) -> bool:
        idle = next((receiver for receiver, sender in self._senders.items() if sender.is_idle), None)
        if idle is not None:
            self._leave([self._senders.pop(idle)])
        return idle is not None

    def _leave(self, senders: Collection[_Sender]) -> None:
        for sender in senders:
            sender.retire()
        self._leaving = [*(sender for sender in self._leaving if sender.is_alive), *senders]

    def _refuse(self, job: PushJob) -> None:
        """The buffer stayed full for too long."""
        with self.counters.lock:
            self.counters.refused += 1
        self._throttle.log(
            "room",
            "a chunk of %d blocks is not handed over, as the buffer is full of what others have yet to take: raise "
            "pd_buffer_size",
            job.ref.num_blocks,
        )

    def _note(self, delivery: _Delivery, outcomes: Sequence[Outcome], error: KVStoreError | None) -> None:
        """On a sender's thread: a delivery has ended."""
        layout = self._paged.layout
        with self.counters.lock:
            for parcel, outcome in zip(delivery.parcels, outcomes, strict=True):
                self.counters.sent += outcome is Outcome.STORED
                self.counters.refused += outcome is Outcome.FULL
                self.counters.failed += outcome not in {Outcome.STORED, Outcome.FULL}
                if outcome is Outcome.STORED:
                    self.counters.sent_bytes += layout.payload_bytes(parcel.ref.num_blocks)
            if Outcome.STORED in outcomes:
                self._seconds.append(delivery.seconds_behind())
        self._room.give_back(delivery.slots)
        if error is not None:
            said = "KV cannot be handed over to %s, which computes it then: %s"
            self._throttle.log(str(delivery.receiver), said, delivery.receiver, error)


class StepPush:
    """The hand-overs of one step, advanced by the model's layers as it comes to them. For the model's thread.

    Chunks for which the buffer has no room when the step begins are gathered when it ends, as room comes free: for
    ``STALL_S`` in all, and not at all where a step before has waited in vain and nothing was taken since.
    """

    def __init__(self, paged: PagedKV, room: _Room, pool: SlabPool, refuse: Callable[[PushJob], None]) -> None:
        self._paged = paged
        self._room = room
        self._pool = pool
        self._refuse = refuse
        self._deliveries: list[_Delivery] = []
        self._chunks: list[ChunkBlocks] = []  # gathered layer by layer
        self._late: list[tuple[PushJob, _Sender]] = []  # and at the end
        self._computed: set[int] = set()
        self._done_layers = 0

    def add(self, jobs: Sequence[PushJob], sender: _Sender) -> None:
        """Hand chunks over to a receiver, too."""
        slots = self._room.take(len(jobs))
        now, later = jobs[: len(slots)], jobs[len(slots) :]
        self._late += [(job, sender) for job in later]
        if now:
            self._start(now, slots, sender)
            blocks = zip(now, slots, strict=True)
            self._chunks += [self._paged.chunk(job.block_ids, self._pool.slot(slot)) for job, slot in blocks]

    def reach(self, layer: int) -> None:
        """Take what can be taken in order, now that this layer has been computed."""
        self._computed.add(layer)
        while self._done_layers in self._computed:
            moment = self._paged.gather_layer(self._done_layers, self._chunks)
            self._done_layers += 1
            for delivery in self._deliveries:
                delivery.advance(self._done_layers, moment)

    def finish(self, *, trusted: bool) -> None:
        """Take what is left, after the forward pass, if it is to be ``trusted``. The blocks are free then."""
        for layer in range(self._done_layers, self._paged.layout.num_layers if trusted else 0):
            self.reach(layer)
        self._paged.wait()
        self._end(trusted=trusted)
        if trusted:
            self._gather_late()

    def _start(self, jobs: Sequence[PushJob], slots: Sequence[int], sender: _Sender) -> None:
        layout = self._paged.layout
        parcels = []
        for job, slot in zip(jobs, slots, strict=True):
            payload = self._pool.slot(slot)
            parcels.append(Parcel(job.ref, payload[: layout.payload_bytes(job.ref.num_blocks)]))
        delivery = _Delivery(sender.receiver, parcels, slots, self._paged)
        self._deliveries.append(delivery)
        sender.send(delivery)

    def _end(self, *, trusted: bool) -> None:
        for delivery in self._deliveries:
            delivery.end(trusted=trusted)
        self._deliveries, self._chunks = [], []

    def _gather_late(self) -> None:
        left_s = STALL_S
        for job, sender in self._late:
            slots, waited_s = self._room.wait_for_one(left_s)
            left_s = max(0.0, left_s - waited_s)
            if not slots:
                self._refuse(job)
                continue
            self._paged.reach(self._paged.gather(job.block_ids, self._pool.slot(slots[0])))
            self._start([job], slots, sender)
            self._end(trusted=True)
        self._late = []


class _Room:
    """Which slots of the buffer are free. Thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(num_slots))
        self._is_stalled = False  # somebody has waited in vain, and nothing came free since
        self._changed = threading.Condition()

    def take(self, at_most: int) -> list[int]:
        with self._changed:
            return [self._free.popleft() for _ in range(min(at_most, len(self._free)))]

    def wait_for_one(self, timeout_s: float) -> tuple[list[int], float]:
        """A slot, or none if none came free, and how long that took."""
        with self._changed:
            waited_s = 0.0 if self._free or self._is_stalled else self._wait(timeout_s)
            self._is_stalled = not self._free
            return self.take(1), waited_s

    def give_back(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._free.extend(slots)
            self._is_stalled = False
            self._changed.notify_all()

    def _wait(self, timeout_s: float) -> float:
        begin_s = time.monotonic()
        self._changed.wait_for(lambda: bool(self._free), timeout_s)
        return time.monotonic() - begin_s


class _Delivery:
    """Chunks of one step for one receiver, between the thread that gathers them and the one that sends them."""

    def __init__(self, receiver: Receiver, parcels: Sequence[Parcel], slots: Sequence[int], paged: PagedKV) -> None:
        self.receiver = receiver
        self.parcels = parcels
        self.slots = slots
        self._num_layers = paged.layout.num_layers
        self._reach = paged.reach
        self._changed = threading.Condition()
        self._done_layers = 0
        self._moment: Moment = None
        self._trusted: bool | None = None  # until the step has ended
        self._ended_s = 0.0

    def advance(self, done_layers: int, moment: Moment) -> None:
        """So many layers have been gathered, once ``moment`` is past."""
        with self._changed:
            self._done_layers, self._moment = done_layers, moment
            self._changed.notify_all()

    def end(self, *, trusted: bool) -> None:
        """All of it was gathered; or, if it is not to be trusted, nothing may be found."""
        with self._changed:
            if trusted:
                self._done_layers, self._moment = self._num_layers, None
            self._trusted = trusted
            self._ended_s = time.monotonic()
            self._changed.notify_all()

    def ready(self) -> Iterator[range]:
        """The layers, as they come; the last one only when all is known to be right."""
        sent_layers = 0
        while sent_layers < self._num_layers:
            usable_layers, moment = self._wait_beyond(sent_layers)
            if self._trusted is False:
                return
            self._reach(moment)
            yield range(sent_layers, usable_layers)
            sent_layers = usable_layers

    def wait(self) -> None:
        """Wait until nothing is gathered for it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._trusted is not None)

    def seconds_behind(self) -> float:
        """How long it was under way after its step."""
        return time.monotonic() - self._ended_s

    def _wait_beyond(self, sent_layers: int) -> tuple[int, Moment]:
        with self._changed:
            self._changed.wait_for(lambda: self._trusted is not None or self._usable_layers() > sent_layers)
            return self._usable_layers(), self._moment

    def _usable_layers(self) -> int:
        return self._done_layers if self._trusted else min(self._done_layers, self._num_layers - 1)


class _Sender:
    """The thread for one receiver: deliveries go one after the other."""

    def __init__(
        self,
        receiver: Receiver,
        connect: Callable[[Receiver], Transport],
        note: Callable[[_Delivery, Sequence[Outcome], KVStoreError | None], None],
    ) -> None:
        self.receiver = receiver
        self._connect = connect
        self._note = note
        self._changed = threading.Condition()
        self._waiting: deque[_Delivery] = deque()
        self._is_sending = False
        self._is_stopped = False
        self._broken_until_s = 0.0
        self._transport: Transport | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-push", daemon=True)
        self._thread.start()

    @property
    def answers(self) -> bool:
        """Whether it did not fail lately."""
        return time.monotonic() >= self._broken_until_s

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send."""
        with self._changed:
            return not self._waiting and not self._is_sending

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def send(self, delivery: _Delivery) -> None:
        """Begin with a delivery, after those before it."""
        with self._changed:
            self._waiting.append(delivery)
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is sent or given up."""
        with self._changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            return self._changed.wait_for(lambda: not self._waiting and not self._is_sending, left_s)

    def retire(self) -> None:
        """Hang up once all is sent or given up; nothing more will come."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Send nothing more, and hang up once what is under way has ended."""
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
        while (delivery := self._next()) is not None:
            outcomes = [Outcome.FAILED] * len(delivery.parcels)
            error: KVStoreError | None = None
            try:
                if self.answers:
                    outcomes = self._deliver(delivery)
            except KVStoreError as problem:
                error = problem
                self._broken_until_s = time.monotonic() + PROBE_INTERVAL_S
                self._hang_up()
            delivery.wait()
            self._note(delivery, outcomes, error)
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
        self._hang_up()

    def _next(self) -> _Delivery | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or bool(self._waiting))
            if not self._waiting:
                return None
            self._is_sending = True
            return self._waiting.popleft()

    def _deliver(self, delivery: _Delivery) -> list[Outcome]:
        if self._transport is None:
            self._transport = self._connect(self.receiver)
        return self._transport.deliver(delivery.parcels, delivery.ready())

    def _hang_up(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
