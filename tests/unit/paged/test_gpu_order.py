"""The order of work on the device's slots, on a device that does things as late, and as mixed, as CUDA allows.

Launched work waits in its stream. The device takes it from the streams at random, in order within each, and holds back
what waits for an event. It runs only while the host waits for it. Whatever is not put in order comes out
with other bytes than the same calls carried out one after the other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch

from kvstore.memory.device import DeviceSlots
from kvstore.paged.base import BlockIds, HostPagedKV, find_planes
from kvstore.paged.binding import bind_paged_kv
from kvstore.transfer.mover import as_block_ids

BLOCKS, N, CHUNK_BLOCKS, SLOTS = 8, 4, 2, 2
CPU = torch.device("cpu")


class Device:
    """Streams of work that was launched and not yet done."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.streams: list[Stream] = []
        self.stalled: list[Stream] = []
        self.current = self.make_stream()

    def make_stream(self, _device: object = None) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def make_event(self, **_options: bool) -> Event:
        return Event(self)

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        stuck = 0
        while not is_enough():
            stream = self.dice.choice(self.streams)
            stuck = 0 if stream not in self.stalled and stream.try_next() else stuck + 1
            assert stuck < 10_000, "streams wait for each other"

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        former, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = former


class Stream:
    def __init__(self, device: Device, number: int) -> None:
        self.cuda_stream = number
        self.device = device
        self.work: deque[Callable[[], object]] = deque()  # what returns False has to wait

    def launch(self, action: Callable[[], object]) -> None:
        self.work.append(action)

    def wait_event(self, event: Event) -> None:
        mark = event.mark  # as recorded now: a later record is another matter
        self.launch(lambda: mark in event.reached)

    def try_next(self) -> bool:
        if not self.work or self.work[0]() is False:
            return False
        self.work.popleft()
        return True

    def synchronize(self) -> None:
        self.device.run_until(lambda: not self.work)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.mark = 0
        self.reached = {0}  # waiting for what was never recorded waits for nothing

    def record(self, stream: Stream) -> None:
        self.mark += 1
        mark = self.mark
        stream.launch(lambda: self.reached.add(mark))

    def synchronize(self) -> None:
        mark = self.mark
        self.device.run_until(lambda: mark in self.reached)


class LatePagedKV(HostPagedKV):
    """A paged cache whose copies on the device are launched and not done."""

    def __init__(self, device: Device, caches: dict[str, torch.Tensor]) -> None:
        planes = [find_planes(*layer, BLOCKS) for layer in caches.items()]
        bound = bind_paged_kv(caches, num_blocks=BLOCKS, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
        super().__init__(planes, bound.layout, BLOCKS)
        self.late = device

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        self.late.current.launch(lambda: self.gather(block_ids, payload.numpy()))

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        self.late.current.launch(lambda: self.scatter(block_ids, payload.numpy(), chunk_blocks, first_block))


class Model:
    """A paged cache with a stream of its own, and what its blocks must hold when all is done."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.make_stream()
        self.caches = {f"l{n}": torch.zeros((BLOCKS, N, 6), dtype=torch.uint8) for n in range(2)}
        self.paged = LatePagedKV(device, self.caches)
        self.wanted = [0] * BLOCKS

    def compute(self, block: int, value: int) -> None:
        """Launch a kernel that writes a block."""
        self.wanted[block] = value
        for cache in self.caches.values():
            self.stream.launch(partial(cache[block].fill_, value))

    def check(self) -> None:
        found = [{int(n) for cache in self.caches.values() for n in cache[block].flatten()} for block in range(BLOCKS)]
        assert found == [{value} for value in self.wanted]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(request.param)
    replacements: dict[str, Any] = {
        "Stream": device.make_stream,
        "Event": device.make_event,
        "current_stream": lambda _device: device.current,
        "stream": device.on,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _memory, _stream: None)
    return device


def make_slots(device: Device, model: Model) -> DeviceSlots:
    slots = DeviceSlots(SLOTS, model.paged.layout.slot_bytes, CPU)
    slots._last_uses = [device.make_event() for _ in range(SLOTS)]  # type: ignore[misc]
    return slots


def gather(slots: DeviceSlots, slot: int, model: Model, ids: list[int]) -> None:
    with model.device.on(model.stream), slots.using(slot) as memory:
        model.paged.gather_on_device(as_block_ids(ids), memory[: model.paged.layout.payload_bytes(len(ids))])


def scatter(slots: DeviceSlots, slot: int, model: Model, ids: list[int]) -> None:
    with model.device.on(model.stream), slots.using(slot) as memory:
        payload = memory[: model.paged.layout.payload_bytes(len(ids))]
        model.paged.scatter_on_device(as_block_ids(ids), payload, len(ids), 0)


@pytest.mark.parametrize("device", range(12), indirect=True)
def test_late_work_has_the_same_results(device: Device) -> None:
    models = [Model(device), Model(device)]
    slots = make_slots(device, models[0])
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
    device.run_until(lambda: not any(stream.work for stream in device.streams))
    for model in models:
        model.check()
    assert scatters > 10


@pytest.mark.parametrize("device", range(4), indirect=True)
def test_a_slot_is_written_only_after_scatters_from_two_streams(device: Device) -> None:
    quick, slow = Model(device), Model(device)
    slots = make_slots(device, quick)
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
    device.run_until(lambda: not any(stream.work for stream in device.streams))
    quick.wanted[2:4] = slow.wanted[0:2] = [5, 5]
    quick.check()
    slow.check()


@pytest.mark.parametrize("device", [1], indirect=True)
def test_other_slots_are_not_held_up(device: Device) -> None:
    quick, slow = Model(device), Model(device)
    slots = make_slots(device, quick)
    quick.compute(0, 3)
    slow.compute(0, 4)
    device.stalled = [slow.stream]
    gather(slots, 0, slow, [0, 1])
    gather(slots, 1, quick, [0, 1])
    scatter(slots, 1, quick, [2, 3])
    quick.wanted[2:4] = [3, 0]
    quick.stream.synchronize()
    quick.check()


@pytest.mark.parametrize("device", range(8), indirect=True)
def test_work_that_raised_is_put_in_order_as_well(device: Device) -> None:
    """Part of it may have been launched."""
    quick, slow = Model(device), Model(device)
    slots = make_slots(device, quick)
    with suppress(ZeroDivisionError), device.on(slow.stream), slots.using(0) as memory:
        slow.stream.launch(partial(memory.fill_, 9))
        raise ZeroDivisionError
    quick.compute(0, 3)
    gather(slots, 0, quick, [0, 1])
    scatter(slots, 0, quick, [2, 3])
    device.run_until(lambda: not any(stream.work for stream in device.streams))
    quick.wanted[2:4] = [3, 0]
    quick.check()
