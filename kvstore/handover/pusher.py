"""Hand-over of chunks from a computing model to other engines: gathered layer by layer, and sent in the background.

The blocks are copied to the pusher's buffer while the step that computes them runs, so they are free as soon as it
ends, however slow a receiver is; on a device, they are free for the model's later launches, and only the sender's
thread waits for the bytes. A step may have computed from KV that could not be loaded. Its chunks must not be found, so
the transport does not get the last layer before the step is known to be right.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.handover.sender import Delivery, Sender
from kvstore.handover.tracker import HandoverTracker, PushJob
from kvstore.handover.transport import Parcel, Receiver, Transport
from kvstore.memory.slabs import SlabPool
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import DeviceFullError, KVStoreError
from kvstore.model.throttle import Throttle
from kvstore.paged.base import ChunkBlocks, PagedKV
from kvstore.paged.streams import DeviceEvent, Direction

logger = logging.getLogger(__name__)

MAX_RECEIVERS = 64  # with a thread and a connection each; beyond that the least recently used is dropped
STALL_S = 1.0  # total wait of a step for room in the buffer; a receiver computes chunks that it does not get


@dataclass
class PushCounters:
    """Chunks since the start, by outcome, and their bytes. Read without its lock."""

    sent: int = 0  # the receiver has them now, or had them before
    refused: int = 0  # no room at the receiver, or in the buffer
    failed: int = 0
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)


class Pusher:
    """Hand-overs of one worker. ``begin`` and its result are for the model's thread.

    Args:
        paged: the model's KV cache.
        buffer_bytes: size of the buffer for chunks that are gathered but not sent.
        connect: opens the transport to a receiver.
        counters: counts the chunks by outcome.

    Attributes:
        paged: the model's KV cache.
        pool: the slots of the buffer.
        room: those of them that are free.
        tracker: the outcomes of the chunks.
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
        self.tracker = HandoverTracker()
        self.paged = paged
        self._connect = connect
        self.pool = SlabPool(max(1, buffer_bytes // layout.slot_bytes), layout.slot_bytes, paged.device)
        self.room = _Room(self.pool.num_slots)
        self._senders: OrderedDict[Receiver, Sender] = OrderedDict()  # the longest unused first
        self._leaving: list[Sender] = []  # get no more deliveries
        self._throttle = Throttle(logger)
        self._seconds: list[float] = []

    @property
    def memory(self) -> ByteArray:
        """Memory that chunks are gathered to; it contains every payload that is sent."""
        return self.pool.memory

    def begin(self, pushes: Sequence[tuple[Receiver, Sequence[PushJob]]]) -> StepPush:
        """Begin the hand-overs of a step that is about to compute; the same receiver may occur several times."""
        step = StepPush(self)
        for receiver, jobs in pushes:
            self.tracker.begin(receiver, jobs)
            sender = self._sender(receiver)
            wanted = [job for job in jobs if self.tracker.wants(job)] if sender is not None else []
            self.lose(jobs[len(wanted) :])  # no chunk after a lost one is wanted
            if sender is not None and wanted:
                step.add(wanted, sender)
        return step

    def forgo(self, pushes: Sequence[tuple[Receiver, Sequence[PushJob]]]) -> None:
        """Settle chunks as lost without sending them, because their step is not to be trusted."""
        for receiver, jobs in pushes:
            self.tracker.begin(receiver, jobs)
            self.lose(jobs)

    def complete(self, handovers: Iterable[int]) -> None:
        """Note that these hand-overs get no more chunks. Chunks under way still arrive."""
        for receiver in {self.tracker.complete(handover) for handover in handovers}:
            if receiver is not None and receiver in self._senders:
                self._senders[receiver].tell()

    def change(self, connect: Callable[[Receiver], Transport]) -> None:
        """Replace ``connect``, between steps. Deliveries under way keep their connections."""
        former, self._senders, self._connect = self._senders, OrderedDict(), connect
        self._leave(former.values())

    def take_seconds(self) -> list[float]:
        """Return, for each delivery since the last call, the seconds from the end of its step to its arrival."""
        with self.counters.lock:
            seconds, self._seconds = self._seconds, []
            return seconds

    def flush(self, timeout_s: float) -> bool:
        """Wait until all chunks gathered so far are sent or given up; False if time ran out first."""
        deadline_s = time.monotonic() + timeout_s
        return all(sender.flush(deadline_s) for sender in [*self._senders.values(), *self._leaving])

    def close(self, timeout_s: float) -> None:
        """Wait for deliveries under way within the bound, then disconnect."""
        self.flush(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        senders = [*self._senders.values(), *self._leaving]
        for sender in senders:
            sender.stop()
        for sender in senders:
            sender.join(deadline_s)
        if any(sender.is_alive for sender in senders):
            logger.warning("a receiver of KV does not respond: its thread is abandoned")
        else:
            streams = self.paged.streams
            streams.reach(streams.launch(Direction.OUT, lambda: None, None))  # the last copy to the buffer
            self.pool.close()

    def _sender(self, receiver: Receiver) -> Sender | None:
        """Return the sender for a receiver; None after a recent failure, or if there are too many others."""
        sender = self._senders.get(receiver)
        if sender is None:
            if len(self._senders) >= MAX_RECEIVERS and not self._drop_idle():
                return None
            sender = self._senders[receiver] = Sender(receiver, self._connect, self._note, self.tracker)
        self._senders.move_to_end(receiver)
        return sender if sender.answers else None

    def _drop_idle(self) -> bool:
        idle = next((receiver for receiver, sender in self._senders.items() if sender.is_idle), None)
        if idle is not None:
            self._leave([self._senders.pop(idle)])
        return idle is not None

    def _leave(self, senders: Collection[Sender]) -> None:
        for sender in senders:
            sender.retire()
        self._leaving = [*(sender for sender in self._leaving if sender.is_alive), *senders]

    def refuse(self, job: PushJob) -> None:
        """Count a chunk that got no room in the buffer in time."""
        self.tracker.settle(job, has_arrived=False)
        with self.counters.lock:
            self.counters.refused += 1
        self._throttle.log(
            "room",
            "a chunk of %d blocks is not handed over: the buffer is full of chunks not sent yet; raise pd_buffer_size",
            job.ref.num_blocks,
        )

    def fail(self, error: DeviceFullError, jobs: Sequence[PushJob] = ()) -> None:
        """Log that the device had no memory left; count chunks that belong to no delivery."""
        self.lose(jobs)
        self._throttle.log("memory", "chunks are not handed over: %s", error)

    def lose(self, jobs: Sequence[PushJob]) -> None:
        """Count chunks that were never sent."""
        for job in jobs:
            self.tracker.settle(job, has_arrived=False)
        with self.counters.lock:
            self.counters.failed += len(jobs)

    def _note(self, delivery: Delivery, outcomes: Sequence[Outcome], error: KVStoreError | None) -> None:
        """Count a delivery that has ended. On a sender's thread."""
        layout = self.paged.layout
        with self.counters.lock:
            for parcel, outcome in zip(delivery.parcels, outcomes, strict=True):
                self.counters.sent += outcome is Outcome.STORED
                self.counters.refused += outcome is Outcome.FULL
                self.counters.failed += outcome not in {Outcome.STORED, Outcome.FULL}
                if outcome is Outcome.STORED:
                    self.counters.sent_bytes += layout.payload_bytes(parcel.ref.num_blocks)
            if Outcome.STORED in outcomes:
                self._seconds.append(delivery.seconds_behind())
        for job, outcome in zip(delivery.jobs, outcomes, strict=True):
            self.tracker.settle(job, has_arrived=outcome is Outcome.STORED)
        self.room.give_back(delivery.slots)
        if error is not None:
            said = "KV cannot be handed over to %s, which has to compute it: %s"
            self._throttle.log(str(delivery.receiver), said, delivery.receiver, error)


class StepPush:
    """Hand-overs of one step, which the model advances layer by layer. For the model's thread.

    Chunks for which the buffer has no room when the step begins are gathered after it ends, as room is freed. The step
    waits ``STALL_S`` for that in all, and not at all if an earlier step waited in vain and nothing was sent since.
    """

    def __init__(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self._paged = pusher.paged
        self._deliveries: list[Delivery] = []
        self._chunks: list[ChunkBlocks] = []  # gathered layer by layer
        self._late: list[tuple[PushJob, Sender]] = []  # gathered at the end
        self._computed: set[int] = set()
        self._done_layers = 0
        self._has_failed = False

    def add(self, jobs: Sequence[PushJob], sender: Sender) -> None:
        """Add chunks for a receiver."""
        slots = self._pusher.room.take(len(jobs))
        now, later = jobs[: len(slots)], jobs[len(slots) :]
        self._late += [(job, sender) for job in later]
        if now:
            self._start(now, slots, sender)
            blocks = zip(now, slots, strict=True)
            self._chunks += [self._chunk(job, slot) for job, slot in blocks]

    def reach(self, layer: int) -> None:
        """Gather all layers that are next in order, now that this one has been computed."""
        self._computed.add(layer)
        while not self._has_failed and (layers := self._next_layers()):
            try:
                event = self._paged.gather_layers(layers, self._chunks)
            except DeviceFullError as error:
                self._has_failed = True
                self._pusher.fail(error)
                return
            self._done_layers = layers.stop
            self._advance(self._done_layers, event)

    def _next_layers(self) -> range:
        """Return the layers that are gathered next, if all of them are computed."""
        if self._done_layers not in self._computed:
            return range(0)
        layers = self._paged.layers_with(self._done_layers)
        return layers if self._computed.issuperset(layers) else range(0)

    def finish(self, *, trusted: bool) -> None:
        """Gather the remaining layers after the forward pass, if it is to be ``trusted``.

        Afterwards the blocks are free for later work and launches of the model's thread.
        """
        if trusted and not self._paged.moves_layers:
            self._gather_whole()
        for layer in range(self._done_layers, self._paged.layout.num_layers if trusted else 0):
            self.reach(layer)
        self._end(trusted=trusted)
        if trusted:
            self._gather_late()
        else:
            self._pusher.lose([job for job, _ in self._late])

    def _gather_whole(self) -> None:
        """Gather all layers at once, of a cache of several groups."""
        self._done_layers = self._paged.layout.num_layers
        try:
            events = self._paged.gather_chunks(self._chunks)
        except DeviceFullError as error:
            self._has_failed = True
            self._pusher.fail(error)
        else:
            for event in events[-1:]:  # which covers all earlier ones
                self._advance(self._done_layers, event)

    def _chunk(self, job: PushJob, slot: int) -> ChunkBlocks:
        return self._paged.chunk(job.block_ids, self._pusher.pool.slot(slot), job.ref.num_blocks)

    def _advance(self, done_layers: int, event: DeviceEvent) -> None:
        for delivery in self._deliveries:
            delivery.advance(done_layers, event)

    def _start(self, jobs: Sequence[PushJob], slots: Sequence[int], sender: Sender) -> None:
        layout = self._paged.layout
        parcels = []
        for job, slot in zip(jobs, slots, strict=True):
            payload = self._pusher.pool.slot(slot)
            payload = payload[: layout.payload_bytes(job.ref.num_blocks)]
            parcels.append(Parcel(job.ref, payload, job.trail, job.until_s))
        delivery = Delivery(sender.receiver, jobs, parcels, slots, self._paged)
        self._deliveries.append(delivery)
        sender.send(delivery)

    def _end(self, *, trusted: bool) -> None:
        for delivery in self._deliveries:
            delivery.end(trusted=trusted)
        self._deliveries, self._chunks = [], []

    def _gather_late(self) -> None:
        left_s = STALL_S
        for job, sender in self._late:
            slots, waited_s = self._pusher.room.wait_for_one(left_s)
            left_s = max(0.0, left_s - waited_s)
            if not slots:
                self._pusher.refuse(job)
                continue
            try:
                (event,) = self._paged.gather_chunks([self._chunk(job, slots[0])])
            except DeviceFullError as error:
                self._pusher.room.give_back(slots)
                self._pusher.fail(error, [job])
                continue
            self._start([job], slots, sender)
            self._advance(self._paged.layout.num_layers, event)
            self._end(trusted=True)
        self._late = []


class _Room:
    """Free slots of the buffer. Thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(num_slots))
        self._is_stalled = False  # a step has waited in vain, and no slot was freed since
        self._changed = threading.Condition()

    def take(self, at_most: int) -> list[int]:
        with self._changed:
            return [self._free.popleft() for _ in range(min(at_most, len(self._free)))]

    def wait_for_one(self, timeout_s: float) -> tuple[list[int], float]:
        """Return a slot, or none if none was freed in time, and the seconds waited."""
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
