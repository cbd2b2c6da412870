"""Everything that a worker does with a late device, in random order: no byte is wrong.

The model writes blocks, and zeroes and copies some. Chunks of them are stored in the step, by layer, or
asynchronously, and loaded in these ways, from slots, from the tier behind them and from copies on the device. Slots
and blocks are given away as early as by a worker. Blocks' expected contents follow from the order of calls alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gate import HANG_GUARD_S
from support.late_bench import LAYERS, Bench, ref_of
from support.late_device import LateDevice
from support.rig import BLOCKS_PER_CHUNK
from support.schedules import schedules

from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.paged import device as device_module
from kvstore.paged import places as places_module
from kvstore.paged.streams import DeviceEvent
from kvstore.transfer import layerwise
from kvstore.transfer.layerwise import LayerLoad, LayerStore
from kvstore.transfer.mover import LoadJob, LoadResult, StartedStores, StoreJob, as_block_ids

BLOCKS, SLOTS, CALLS = 40, 8, 60
MAX_WRITTEN = 50  # chunks that the tier has room for

Values = list[int | None]
"""The value that fills each block, in every byte; None if unknown."""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the launch buffers, so that they are soon reused, and let layers be read one by one."""
    monkeypatch.setattr(places_module, "LAUNCHES", 3)
    monkeypatch.setattr(device_module, "MAX_BLOCKS", 2 * BLOCKS_PER_CHUNK)
    monkeypatch.setattr(layerwise, "READ_BYTES", 1)


class Save(NamedTuple):
    """Asynchronous stores that have begun, and the blocks that must not be written before they have ended."""

    stores: StartedStores
    jobs: Sequence[StoreJob]
    blocks: Sequence[int]


class Fetch(NamedTuple):
    """An asynchronous load, which owns its slots and blocks until ``end``."""

    end: DeviceEvent
    slots: Sequence[int]
    blocks: Sequence[int]


