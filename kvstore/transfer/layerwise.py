"""Loads and stores that advance one layer at a time, so that a model can compute a layer while the next is in transit.

A slower tier that can read single layers reads groups of them, the first group of every chunk, then the next group of
every chunk, so that no layer waits for bytes that are needed later. Any other tier reads whole chunks, for layer 0.
Every layer is verified before it is scattered. In host memory the next layer is scattered on a thread while the model
computes. On a device a copy is only launched, which needs no thread, and a slot stays in use until the copies have
ended.

No lock is held between two layers. The caller must call ``finish``, which works in any state.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

from kvstore.index.plans import LoadStep, Place
from kvstore.memory.slabs import Filling
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.keys import PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.paged.base import ChunkBlocks
from kvstore.paged.streams import DeviceEvent, Direction
from kvstore.transfer.lane import Arrival
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, StoreJob

READ_BYTES = 768 << 10  # minimum size of a read, because many smaller ones are slower
MAX_GROUPS = 16  # more would not let the model start much earlier
IDLE_SHARE = 0.1  # of a layer's load time; a model that returned sooner did not compute
READ_AHEAD_GROUPS = 2  # groups being read after the one in use

T = TypeVar("T")


class LayerLoad:
    """Loads in progress. For one thread at a time, the mover's; between two calls the model may run.

    The blocks belong to this object until ``finish`` or ``halt``, which may be called at any time.

    Args:
        mover: may serve other calls in the meantime.
        jobs: the loads. A job whose source is memory may name a chunk that an earlier job loads into it.
    """

    def __init__(self, mover: Mover, jobs: Sequence[LoadJob]) -> None:
        self._mover = mover
        self._jobs = list(jobs)
        self._groups = layer_groups(mover.paged.layout)
        self._reading: dict[int, _Reading] = {}  # by slot
        for job in jobs:
            if job.step.source is not Place.MEMORY:
                self._reading[job.step.slot] = _Reading(mover, job.step)
        self._num_layers = mover.paged.layout.num_layers
        self._done_layers = 0
        self._groups_asked = 0
        self._mislabelled = 0
        self._result = LoadResult(set(), set())
        self._hot: set[PrefixKey] = set()  # loaded as a whole, from the device
        self._fillings: dict[int, Filling | None] = {}  # the content of the slots at their first use, by job number
        self._blocks: dict[int, ChunkBlocks] = {}  # of the jobs, by number
        self._event: DeviceEvent = None  # the end of the reads of slots so far
        self._turn: DeviceEvent = None  # the end of the last call, whose thread may have another current stream
        self._uses_thread = not mover.launches
        self._next_layer: Future[None] | None = None  # scattered while the model computes
        self._returned_s = -math.inf  # the time at which the last layer was loaded
        self._scattering = threading.RLock()  # the garbage collector may call ``halt`` on the thread that scatters
        self._is_halted = False

    def move(self, layer: int) -> None:
        """Load one layer of all chunks into the paged cache, the layers in order. Waits for it.

        If a chunk fails at a layer, its blocks stay unchanged from that layer on.
        """
        begin_s = time.perf_counter()
        self._mover.paged.streams.hold(self._turn)
        layers = self._mover.paged.layers_with(layer)
        if layer == layers.start:
            self._read_ahead(layers[-1])
            if self._next_layer is None or self._next_layer.cancel():  # it may wait long for another load's layer
                self._bring(layers)
            else:
                self._next_layer.result()
            self._next_layer = None
        computed_s, took_s = begin_s - self._returned_s, time.perf_counter() - begin_s
        # Where nothing is computed in between, waking the thread costs more than it saves.
        is_last = layer == layers[-1] < self._num_layers - 1  # of those that are moved together
        if self._uses_thread and is_last and computed_s > IDLE_SHARE * took_s:
            following = self._mover.paged.layers_with(layer + 1)
            self._read_ahead(following[-1])
            self._next_layer = self._mover.in_background(lambda: self._bring(following))
        self._done_layers = layer + 1
        self._turn = self._mover.paged.streams.now()
        self._returned_s = time.perf_counter()

    def _bring(self, layers: range) -> None:
        """Wait for layers and scatter them. On any thread, because it uses only the state of this load."""
        arrived = {}
        for number, job in enumerate(self._jobs):
            key = job.step.ref.prefix_key
            if key in self._result.failed:
                continue
            source = self._source(job.step, layers[-1])
            if source is None or not len(job.block_ids):
                continue
            if layers.start == 0:
                self._fillings[number] = self._mover.cpu.filling(job.step.slot, job.step.ref)
                if self._mover.scatter_hot(job, self._fillings[number]):
                    self._hot.add(key)
            if key not in self._hot:
                arrived[number] = self._blocks_of(number, source)
        with self._scattering:
            if not self._is_halted:
                self._scatter(layers, arrived)

    def _scatter(self, layers: range, arrived: dict[int, ChunkBlocks]) -> None:
        """Copy layers of chunks, by the numbers of their jobs."""
        steps = [self._jobs[number].step for number in arrived]

        def scatter() -> None:
            self._event = self._mover.paged.scatter_layers(layers, list(arrived.values()))

        if not self._mover.launcher.attempt([step.slot for step in steps], Direction.IN, scatter):
            self._result.failed.update(step.ref.prefix_key for step in steps)

    def _blocks_of(self, number: int, source: ByteArray) -> ChunkBlocks:
        """Return the blocks of a job's chunk, which are determined once and used for all layers."""
        if number not in self._blocks:
            step, block_ids, first_block = self._jobs[number]
            self._blocks[number] = self._mover.paged.chunk(block_ids, source, step.ref.num_blocks, first_block)
        return self._blocks[number]

    def halt(self) -> None:
        """Stop using the blocks. Any thread may call it; it waits only for a copy in progress."""
        self._is_halted = True
        with self._scattering:
            pass

    def finish(self) -> LoadResult:
        """End all reads. Returns the chunks that failed, including those whose last layer was not read.

        Complete chunks are in memory from now on.
        """
        are_blocks_ours = not self._is_halted
        self.halt()
        if self._next_layer is not None and not self._next_layer.cancel():
            self._next_layer.exception()  # it waits for reads, each of which ends within its tier's deadline
        for reading in self._reading.values():
            reading.end()
            if reading.is_whole:
                self._mover.note_arrival(reading.step)
            else:
                self._result.failed.add(reading.step.ref.prefix_key)
        self._mover.launcher.note_uses((job.step.slot for job in self._jobs), self._event)
        self._mover.counters.mislabelled_slots += self._mislabelled
        if are_blocks_ours and self._done_layers == self._num_layers:
            self._note_loads()
        return self._result

    def _note_loads(self) -> None:
        """Note the loads after every layer, while the blocks still belong to the load, so that hot copies are possible.

        After a failure there are no copies, because the model may have written results of garbage into loaded blocks.
        """
        for number, job in enumerate(self._jobs):
            key = job.step.ref.prefix_key
            if key in self._result.failed:
                continue
            filling = self._fillings.get(number) or self._mover.cpu.filling(job.step.slot, job.step.ref)
            filling = None if self._result.failed else filling
            self._mover.note_load(job, filling, is_hot=key in self._hot)

    def _read_ahead(self, layer: int) -> None:
        """Start to read this layer and some after it, of every chunk in turn."""
        current = next(number for number, group in enumerate(self._groups) if layer in group)
        for group in self._groups[self._groups_asked : current + 1 + READ_AHEAD_GROUPS]:
            for reading in self._reading.values():
                reading.ask(group)
            self._groups_asked += 1

    def _source(self, step: LoadStep, layer: int) -> ByteArray | None:
        """Wait for ``layer`` and return the slot of a chunk; None after a failure, which is noted."""
        reading = self._reading.get(step.slot)
        if reading is None:
            source, outcome = self._mover.cpu.read(step.slot, step.ref), Outcome.FAILED
            self._mislabelled += source is None
        else:
            outcome = reading.wait(layer)
            source = reading.buffer if outcome is Outcome.HIT else None
        if source is None:
            self._result.note(step.ref, outcome)
        return source


