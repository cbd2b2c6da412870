"""The order of work of a paged cache on a device that does things as late, and as mixed, as CUDA allows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from support.late_cuda import late_cuda
from support.late_device import Failure, LateDevice, LateStreams, late_paged

from kvstore.errors import ConfigError, DeviceFullError
from kvstore.paged import device as device_module
from kvstore.paged import places as places_module
from kvstore.paged.base import ChunkBlocks, PagedKV
from kvstore.paged.streams import Moment, Streams, Way
from kvstore.transfer.mover import as_block_ids

BLOCKS, N, CHUNK_BLOCKS, SLOTS, LAYERS = 12, 4, 2, 5, 3
SMALL_BUFFERS = 4096  # for one chunk, which is rounded up to this
TWO_LAYERS = 150  # of a chunk have as many bytes, and one has not
MAX_BLOCKS = 6  # of a launch: three chunks


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their parts are soon used again."""
    monkeypatch.setattr(places_module, "LAUNCHES", 2)
    monkeypatch.setattr(device_module, "MAX_BLOCKS", MAX_BLOCKS)


class Slot:
    """Host memory for a chunk, and the value that each of its blocks must have."""

    def __init__(self, size_bytes: int) -> None:
        self.payload = np.zeros(size_bytes, np.uint8)
        self.values: list[int] = []
        self.busy: list[Moment] = []  # until then the device writes or reads it


class Model:
    """A paged cache whose blocks hold one value each, plus 31 a layer, and what they must hold when all is done."""

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
        """Slots that the device uses no more."""
        slots = self.dice.sample(self.slots, number)
        for slot in slots:
            self.reach(slot)
        return slots

    def reach(self, slot: Slot) -> None:
        for moment in slot.busy:
            self.paged.reach(moment)
        slot.busy = []
        blocks = len(slot.values)
        begin = 0
        for layer in range(LAYERS if blocks else 0):
            begin, end = self.paged.layout.layer_range(layer, blocks)
            pages = slot.payload[begin:end].reshape(2, blocks, -1)
            found = [sorted({int(byte) for byte in pages[:, n].flatten()}) for n in range(blocks)]
            assert found == [[(value + 31 * layer) % 256] for value in slot.values]

    def spoil(self, slot: Slot) -> None:
        """The host writes to it: whatever still reads it reads this."""
        slot.values = []
        slot.payload[:] = 0xEE

    def gather(self, paged: PagedKV, number: int, *, by_layer: bool) -> list[int]:
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
        self.note(slots, chunks, _by_layer(paged, Way.OUT, chunks) if by_layer else paged.gather_chunks(chunks))
        return used

    def scatter(self, paged: PagedKV, number: int, *, by_layer: bool) -> None:
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
        self.note(slots, chunks, _by_layer(paged, Way.IN, chunks) if by_layer else paged.scatter_chunks(chunks))
        for slot in slots:
            if self.dice.random() < 0.5:
                self.paged.reach(slot.busy[0])
                self.spoil(slot)

    def note(self, slots: Sequence[Slot], chunks: Sequence[ChunkBlocks], moments: Sequence[Moment]) -> None:
        for slot, _, moment in zip(slots, chunks, moments, strict=True):
            slot.busy.append(moment)

    def check(self) -> None:
        self.device.run_all()
        for slot in self.slots:
            self.reach(slot)
        for layer, cache in enumerate(self.caches.values()):
            found = [sorted({int(byte) for byte in cache[:, block].flatten()}) for block in range(BLOCKS)]
            assert found == [[(value + 31 * layer) % 256] for value in self.wanted]


def _by_layer(paged: PagedKV, way: Way, chunks: Sequence[ChunkBlocks]) -> list[Moment]:
    move = paged.gather_layers if way is Way.OUT else paged.scatter_layers
    last: Moment = None
    for layer in range(LAYERS):
        if paged.layers_with(layer)[-1] == layer:
            last = move(paged.layers_with(layer), chunks)
    return [last] * len(chunks)


@pytest.mark.parametrize("staging_bytes", [SMALL_BUFFERS, 3 * SMALL_BUFFERS])
@pytest.mark.parametrize("copy_bytes", [1, TWO_LAYERS, 1 << 18])
@pytest.mark.parametrize("seed", range(12))
def test_late_work_has_the_same_results(seed: int, copy_bytes: int, staging_bytes: int) -> None:
    device = LateDevice(seed, eagerness=device_eagerness(seed))
    work_at_random(Model(device, staging_bytes, copy_bytes=copy_bytes))


