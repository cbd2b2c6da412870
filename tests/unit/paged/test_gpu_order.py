"""Order of work on the device's slots, on a device that works as late, and in as mixed an order, as CUDA allows.

Unordered work gives other bytes than the same calls carried out one after the other.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import torch
from support.late_device import LateDevice, late_paged

from kvstore.memory.slabs import DeviceSlots
from kvstore.paged import device as device_module
from kvstore.transfer.mover import as_block_ids

BLOCKS, N, CHUNK_BLOCKS, SLOTS = 8, 4, 2, 2


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the rings, so that their parts are soon used again."""
    monkeypatch.setattr(device_module, "MAX_BLOCKS", CHUNK_BLOCKS)


class Model:
    """A paged cache with a separate stream, and the expected contents of its blocks after all work."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.stream = device, device.make_stream()
        self.caches = {f"l{n}": torch.zeros((BLOCKS, N, 6), dtype=torch.uint8) for n in range(2)}
        self.paged = late_paged(device, self.caches, num_blocks=BLOCKS, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
        self.wanted = [0] * BLOCKS

    def compute(self, block: int, value: int) -> None:
        """Launch a kernel that writes a block."""
        self.wanted[block] = value
        for cache in self.caches.values():
            self.stream.launch(partial(cache[block].fill_, value))

    def check(self) -> None:
        found = [{int(n) for cache in self.caches.values() for n in cache[block].flatten()} for block in range(BLOCKS)]
        assert found == [{value} for value in self.wanted]


def make_slots(model: Model) -> DeviceSlots:
    return DeviceSlots(SLOTS, model.paged.layout.slot_bytes, model.paged.streams)


def gather(slots: DeviceSlots, slot: int, model: Model, ids: list[int]) -> None:
    with model.device.on(model.stream), slots.using(slot) as memory:
        model.paged.gather_on_device(as_block_ids(ids), memory[: model.paged.layout.payload_bytes(len(ids))])


def scatter(slots: DeviceSlots, slot: int, model: Model, ids: list[int]) -> None:
    with model.device.on(model.stream), slots.using(slot) as memory:
        payload = memory[: model.paged.layout.payload_bytes(len(ids))]
        model.paged.scatter_on_device(as_block_ids(ids), payload, len(ids), 0)


@pytest.mark.parametrize("seed", range(12))
def test_late_work_has_the_same_results(seed: int) -> None:
    device = LateDevice(seed)
    models = [Model(device), Model(device)]
    slots = make_slots(models[0])
    held: dict[int, list[int]] = {}
    dice, scatters = device.dice, 0
    for _ in range(250):
        slot, model = dice.randrange(SLOTS), dice.choice(models)
        ids = dice.sample(range(BLOCKS), CHUNK_BLOCKS)
        match dice.randrange(3):
            case 0:
                model.compute(ids[0], dice.randrange(256))
            case 1:
                gather(slots, slot, model, ids)
                held[slot] = [model.wanted[block] for block in ids]
            case _ if slot in held:
                scatter(slots, slot, model, ids)
                scatters += 1
                for block, value in zip(ids, held[slot], strict=True):
                    model.wanted[block] = value
        if dice.random() < 0.1:
            model.stream.synchronize()
    device.run_all()
    for model in models:
        model.check()
    assert scatters > 10


@pytest.mark.parametrize("seed", range(4))
def test_a_slot_is_written_only_after_scatters_from_two_streams(seed: int) -> None:
    device = LateDevice(seed)
    quick, slow = Model(device), Model(device)
    slots = make_slots(quick)
    for block in (4, 5):
        quick.compute(block, 5)
    gather(slots, 0, quick, [4, 5])
    slow.compute(7, 1)
    scatter(slots, 0, slow, [0, 1])
    scatter(slots, 0, quick, [2, 3])
    for block in (4, 5):
        quick.compute(block, 6)
    gather(slots, 0, quick, [4, 5])
    device.stalled = [slow.stream]
    with pytest.raises(AssertionError, match="streams wait for each other"):
        quick.stream.synchronize()  # it comes after what the other stream has yet to do
    device.stalled = []
    device.run_all()
    quick.wanted[2:4] = slow.wanted[0:2] = [5, 5]
    quick.check()
    slow.check()


@pytest.mark.parametrize("seed", [1])
def test_other_slots_are_not_held_up(seed: int) -> None:
    device = LateDevice(seed)
    quick, slow = Model(device), Model(device)
    slots = make_slots(quick)
    quick.compute(0, 3)
    slow.compute(0, 4)
    device.stalled = [slow.stream]
    gather(slots, 0, slow, [0, 1])
    gather(slots, 1, quick, [0, 1])
    scatter(slots, 1, quick, [2, 3])
    quick.wanted[2:4] = [3, 0]
    quick.stream.synchronize()
    quick.check()


@pytest.mark.parametrize("seed", range(8))
def test_work_that_raised_is_put_in_order_as_well(seed: int) -> None:
    """Part of it may have been launched."""
    device = LateDevice(seed)
    quick, slow = Model(device), Model(device)
    slots = make_slots(quick)
    with suppress(ZeroDivisionError), device.on(slow.stream), slots.using(0) as memory:
        slow.stream.launch(partial(memory.fill_, 9))
        raise ZeroDivisionError
    quick.compute(0, 3)
    gather(slots, 0, quick, [0, 1])
    scatter(slots, 0, quick, [2, 3])
    device.run_all()
    quick.wanted[2:4] = [3, 0]
    quick.check()


def test_a_slot_is_filled_when_what_its_memory_was_used_for_is_done() -> None:
    """It is filled by another stream than the one that the memory was lent to."""
    device = LateDevice(0, eagerness=0.0)
    model = Model(device)
    slots = make_slots(model)
    device.stalled = [device.current]
    with device.on(model.stream), slots.using(0) as memory:
        model.paged.streams.run(partial(memory.fill_, 5))
    device.run_unstalled()
    device.stalled = []
    device.run_all()
    assert (slots._pool[0] == 5).all()


def test_memory_of_closed_slots_is_lent_again_when_its_last_use_has_ended() -> None:
    device = LateDevice(0)
    model = Model(device)
    slots = make_slots(model)
    model.compute(4, 5)
    model.compute(5, 5)
    gather(slots, 0, model, [4, 5])
    model.stream.synchronize()
    device.stalled = [model.stream]
    scatter(slots, 0, model, [0, 1])
    model.wanted[0:2] = [5, 5]
    pool = slots._pool
    slots.close()
    device.memory.drop(pool)
    other = model.paged.streams.allocate(pool.nbytes)
    model.paged.streams.run(partial(other.fill_, 9))
    device.current.synchronize()
    device.stalled = []
    device.run_all()
    model.check()