class _Reading:
    """Reads of one chunk, in the order of its layers."""

    def __init__(self, mover: Mover, step: LoadStep) -> None:
        self.step = step
        self.buffer = mover.cpu.claim(step.slot)
        self._mover = mover
        self._num_layers = mover.paged.layout.num_layers
        self._in_parts = mover.reads_layers(step.source) and step.holder is None
        self._reads: deque[tuple[int, Future[Arrival]]] = deque()  # each with its end layer (exclusive)
        self._asked_layers = 0
        self._done_layers = 0
        self._outcome = Outcome.HIT

    @property
    def is_whole(self) -> bool:
        """True if every layer has arrived."""
        return self._done_layers == self._num_layers

    def ask(self, layers: range) -> None:
        """Start to read the next layers, or all of them if the tier reads only whole chunks."""
        if self._outcome is not Outcome.HIT or self._asked_layers == self._num_layers:
            return
        self._asked_layers = layers.stop if self._in_parts else self._num_layers
        read = self._mover.start_read(self.step, layers if self._in_parts else None)
        self._reads.append((self._asked_layers, read))

    def wait(self, layer: int) -> Outcome:
        """Wait for a layer. Returns HIT, or the outcome of the read that failed."""
        while self._outcome is Outcome.HIT and self._done_layers <= layer:
            stop, read = self._reads[0]
            self._outcome = read.result().outcome
            if self._outcome is Outcome.HIT:
                self._done_layers = stop
                self._reads.popleft()
        return self._outcome

    def end(self) -> None:
        """Cancel or await the remaining reads, because none may write to a slot that is released."""
        while self._reads:
            self._mover.end_read(self.step, self._reads.popleft()[1])