class Worker:
    """Simulates a worker and its scheduler around one mover. ``act`` does one random action."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.device, self.dice = bench, bench.device, bench.device.dice
        self.mover = bench.mover
        self.loader, self.storer = bench.mover.for_thread(), bench.mover.for_thread()
        self.wanted: Values = list(range(BLOCKS))
        self.chunks: dict[int, Values] = {}  # of what can be loaded
        self.slots: OrderedDict[int, int] = OrderedDict()  # of chunks in memory, the oldest first
        self.written: set[int] = set()  # chunks in the tier
        self.taken: set[int] = set()  # slots of moves that have not ended
        self.held: Counter[int] = Counter()  # blocks of such moves, which several may read
        self.saves: deque[Save] = deque()
        self.fetches: list[Fetch] = []
        self.num_stored = self.num_resets = 0

    def act(self) -> None:
        """Do one random action."""
        actions = (
            [self.compute] * 3
            + [self.zero_and_copy] * 2
            + [self.store, self.store_by_layer, self.save, self.save, self.load, self.load, self.load_by_layer]
            + [self.fetch, self.collect, self.collect, self.device.run_at_random]
        )
        chance = self.dice.random()
        if chance < 0.01:
            self.reset()
        elif chance < 0.02:
            self.sleep()
        elif chance < 0.04:
            self.device.become_full(is_under_way=self.dice.random() < 0.5)
        else:
            self.dice.choice(actions)()

    # -- the model -------------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Let a step write some blocks."""
        for block in self._free_blocks(self.dice.randint(1, 12)):
            self.wanted[block] = self.dice.randrange(256)
            self.bench.model_writes(block, self.wanted[block] or 0)

    def zero_and_copy(self) -> None:
        """Zero blocks that were given away, and copy others to some, as model runner V2 does at the begin of a step."""
        blocks = self._free_blocks(4)
        for block in blocks:
            self.bench.model_writes(block, 0)
            self.wanted[block] = 0
        for block in blocks[:2]:
            source = self.dice.choice([n for n in range(BLOCKS) if n not in self.held and n not in blocks])
            for cache in self.bench.rig.caches.values():
                self.device.current.launch(partial(cache[block].copy_, cache[source]))
            self.wanted[block] = self.wanted[source]

    # -- stores ----------------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Store within the step."""
        jobs, values = self._new_chunks()
        self._note_stores(jobs, values, self.mover.store(jobs))

    def store_by_layer(self) -> None:
        """Store while the step computes the chunks' blocks, layer by layer."""
        jobs, _ = self._new_chunks()
        blocks = {int(block) for job in jobs for block in job.block_ids} - self.held.keys()
        computed = {block: self.dice.randrange(256) for block in blocks}
        moving = LayerStore(self.mover, jobs)
        for layer in range(LAYERS):
            for block, value in computed.items():
                self.bench.model_computes(layer, block, value)
                self.wanted[block] = value
            moving.move(layer)
        failed = moving.finish(trusted=self.dice.random() < 0.8)
        self._note_stores(jobs, [[self.wanted[int(block)] for block in job.block_ids] for job in jobs], failed)

    def save(self) -> None:
        """Save asynchronously; the blocks are given away at once, behind a fence, or when the save has ended."""
        jobs, values = self._new_chunks()
        blocks = [int(block) for job in jobs for block in job.block_ids]
        self.storer.paged.streams.hold(self.mover.paged.streams.now())
        stores = self.storer.start_store(jobs)
        self.taken.update(job.step.slot for job in jobs)
        for job, held in zip(jobs, values, strict=True):
            self.chunks[job.step.ref.prefix_key[0]] = held
        if self.dice.random() < 0.6:
            self.mover.paged.fence()
            for block in set(blocks) - self.held.keys():
                self.wanted[block] = self.dice.randrange(256)
                self.bench.model_writes(block, self.wanted[block] or 0)
            blocks = []
        self.held.update(blocks)
        self.saves.append(Save(stores, jobs, blocks))

    def _new_chunks(self) -> tuple[list[StoreJob], list[Values]]:
        """Return stores of some chunks into slots, and the contents of their blocks; as many as there are slots for."""
        known = [block for block in range(BLOCKS) if self.wanted[block] is not None and block not in self._loading()]
        jobs, values = [], []
        for _ in range(self.dice.randint(1, 5)):
            slot = self._take_slot()
            if slot is None or len(known) < BLOCKS_PER_CHUNK or self.num_stored == 250:
                break
            number, self.num_stored = self.num_stored, self.num_stored + 1
            ids = self.dice.sample(known, BLOCKS_PER_CHUNK)
            targets = (Place.DISK,) if number < MAX_WRITTEN and self.dice.random() < 0.5 else ()
            jobs.append(StoreJob(StoreStep(ref_of(number), slot, targets), as_block_ids(ids)))
            values.append([self.wanted[block] for block in ids])
            self.taken.add(slot)
        self.taken.difference_update(job.step.slot for job in jobs)
        return jobs, values

    def _note_stores(self, jobs: Sequence[StoreJob], values: Sequence[Values], failed: set[PrefixKey]) -> None:
        if any(job.step.targets for job in jobs):
            assert not self.mover.flush(HANG_GUARD_S).pending  # as long the slots are in use
        for job, held in zip(jobs, values, strict=True):
            number = job.step.ref.prefix_key[0]
            if job.step.ref.prefix_key in failed:
                self.chunks.pop(number, None)
                continue
            self.chunks[number] = held
            self.slots[number] = job.step.slot
            if job.step.ref in self.bench.tier.chunks:
                self.written.add(number)

    # -- loads -----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load within the step, whose slots are given away when the call returns."""
        jobs = self._some_loads()
        self._note_loads(jobs, self.mover.load(jobs))
        self._release(jobs)

    def load_by_layer(self) -> None:
        """Load while the step computes."""
        jobs = self._some_loads()
        moving = LayerLoad(self.mover, jobs)
        for layer in range(LAYERS):
            moving.move(layer)
            for block in self._free_blocks(2):
                self.bench.model_computes(layer, block, 7)
                self.wanted[block] = None
        self._note_loads(jobs, moving.finish())
        self._release(jobs)

    def fetch(self) -> None:
        """Load asynchronously, into blocks that the step which begins the load has zeroed."""
        jobs = self._some_loads()
        for job in jobs:
            for block in job.block_ids:
                self.bench.model_writes(int(block), 0)
        self.loader.paged.streams.hold(self.mover.paged.streams.now())
        self._note_loads(jobs, self.loader.load(jobs))
        slots, end = [job.step.slot for job in jobs], self.loader.paged.streams.now()
        self.fetches.append(Fetch(end, slots, [int(n) for job in jobs for n in job.block_ids]))

    def _some_loads(self) -> list[LoadJob]:
        """Return loads of chunks, or their ends, to blocks that they own from now on."""
        jobs: list[LoadJob] = []
        for _ in range(self.dice.randint(1, 4)):
            free = [number for number in self.slots if self.slots[number] not in self.taken]
            gone = sorted(self.written - self.slots.keys())
            number = self.dice.choice([*free, *gone] or [-1])
            first = self.dice.choice([0, 0, self.dice.randrange(BLOCKS_PER_CHUNK)])
            blocks = self._free_blocks(BLOCKS_PER_CHUNK - first)
            slot = self.slots[number] if number in free else self._take_slot()
            if number < 0 or slot is None or len(blocks) < BLOCKS_PER_CHUNK - first:
                break
            source = Place.MEMORY if number in free else Place.DISK
            jobs.append(LoadJob(LoadStep(ref_of(number), slot, source), as_block_ids(blocks), first))
            self.taken.add(slot)
            self.held.update(blocks)
            self.slots[number] = slot
        return jobs

    def _note_loads(self, jobs: Sequence[LoadJob], result: LoadResult) -> None:
        for job in jobs:
            number, has_failed = job.step.ref.prefix_key[0], job.step.ref.prefix_key in result.failed
            for at, block in enumerate(job.block_ids, job.first_block):
                self.wanted[int(block)] = None if has_failed else self.chunks[number][at]
            if has_failed and job.step.source is Place.DISK:
                self.slots.pop(number, None)

    def _release(self, jobs: Sequence[LoadJob]) -> None:
        self.taken.difference_update(job.step.slot for job in jobs)
        self._give_back([int(block) for job in jobs for block in job.block_ids])

    # -- the scheduler ---------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Take note of the asynchronous moves that have ended."""
        for fetch in [fetch for fetch in self.fetches if self.loader.paged.streams.is_reached(fetch.end)]:
            self.fetches.remove(fetch)
            self.taken.difference_update(fetch.slots)
            self._give_back(fetch.blocks)
        if self.saves:
            save = self.saves.popleft()
            self.taken.difference_update(job.step.slot for job in save.jobs)
            self._give_back(save.blocks)
            values = [self.chunks.get(job.step.ref.prefix_key[0], []) for job in save.jobs]
            self._note_stores(save.jobs, values, self.storer.finish_store(save.stores))

    def reset(self) -> None:
        """Forget all chunks, including those that are being saved."""
        self.num_resets += 1
        self.mover.reset(Namespace({"model": f"weights {self.num_resets}"}))
        assert self.mover.settle(HANG_GUARD_S)
        self.slots.clear()
        self.written.clear()

    def sleep(self) -> None:
        """Wait until all is at rest, let the device lose its contents, and restore what kvstore keeps there."""
        self.rest()
        self.reset()
        for cache in self.bench.rig.caches.values():
            cache.fill_(0x5A)
        self.wanted = [None] * BLOCKS
        self.mover.paged.restore()

    def rest(self) -> None:
        """Bring everything to its end, and compare all blocks."""
        self.device.failures.clear()
        self.device.run_all()
        while self.saves or self.fetches:
            self.collect()
        self.device.run_all()
        for block, value in enumerate(self.wanted):
            assert value is None or set(self.bench.rig.held(block).tolist()) == {value}, block

    def _free_blocks(self, number: int) -> list[int]:
        free = [block for block in range(BLOCKS) if block not in self.held]
        return self.dice.sample(free, min(number, len(free)))

    def _give_back(self, blocks: Sequence[int]) -> None:
        self.held = self.held - Counter(blocks)

    def _loading(self) -> set[int]:
        return {block for fetch in self.fetches for block in fetch.blocks}

    def _take_slot(self) -> int | None:
        """Return a slot that no move uses, as far as the host knows; its chunk is forgotten."""
        used = {*self.taken, *self.slots.values()}
        unused = [slot for slot in range(SLOTS) if slot not in used]
        if unused:
            return self.dice.choice(unused)
        idle = [number for number, slot in self.slots.items() if slot not in self.taken]
        return self.slots.pop(idle[0]) if idle else None


@schedules()
@given(
    seed=st.integers(0, 2**32),
    eagerness=st.sampled_from([0.0, 0.3, 0.7]),
    is_uneven=st.booleans(),
    copy_bytes=st.sampled_from([1, 300, 600, 1 << 18]),  # one, two, three and all layers together
)
@pytest.mark.usefixtures("small_parts")
def test_blocks_hold_what_the_model_wrote(seed: int, eagerness: float, copy_bytes: int, *, is_uneven: bool) -> None:
    device = LateDevice(seed, eagerness=eagerness, is_uneven=is_uneven)
    with Bench.running(copy_bytes, device) as bench:
        worker = Worker(bench)
        for _ in range(CALLS):
            worker.act()
        worker.rest()
