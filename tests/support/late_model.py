"""A paged cache on a late device, the expected contents of its blocks and slots, and ``CudaStreams`` over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.paged.base import ChunkBlocks, PagedKV
from kvstore.paged.streams import CudaStreams, DeviceEvent, Direction, Streams, Work
from kvstore.transfer.mover import as_block_ids
from support.fake_cuda import FakeCuda
from support.late_device import CPU, LateDevice, LateEvent, LateStream, late_paged

BLOCKS, N, CHUNK_BLOCKS, SLOTS, LAYERS = 12, 4, 2, 5, 3
SMALL_BUFFERS = 4096  # for one chunk, which is rounded up to this
TWO_LAYERS = 150  # of a chunk have as many bytes, and one has fewer


class Slot:
    """Host memory for a chunk, and the value that each of its blocks must have."""

    def __init__(self, size_bytes: int) -> None:
        self.payload = np.zeros(size_bytes, np.uint8)
        self.values: list[int] = []
        self.busy: list[DeviceEvent] = []  # until then the device writes or reads it


class Model:
    """A paged cache whose blocks hold one value each, plus 31 a layer, and their expected contents after all work."""

    def __init__(
        self,
        device: LateDevice,
        staging_bytes: int = SMALL_BUFFERS,
        streams: Streams | None = None,
        copy_bytes: int = 1,
    ) -> None:
        self.device, self.dice = device, device.dice
        shape = (2, BLOCKS, N, 2, 3)
        self.caches = {f"l{n}": torch.full(shape, 31 * n, dtype=torch.uint8) for n in range(LAYERS)}
        self.paged = late_paged(
            device,
            self.caches,
            num_blocks=BLOCKS,
            block_tokens=N,
            chunk_tokens=CHUNK_BLOCKS * N,
            staging_bytes=staging_bytes,
            copy_bytes=copy_bytes,
            streams=streams,
        )
        self.side = self.paged.for_thread()
        self.wanted = [0] * BLOCKS
        self.slots = [Slot(self.paged.layout.slot_bytes) for _ in range(SLOTS)]

    def compute(self, block: int) -> None:
        """Launch kernels that write a block, one for each layer."""
        self.wanted[block] = self.dice.randrange(256)
        for layer, cache in enumerate(self.caches.values()):
            self.device.current.launch(partial(cache[:, block].fill_, (self.wanted[block] + 31 * layer) % 256))

    def take_slots(self, number: int) -> list[Slot]:
        """Return slots that the device no longer uses."""
        slots = self.dice.sample(self.slots, number)
        for slot in slots:
            self.reach(slot)
        return slots

    def reach(self, slot: Slot) -> None:
        for event in slot.busy:
            self.paged.streams.reach(event)
        slot.busy = []
        blocks = len(slot.values)
        begin = 0
        for layer in range(LAYERS if blocks else 0):
            begin, end = self.paged.layout.layer_range(layer, blocks)
            pages = slot.payload[begin:end].reshape(2, blocks, -1)
            found = [sorted(set(pages[:, n].tobytes())) for n in range(blocks)]
            assert found == [[(value + 31 * layer) % 256] for value in slot.values]

    def spoil(self, slot: Slot) -> None:
        """Overwrite a slot on the host, so that work that still reads it reads this."""
        slot.values = []
        slot.payload[:] = 0xEE

    def gather(self, paged: PagedKV, number: int, *, layered: bool) -> list[int]:
        """Gather chunks of different lengths. Returns their blocks."""
        slots, used = self.take_slots(number), []
        free = self.dice.sample(range(BLOCKS), BLOCKS)
        chunks = []
        for slot in slots:
            ids = [free.pop() for _ in range(self.dice.randint(1, CHUNK_BLOCKS))]
            self.spoil(slot)
            slot.values = [self.wanted[block] for block in ids]
            used += ids
            chunks.append(paged.chunk(as_block_ids(ids), slot.payload))
        self.note(slots, chunks, by_layer(paged, Direction.OUT, chunks) if layered else paged.gather_chunks(chunks))
        return used

    def scatter(self, paged: PagedKV, number: int, *, layered: bool) -> None:
        """Scatter chunks, or their ends, to other blocks."""
        slots = [slot for slot in self.take_slots(number) if slot.values]
        free = self.dice.sample(range(BLOCKS), BLOCKS)
        chunks = []
        for slot in slots:
            first = self.dice.randrange(len(slot.values))
            ids = [free.pop() for _ in slot.values[first:]]
            for block, value in zip(ids, slot.values[first:], strict=True):
                self.wanted[block] = value
            chunks.append(paged.chunk(as_block_ids(ids), slot.payload, len(slot.values), first))
        self.note(slots, chunks, by_layer(paged, Direction.IN, chunks) if layered else paged.scatter_chunks(chunks))
        for slot in slots:
            if self.dice.random() < 0.5:
                self.paged.streams.reach(slot.busy[0])
                self.spoil(slot)

    def note(self, slots: Sequence[Slot], chunks: Sequence[ChunkBlocks], events: Sequence[DeviceEvent]) -> None:
        for slot, _, event in zip(slots, chunks, events, strict=True):
            slot.busy.append(event)

    def check(self) -> None:
        self.device.run_all()
        for slot in self.slots:
            self.reach(slot)
        for layer, cache in enumerate(self.caches.values()):
            found = [sorted(set(cache[:, block].numpy().tobytes())) for block in range(BLOCKS)]
            assert found == [[(value + 31 * layer) % 256] for value in self.wanted]


def by_layer(paged: PagedKV, direction: Direction, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
    move = paged.gather_layers if direction is Direction.OUT else paged.scatter_layers
    last: DeviceEvent = None
    for layer in range(LAYERS):
        if paged.layers_with(layer)[-1] == layer:
            last = move(paged.layers_with(layer), chunks)
    return [last] * len(chunks)


class CudaEvent:
    """Event in the place of one of ``torch.cuda``."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.event: LateEvent | None = None  # a wait for an event that was never recorded is no wait

    def record(self, stream: LateStream) -> None:
        self.event = stream.now()

    def query(self) -> bool:
        self._device.run_at_random()
        return self.event is None or self.event.is_reached

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.event is None or self.event.is_reached)

    def elapsed_time(self, end: CudaEvent) -> float:
        """Return the time in ms of the device's clock."""
        assert self.event is not None
        assert end.event is not None
        return float(end.event.stream.done_at[end.event.place] - self.event.stream.done_at[self.event.place]) * 1e3