@pytest.mark.parametrize("seed", range(12))
def test_cuda_streams_put_it_in_the_same_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(seed, eagerness=device_eagerness(seed))
    work_at_random(Model(device, SMALL_BUFFERS, late_cuda(device, monkeypatch)))


def work_at_random(model: Model) -> None:
    dice = model.dice
    for _ in range(60):
        number, by_layer = dice.randint(1, 4), dice.random() < 0.4
        match dice.randrange(6):
            case 0 | 1:
                for block in dice.sample(range(BLOCKS), 4):
                    model.compute(block)
            case 2:
                model.gather(model.paged, number, by_layer=by_layer)
            case 3:
                model.scatter(model.paged, number, by_layer=by_layer)
            case 4:  # beside the model, which writes the same blocks at once
                model.side.after(model.paged.moment())
                used = model.gather(model.side, number, by_layer=by_layer)
                model.paged.fence()
                for block in used:
                    model.compute(block)
            case _:
                model.side.after(model.paged.moment())
                model.scatter(model.side, number, by_layer=by_layer)
                model.paged.after(model.side.moment())
    model.check()


def device_eagerness(seed: int) -> float:
    """Now as late as can be, now at once, now in between."""
    return (0.0, 0.3, 0.7, 0.95)[seed % 4]


@pytest.mark.parametrize("seed", range(8))
def test_streams_that_change_between_calls(seed: int) -> None:
    """The current stream may be another one at every call, and what it has been given is not in order with the last."""
    device = LateDevice(seed)
    model = Model(device)
    streams = [device.make_stream(), device.make_stream()]
    for _ in range(40):
        moment = model.paged.moment()
        with device.on(device.dice.choice(streams)):
            model.paged.after(moment)
            model.compute(device.dice.randrange(BLOCKS))
            model.gather(model.paged, 2, by_layer=device.dice.random() < 0.5)
            model.scatter(model.paged, 2, by_layer=device.dice.random() < 0.5)
            moment = model.paged.moment()
        model.paged.after(moment)
    model.check()


@pytest.mark.parametrize("seed", range(6))
def test_another_thread_saves_while_the_model_computes(seed: int) -> None:
    device = LateDevice(seed)
    model = Model(device)
    for _ in range(10):
        for block in range(BLOCKS):
            model.compute(block)
        moment = model.paged.moment()

        def save(moment: Moment = moment) -> None:
            model.side.after(moment)
            model.gather(model.side, 3, by_layer=False)

        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        model.paged.fence()
    model.check()


@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_thread_of_its_own_does_not_wait_for_the_model(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(1)
    model = Model(device, SMALL_BUFFERS, late_cuda(device, monkeypatch) if on_cuda else None)
    model.compute(3)
    device.stalled = [device.current]
    for by_layer in (False, True):
        model.gather(model.side, 2, by_layer=by_layer)
        for slot in model.slots:
            for moment in slot.busy:
                model.side.reach(moment)
    assert device.current.done < device.current.launched


def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "LAUNCHES", 8)
    device = LateDevice(2)
    model = Model(device)
    slots = [Slot(model.paged.layout.slot_bytes) for _ in range(6)]
    device.run_all()
    device.counts.clear()
    device.stalled = [device.current]
    ids = [as_block_ids([2 * n, 2 * n + 1]) for n in range(6)]
    for block_ids, slot in zip(ids, slots, strict=True):
        moment = model.paged.gather(block_ids, slot.payload)
        assert not model.paged.is_reached(moment)
        model.paged.scatter(block_ids, slot.payload, CHUNK_BLOCKS, 0)
    assert device.counts["reach"] == device.counts["wait"] == 0


