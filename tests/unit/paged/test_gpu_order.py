"""The GPU tier's order of work, on a device that does things as late, and as mixed, as CUDA allows.

Launched work waits in its stream. The device takes it from the streams at random, in order within each, and holds back
what waits for an event. It runs only while the host waits for it. Whatever the tier forgets to put in order comes out
with other bytes than the same calls carried out one after the other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kvstore.chunks import ChunkRef, Outcome
from kvstore.paged.base import BlockIds, HostPagedKV, find_planes
from kvstore.paged.binding import bind_paged_kv
from kvstore.tiers.base import Transfer
from kvstore.tiers.gpu.streams import CudaStreams
from kvstore.tiers.gpu.tier import GpuTier
from kvstore.transfer.mover import as_block_ids

if TYPE_CHECKING:
    from kvstore.chunks import ByteArray

BLOCKS, N, CHUNK_BLOCKS, SLOTS = 8, 4, 2, 2
CPU = torch.device("cpu")
A, B = ChunkRef(b"a" * 16, CHUNK_BLOCKS), ChunkRef(b"b" * 16, CHUNK_BLOCKS)


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
        self.before: Callable[[], object] = lambda: None

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        self.late.current.launch(lambda: self.gather(block_ids, payload.numpy()))

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        self.before()
        self.late.current.launch(lambda: self.scatter(block_ids, payload.numpy(), chunk_blocks, first_block))


class LateStreams(CudaStreams):
    device: Device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.device.current.launch(lambda: target.copy_(source))


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
        "device": lambda _device: nullcontext(),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _memory, _stream: None)
    return device


def make_tier(device: Device, model: Model) -> GpuTier:
    tier = GpuTier(model.paged.layout, SLOTS, CPU)
    streams = LateStreams(CPU, SLOTS)
    streams.device = device
    tier._streams = streams
    return tier


@pytest.mark.parametrize("device", range(12), indirect=True)
def test_late_work_has_the_same_results(device: Device) -> None:
    models = [Model(device), Model(device)]
    layout = models[0].paged.layout
    tier = make_tier(device, models[0])
    block_bytes = layout.block_bytes
    held: dict[ChunkRef, list[int]] = {}
    dice = device.dice

    def put(ref: ChunkRef, buffer: ByteArray) -> Outcome:
        values = [dice.randrange(256) for _ in range(ref.num_blocks)]
        for layer in range(2):
            part = buffer[layer * block_bytes : (layer + 1) * block_bytes]
            part[:] = np.repeat(np.array(values, np.uint8), block_bytes // 2)
        (outcome,) = tier.put([Transfer(ref, buffer)])
        buffer[:] = 0xEE  # it is the caller's again
        if outcome is Outcome.STORED:
            held[ref] = values
        return outcome

    def get(ref: ChunkRef, buffer: ByteArray) -> Outcome:
        (outcome,) = tier.get([Transfer(ref, buffer)])
        if outcome is Outcome.HIT:
            wanted = np.repeat(np.array(held[ref] * 2, np.uint8), block_bytes // 2)
            assert buffer[: len(wanted)].tobytes() == wanted.tobytes()
        return outcome

    def gather(ref: ChunkRef, model: Model, ids: list[int]) -> None:
        if tier.gather(ref, model.paged, as_block_ids(ids)) is Outcome.STORED:
            held[ref] = [model.wanted[block] for block in ids]

    def scatter(ref: ChunkRef, model: Model, ids: list[int]) -> None:
        if tier.scatter(ref, model.paged, as_block_ids(ids), 0) is Outcome.HIT:
            for block, value in zip(ids, held[ref], strict=True):
                model.wanted[block] = value

    for _ in range(250):
        ref = ChunkRef(bytes([dice.randrange(3)]) * 16, CHUNK_BLOCKS)
        model, ids = dice.choice(models), dice.sample(range(BLOCKS), CHUNK_BLOCKS)
        buffer = np.zeros(layout.slot_bytes, np.uint8)
        with device.on(model.stream):
            match dice.randrange(8):
                case 0 | 1:
                    model.compute(ids[0], dice.randrange(256))
                case 2 | 3:
                    gather(ref, model, ids)
                case 4 | 5:
                    scatter(ref, model, ids)
                case 6:
                    dice.choice([put, get])(ref, buffer)
                case _:
                    tier.remove([ref])
                    held.pop(ref, None)
        if dice.random() < 0.1:
            model.stream.synchronize()
    device.run_until(lambda: not any(stream.work for stream in device.streams))
    for model in models:
        model.check()
    assert min(tier.counters.hits, tier.counters.stored) > 10


def put_number(tier: GpuTier, ref: ChunkRef, number: int) -> None:
    assert tier.put([Transfer(ref, np.full(4096, number, np.uint8))]) == [Outcome.STORED]


@pytest.mark.parametrize("device", [1], indirect=True)
def test_copies_with_the_host_do_not_wait_for_the_model(device: Device) -> None:
    model = Model(device)
    tier = make_tier(device, model)
    model.compute(0, 1)
    device.stalled = [model.stream]
    with device.on(model.stream):
        put_number(tier, A, 5)
        buffer = np.zeros(4096, np.uint8)
        assert tier.get([Transfer(A, buffer)]) == [Outcome.HIT]
    assert (buffer[: model.paged.layout.payload_bytes(CHUNK_BLOCKS)] == 5).all()
    assert model.stream.work


@pytest.mark.parametrize("device", range(4), indirect=True)
def test_two_that_read_at_the_same_time_are_both_waited_for(device: Device) -> None:
    quick, slow = Model(device), Model(device)
    tier = make_tier(device, quick)
    put_number(tier, A, 5)

    def scatter_slowly() -> None:  # begins after the other one and is launched before it
        with device.on(slow.stream):
            slow.compute(7, 1)
            tier.scatter(A, slow.paged, as_block_ids([0, 1]), 0)

    quick.paged.before = scatter_slowly
    with device.on(quick.stream):
        tier.scatter(A, quick.paged, as_block_ids([2, 3]), 0)
    tier.remove([A])
    put_number(tier, B, 6)  # in the same slot
    device.run_until(lambda: not any(stream.work for stream in device.streams))
    quick.wanted[2:4] = slow.wanted[0:2] = [5, 5]
    quick.check()
    slow.check()