def late_cuda(device: LateDevice, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda | None = None) -> CudaStreams:
    """Return the streams of a CUDA device that is a late one. Work is launched to torch's current stream.

    Args:
        device: does the work.
        monkeypatch: of the test.
        cuda: takes batches of copies; None without.
    """

    entered: dict[LateStream, AbstractContextManager[None]] = {}

    def enter(stream: LateStream) -> None:
        assert stream not in entered, "torch keeps the former stream of one entry"
        entered[stream] = device.on(stream)
        entered[stream].__enter__()

    def leave(stream: LateStream, *_: object) -> None:
        entered.pop(stream).__exit__(None, None, None)

    def done_on(stream: LateStream, work: Work) -> None:
        if cuda is not None:
            cuda.stream = stream.cuda_stream  # type: ignore[attr-defined]
        work()

    def deferred(launch: Callable[..., Any]) -> Callable[..., Any]:
        def defer(streams: CudaStreams, *arguments: Any) -> Any:
            place = 0 if callable(arguments[0]) else 1  # ``way`` may come first
            work: Work = arguments[place]
            later = [*arguments]
            later[place] = lambda: device.current.launch(partial(done_on, device.current, work))
            return launch(streams, *later)

        return defer

    monkeypatch.setattr(CudaStreams, "_run", deferred(CudaStreams._run))
    monkeypatch.setattr(CudaStreams, "_launch", deferred(CudaStreams._launch))
    monkeypatch.setattr(LateStream, "wait_event", lambda self, event: self.hold(event.event), raising=False)
    monkeypatch.setattr(LateStream, "cuda_stream", property(lambda stream: 1000 + stream.number), raising=False)
    monkeypatch.setattr(LateStream, "__enter__", enter, raising=False)
    monkeypatch.setattr(LateStream, "__exit__", leave, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _memory, _stream: None)
    replacements: dict[str, Any] = {
        "Stream": lambda _device: device.make_stream(),
        "Event": lambda **_options: CudaEvent(device),
        "current_stream": lambda _device: device.current,
        "device": lambda _device: nullcontext(),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return CudaStreams(CPU, runtime=None if cuda is None else cuda.runtime())