class LayerStore:
    """Stores in progress. For one thread at a time, the mover's; between two calls the model may run."""

    def __init__(self, mover: Mover, jobs: Sequence[StoreJob]) -> None:
        self._mover = mover
        self._jobs = list(jobs)
        self._stuck = {job.step.slot for job in jobs if mover.is_stuck(job.step.slot)}
        self._generations = mover.generations()
        self._chunks: dict[int, ChunkBlocks] = {}  # the chunks to gather, by slot
        self._done_layers = 0
        self._event: DeviceEvent = None  # the end of the gathers so far
        self._turn: DeviceEvent = None  # the end of the last call, whose thread may have another current stream

    def move(self, layer: int) -> None:
        """Gather one layer of all chunks, the layers in order. Small ones wait for those that are moved with them."""
        self._mover.paged.streams.hold(self._turn)
        self._gather(layer)
        self._turn = self._mover.paged.streams.now()

    def _gather(self, layer: int) -> None:
        if layer == 0:
            paged, cpu = self._mover.paged, self._mover.cpu
            self._chunks = {
                job.step.slot: paged.chunk(job.block_ids, cpu.claim_on_device(job.step.slot, paged.streams))
                for job in self._jobs
                if job.step.gather and job.step.slot not in self._stuck
            }

        layers = self._mover.paged.layers_with(layer)
        if layer != layers[-1] or layers.start != self._done_layers:
            return

        def gather() -> None:
            self._event = self._mover.paged.gather_layers(layers, list(self._chunks.values()))

        if self._mover.launcher.attempt(list(self._chunks), Direction.OUT, gather):
            self._done_layers = layers.stop

    def finish(self, *, trusted: bool = True) -> set[PrefixKey]:
        """Publish the chunks, and start their writes. Returns the keys of those that failed.

        All fail if a layer is missing, or if the gathered bytes are not ``trusted``.
        """
        self._mover.launcher.note_uses(self._chunks, self._event)  # in any case, because the slots are released
        if not trusted or self._done_layers < self._mover.paged.layout.num_layers:
            return self._mover.refuse(self._jobs)
        self._mover.paged.streams.reach(self._event)
        failed = self._mover.refuse(job for job in self._jobs if job.step.slot in self._stuck)
        for job in self._jobs:
            if job.step.slot not in self._stuck:
                failed |= self._mover.note_store(job, self._generations)
        return failed


class LayerWork(NamedTuple, Generic[T]):
    """Callbacks that ``by_layer`` drives.

    Attributes:
        move: called for every layer in order.
        end: called once, after any of them.
        halt: called before ``end`` when the work is abandoned; afterwards the blocks must not be used.
    """

    move: Callable[[int], None]
    end: Callable[[], T]
    halt: Callable[[], None] = lambda: None


def by_layer(
    begin: Callable[[], LayerWork[T]],
    num_layers: int,
    turn: Callable[[], AbstractContextManager[None]],
    abandoned: deque[Callable[[], object]],
) -> Generator[T | None, None, None]:
    """Advance work by one layer per ``next()``, yielding None after each layer, and finally the result.

    Begins with the first ``next()``. A generator that is closed, garbage-collected or has raised leaves its ``end`` in
    ``abandoned``, to be called in the next turn. It must not wait for a turn itself, because the collector may run at
    any time, also in a thread that holds a lock.
    """
    with turn():
        work = begin()
    is_ended = False
    try:
        for layer in range(num_layers):
            with turn():
                work.move(layer)
            yield None
        with turn():
            is_ended = True
            result = work.end()
        yield result
    finally:
        if not is_ended:
            work.halt()
            abandoned.append(work.end)


def layer_groups(layout: KVLayout) -> list[range]:
    """Return the layers in groups; in a full chunk each group but the last is large enough for a fast read."""
    return layout.layer_groups(max(READ_BYTES, layout.payload_bytes(layout.blocks_per_chunk) // MAX_GROUPS))