@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_payload_is_free_before_its_blocks_are_there(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment of a scatter is the end of the copy in: the slot is given back while the scatter waits."""
    device = LateDevice(3)
    model = Model(device, SMALL_BUFFERS, late_cuda(device, monkeypatch) if on_cuda else None)
    device.run_all()
    model.compute(0)
    device.stalled = [device.current]
    begin = model.paged.moment()
    moments = model.paged.scatter_chunks([model.paged.chunk(as_block_ids([1]), model.slots[0].payload)])
    model.paged.reach(moments[0])
    assert model.paged.is_reached(moments[0])
    assert not model.paged.is_reached(model.paged.moment())
    device.stalled = []
    end = model.paged.moment()
    model.paged.reach(end)
    assert model.paged.seconds_between(begin, end) > 0
    assert model.paged.is_reached(None)


@pytest.mark.parametrize(("first", "second"), [(Way.OUT, Way.OUT), (Way.OUT, Way.IN), (Way.IN, Way.OUT)])
def test_the_next_layer_waits_for_the_places_that_another_stream_has_sent(first: Way, second: Way) -> None:
    device = LateDevice(4)
    model = Model(device)
    device.run_all()
    streams = model.paged.streams
    assert isinstance(streams, LateStreams)
    chunks = [model.paged.chunk(as_block_ids([3, 5]), model.slots[0].payload)]
    device.stalled = [device.current if first is Way.OUT else streams.copying[Way.IN]]
    for layer, way in enumerate((first, second)):
        with device.on(device.make_stream() if layer else device.current):
            move = model.paged.gather_layers if way is Way.OUT else model.paged.scatter_layers
            move(range(layer, layer + 1), chunks)
            end = streams.now()
    with pytest.raises(AssertionError, match="wait for each other"):
        streams.reach(end)


def test_places_that_were_overwritten_meanwhile_are_written_again() -> None:
    device = LateDevice(5)
    model = Model(device)
    for block in range(BLOCKS):
        model.compute(block)
    slot, other = model.slots[:2]
    slot.values = [model.wanted[3], model.wanted[5]]
    chunks = [model.paged.chunk(as_block_ids([3, 5]), slot.payload)]
    for layer in range(LAYERS):
        slot.busy = [model.paged.gather_layers(range(layer, layer + 1), chunks)]
        for block in range(BLOCKS):
            model.paged.gather(as_block_ids([block]), other.payload)
    model.check()


# Memory


def test_a_device_without_room_at_start() -> None:
    with pytest.raises(ConfigError, match=r"cannot take .* of which 100 bytes are free: lower max_local_gpu_size"):
        Model(LateDevice(0, size_bytes=100))


def test_what_is_taken_at_start_is_what_is_taken() -> None:
    device = LateDevice(0)
    model = Model(device)
    taken = (1 << 24) - device.memory.free_bytes
    assert taken == model.paged.device_bytes + model.side.device_bytes
    for by_layer in (False, True):
        for paged in (model.paged, model.side):
            model.gather(paged, 3, by_layer=by_layer)
            model.scatter(paged, 3, by_layer=by_layer)
    assert taken == (1 << 24) - device.memory.free_bytes


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("launches_before", [0, 1])
@pytest.mark.parametrize("way", Way)
def test_a_device_that_is_full_in_a_call_fails_that_call_only(seed: int, launches_before: int, way: Way) -> None:
    device = LateDevice(seed, eagerness=device_eagerness(seed))
    model = Model(device)
    full = Failure(torch.OutOfMemoryError("CUDA out of memory"), is_under_way=seed % 3 > 0)
    for _ in range(12):
        model.compute(device.dice.randrange(BLOCKS))
        spare = [Slot(model.paged.layout.slot_bytes) for _ in range(2)]
        chunks = [model.paged.chunk(as_block_ids([n]), slot.payload) for n, slot in enumerate(spare)]
        device.failures.extend([None] * launches_before + [full])
        with pytest.raises(DeviceFullError, match="cpu has no memory left to copy a chunk: lower"):
            (model.paged.gather_chunks if way is Way.OUT else model.paged.scatter_chunks)(chunks)
        model.compute(0)  # blocks of a failed load hold garbage
        model.compute(1)
        model.gather(model.paged, 2, by_layer=device.dice.random() < 0.5)
        model.scatter(model.paged, 2, by_layer=device.dice.random() < 0.5)
    model.check()


@pytest.mark.parametrize("way", Way)
def test_copies_before_one_that_failed_are_uses(way: Way) -> None:
    device = LateDevice(0)
    model = Model(device)
    device.run_all()
    streams = model.paged.streams
    assert isinstance(streams, LateStreams)
    device.stalled = [streams.copying[way]]
    full = Failure(torch.OutOfMemoryError("CUDA out of memory"), is_under_way=True)
    device.failures.extend([None, full] if way is Way.OUT else [full])
    chunks = [model.paged.chunk(as_block_ids([1]), model.slots[0].payload)]
    with pytest.raises(DeviceFullError):
        (model.paged.gather_chunks if way is Way.OUT else model.paged.scatter_chunks)(chunks)
    with pytest.raises(AssertionError, match="wait for each other"):
        streams.reach(streams.now())


def test_a_broken_device_is_not_a_full_one() -> None:
    device = LateDevice(0)
    model = Model(device)
    device.failures.append(Failure(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        model.paged.gather(as_block_ids([1]), model.slots[0].payload)


@pytest.mark.parametrize("seed", range(8))
def test_buffers_that_are_dropped_are_lent_again_when_the_last_copy_is_done(seed: int) -> None:
    device = LateDevice(seed, eagerness=0.0)
    model = Model(device)
    for block in range(BLOCKS):
        model.compute(block)
    slot = model.slots[0]
    slot.values = model.wanted[:2]
    slot.busy.append(model.paged.gather(as_block_ids([0, 1]), slot.payload))
    for buffer in model.paged._staging.buffers:
        device.memory.drop(buffer)
    streams = model.paged.streams
    for _ in range(3):
        other = streams.allocate(SMALL_BUFFERS)
        streams.run(partial(other.fill_, 0xAA))
    model.check()


# Budget


def counted_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long each copy is, from now on, between the host and the device."""
    copies: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        copies.append(len(source))
        return copy(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    return copies


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("way", Way)
def test_calls_for_each_launch(way: Way, by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for three chunks or, by layer, for all planes of a layer; a copy for each slot; a few moments."""
    device = LateDevice(0)
    model = Model(device, 3 * SMALL_BUFFERS)
    chunks = [
        model.paged.chunk(as_block_ids([2 * n, 2 * n + 1]), slot.payload) for n, slot in enumerate(model.slots[:3])
    ]
    device.counts.clear()
    copies = counted_copies(monkeypatch)
    out = way is Way.OUT
    if by_layer:
        _by_layer(model.paged, way, chunks)
    else:
        (model.paged.gather_chunks if out else model.paged.scatter_chunks)(chunks)
    device.run_all()
    launches = LAYERS if by_layer else 1
    assert (device.counts["run"], device.counts[way.name]) == (launches, launches)
    assert len(copies) == 1 + 3 * launches  # the places once, and a copy for each slot
    assert device.counts["now"] + device.counts["hold"] <= 3 * launches
    assert device.counts["reach"] == 0


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize(("copy_bytes", "launches"), [(1, 3), (TWO_LAYERS, 2), (1 << 18, 1)])
def test_small_layers_go_together(way: Way, copy_bytes: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until what a copy brings is worth its beginning: the fewer layers' launches, and copies for each chunk."""
    device = LateDevice(0)
    model = Model(device, 3 * SMALL_BUFFERS, copy_bytes=copy_bytes)
    chunks = [
        model.paged.chunk(as_block_ids([2 * n, 2 * n + 1]), slot.payload) for n, slot in enumerate(model.slots[:3])
    ]
    device.run_all()
    device.counts.clear()
    copies = counted_copies(monkeypatch)
    _by_layer(model.paged, way, chunks)
    device.run_all()
    assert (device.counts["run"], device.counts[way.name]) == (launches, launches)
    layers = [len(group) for group in model.paged.layout.layer_groups(copy_bytes)]
    assert sorted(copies) == sorted([24, *(3 * [96 * number for number in layers])])  # the first are the places


@pytest.mark.parametrize(
    ("copy_bytes", "num_copies", "num_bytes"),
    [
        (1, 6, 6 * 24),  # a block of each plane
        (25, 1, 6 * 48 - 24),  # to begin a copy is dearer than the block between two
        (1 << 18, 1, 6 * 48 - 24),
    ],
)
def test_what_is_not_scattered_is_not_copied(
    copy_bytes: int, num_copies: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(0)
    model = Model(device, copy_bytes=copy_bytes)
    slot = model.slots[0]
    slot.values = [3, 4]
    for layer in range(LAYERS):
        for block, value in enumerate(slot.values):
            begin, end = model.paged.layout.layer_range(layer, 2)
            slot.payload[begin:end].reshape(2, 2, -1)[:, block] = (value + 31 * layer) % 256
    device.run_all()
    copies = counted_copies(monkeypatch)
    slot.busy = [model.paged.scatter(as_block_ids([7]), slot.payload, 2, 1)]
    model.wanted[7] = 4
    model.check()
    assert (len(copies), sum(copies)) == (1 + num_copies, 4 + num_bytes)


def test_nothing_but_its_blocks_is_written_to_a_payload() -> None:
    """However dear it is to begin a copy."""
    device = LateDevice(0)
    model = Model(device, copy_bytes=1 << 18)
    slot = model.slots[0]
    model.spoil(slot)
    model.compute(7)
    model.paged.reach(
        model.paged.gather_layers(range(LAYERS), [model.paged.chunk(as_block_ids([7]), slot.payload, 2, 1)])
    )
    for layer in range(LAYERS):
        begin, end = model.paged.layout.layer_range(layer, 2)
        pages = slot.payload[begin:end].reshape(2, 2, -1)
        assert (pages[:, 0] == 0xEE).all()
        assert (pages[:, 1] == (model.wanted[7] + 31 * layer) % 256).all()
