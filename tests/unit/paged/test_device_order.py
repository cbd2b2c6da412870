"""Order of work of a paged cache on a device that works as late, and in as mixed an order, as CUDA allows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from support.fake_cuda import OUT_OF_MEMORY, UNSUPPORTED, FakeCuda
from support.gate import HANG_GUARD_S
from support.late_device import Failure, LateDevice, LateStream, LateStreams
from support.late_model import BLOCKS, CHUNK_BLOCKS, LAYERS, SMALL_BUFFERS, TWO_LAYERS, Model, Slot, late_cuda
from support.schedules import seeds

from kvstore.model.errors import ConfigError, DeviceFullError, InvalidCallError
from kvstore.model.layout import KVLayout
from kvstore.paged import device as device_module
from kvstore.paged import places as places_module
from kvstore.paged import streams as streams_module
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.planes import find_planes
from kvstore.paged.streams import Copy, CudaStreams, DeviceEvent, Direction, Streams, Work, streams_of
from kvstore.transfer.mover import as_block_ids

MAX_BLOCKS = 6  # of a launch: three chunks
CUDA_LAUNCH, CUDA_RUN = CudaStreams._launch, CudaStreams._run


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the rings, so that their parts are soon used again."""
    monkeypatch.setattr(places_module, "LAUNCHES", 2)
    monkeypatch.setattr(device_module, "MAX_BLOCKS", MAX_BLOCKS)


@pytest.mark.schedules
@pytest.mark.parametrize("staging_bytes", [SMALL_BUFFERS, 3 * SMALL_BUFFERS])
@pytest.mark.parametrize("copy_bytes", [1, TWO_LAYERS, 1 << 18])
@pytest.mark.parametrize("seed", seeds(8))
def test_late_work_has_the_same_results(seed: int, copy_bytes: int, staging_bytes: int) -> None:
    device = LateDevice(seed, eagerness=device_eagerness(seed))
    work_at_random(Model(device, staging_bytes, copy_bytes=copy_bytes))


@pytest.mark.parametrize("batch_error", [None, 0, OUT_OF_MEMORY, UNSUPPORTED])
@pytest.mark.parametrize("seed", range(12))
def test_cuda_streams_put_it_in_the_same_order(
    seed: int, batch_error: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of a launch go one by one, or in a batch, or one by one after a batch that failed."""
    device, cuda = LateDevice(seed, eagerness=device_eagerness(seed)), FakeCuda()
    cuda.batch_error = batch_error or 0
    streams = late_cuda(device, monkeypatch, None if batch_error is None else cuda)
    work_at_random(Model(device, 3 * SMALL_BUFFERS, streams))
    assert not cuda.wrong
    batches = {None: range(1), 0: range(20, 1000), OUT_OF_MEMORY: range(20, 1000), UNSUPPORTED: range(1, 3)}
    assert len(cuda.batches) in batches[batch_error]  # both threads try it once if it is not supported


def test_a_copy_beyond_its_payload_or_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch notices it by itself, but a batch would write to other memory."""
    streams = late_cuda(LateDevice(0), monkeypatch, FakeCuda())
    payload, buffer = np.zeros(8, np.uint8), torch.zeros(16, dtype=torch.uint8)
    wide = np.zeros(16, np.uint8)[::2]
    for copy in (Copy(payload, 0, 9, 0), Copy(payload, -1, 4, 0), Copy(payload, 0, 8, 9), Copy(wide, 0, 8, 0)):
        with pytest.raises(InvalidCallError, match="cannot copy bytes"):
            streams.copy(Direction.OUT, [copy], buffer)


def test_other_threads_also_copy_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda = LateDevice(0), FakeCuda()
    model = Model(device, 3 * SMALL_BUFFERS, late_cuda(device, monkeypatch, cuda))
    model.gather(model.side, 3, layered=False)
    model.check()
    assert (len(cuda.batches), cuda.wrong) == (1, [])


@pytest.mark.parametrize("own", [False, True])
def test_no_other_device_is_touched(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins on device 0, where each use would open a context of 0.5 GB."""
    current, touched = [0], set[int]()

    def touch(number: int) -> None:
        current[0] = number
        touched.add(number)

    @contextmanager
    def device(number: int) -> Iterator[None]:
        former = current[0]
        touch(number)
        yield
        current[0] = former  # and not more: torch opens no context when it leaves a device

    former: list[int] = []

    def enter(_: LateStream) -> None:
        former.append(current[0])
        touch(1)

    late = LateDevice(9)
    late_cuda(late, monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(LateStream, "__enter__", enter)
    monkeypatch.setattr(LateStream, "__exit__", lambda *_: touch(former.pop()))
    streams = CudaStreams(torch.device("cuda", 1), late.make_stream() if own else None)  # type: ignore[arg-type]
    streams.run(lambda: None)
    for direction in Direction:
        streams.reach(streams.launch(direction, lambda: None, streams.now()))
    assert (current, touched) == ([0], {1})


def work_at_random(model: Model) -> None:
    dice = model.dice
    for _ in range(60):
        number, layered = dice.randint(1, 4), dice.random() < 0.4
        match dice.randrange(6):
            case 0 | 1:
                for block in dice.sample(range(BLOCKS), 4):
                    model.compute(block)
            case 2:
                model.gather(model.paged, number, layered=layered)
            case 3:
                model.scatter(model.paged, number, layered=layered)
            case 4:  # next to the model, which writes the same blocks at once
                model.side.streams.hold(model.paged.streams.now())
                used = model.gather(model.side, number, layered=layered)
                model.paged.fence()
                for block in used:
                    model.compute(block)
            case _:
                model.side.streams.hold(model.paged.streams.now())
                model.scatter(model.side, number, layered=layered)
                model.paged.streams.hold(model.side.streams.now())
    model.check()


def device_eagerness(seed: int) -> float:
    """Return an eagerness between as late as can be and at once."""
    return (0.0, 0.3, 0.7, 0.95)[seed % 4]


@pytest.mark.parametrize("seed", range(8))
def test_streams_that_change_between_calls(seed: int) -> None:
    """The current stream may differ at every call, and its work is not ordered with that of the last one."""
    device = LateDevice(seed)
    model = Model(device)
    streams = [device.make_stream(), device.make_stream()]
    for _ in range(40):
        event = model.paged.streams.now()
        with device.on(device.dice.choice(streams)):
            model.paged.streams.hold(event)
            model.compute(device.dice.randrange(BLOCKS))
            model.gather(model.paged, 2, layered=device.dice.random() < 0.5)
            model.scatter(model.paged, 2, layered=device.dice.random() < 0.5)
            event = model.paged.streams.now()
        model.paged.streams.hold(event)
    model.check()


@pytest.mark.parametrize("seed", range(6))
def test_another_thread_saves_while_the_model_computes(seed: int) -> None:
    device = LateDevice(seed)
    model = Model(device)
    for _ in range(10):
        for block in range(BLOCKS):
            model.compute(block)
        event = model.paged.streams.now()

        def save(event: DeviceEvent = event) -> None:
            model.side.streams.hold(event)
            model.gather(model.side, 3, layered=False)

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
    for layered in (False, True):
        model.gather(model.side, 2, layered=layered)
        for slot in model.slots:
            for event in slot.busy:
                model.side.streams.reach(event)
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
        event = model.paged.gather(block_ids, slot.payload)
        assert not model.paged.streams.is_reached(event)
        model.paged.scatter(block_ids, slot.payload, CHUNK_BLOCKS, 0)
    assert device.counts["reach"] == device.counts["wait"] == 0


@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_payload_is_free_before_its_blocks_are_there(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of a scatter is the end of the copy in: the slot is given back while the scatter waits."""
    device = LateDevice(3)
    model = Model(device, SMALL_BUFFERS, late_cuda(device, monkeypatch) if on_cuda else None)
    device.run_all()
    model.compute(0)
    device.stalled = [device.current]
    begin = model.paged.streams.now()
    events = model.paged.scatter_chunks([model.paged.chunk(as_block_ids([1]), model.slots[0].payload)])
    model.paged.streams.reach(events[0])
    assert model.paged.streams.is_reached(events[0])
    assert not model.paged.streams.is_reached(model.paged.streams.now())
    device.stalled = []
    end = model.paged.streams.now()
    model.paged.streams.reach(end)
    assert model.paged.streams.seconds_between(begin, end) > 0
    assert model.paged.streams.is_reached(None)


@pytest.mark.parametrize(
    ("first", "second"), [(Direction.OUT, Direction.OUT), (Direction.OUT, Direction.IN), (Direction.IN, Direction.OUT)]
)
def test_the_next_layer_waits_for_the_places_that_another_stream_has_sent(first: Direction, second: Direction) -> None:
    device = LateDevice(4)
    model = Model(device)
    device.run_all()
    streams = model.paged.streams
    assert isinstance(streams, LateStreams)
    chunks = [model.paged.chunk(as_block_ids([3, 5]), model.slots[0].payload)]
    device.stalled = [device.current if first is Direction.OUT else streams.copying[Direction.IN]]
    for layer, direction in enumerate((first, second)):
        with device.on(device.make_stream() if layer else device.current):
            move = model.paged.gather_layers if direction is Direction.OUT else model.paged.scatter_layers
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


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("direction", Direction)
def test_streams_have_ended_when_all_of_them_have(
    direction: Direction, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(6, eagerness=0.0)
    streams = late_cuda(device, monkeypatch) if on_cuda else LateStreams(device)
    streams.launch(direction, lambda: None, None)
    assert not all(map(streams.is_reached, streams.ends()))
    device.run_all()
    assert all(map(streams.is_reached, streams.ends()))


@pytest.mark.parametrize("runs", [False, True])
def test_only_one_thread_is_in_a_stream(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads of a worker share the streams of its slow loads."""
    streams = late_cuda(LateDevice(8), monkeypatch).for_thread()
    monkeypatch.setattr(CudaStreams, "_launch", CUDA_LAUNCH)  # at once, not on the late device
    monkeypatch.setattr(CudaStreams, "_run", CUDA_RUN)
    start: Callable[[Work], object] = streams.run if runs else lambda work: streams.launch(Direction.IN, work, None)
    is_in, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        is_in.set()
        assert may_leave.wait(HANG_GUARD_S)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(start, stay)
        assert is_in.wait(HANG_GUARD_S)
        second = threads.submit(start, lambda: None)
        assert not second.done()
        with pytest.raises(TimeoutError):
            second.result(0.05)
        may_leave.set()
        first.result(HANG_GUARD_S)
        second.result(HANG_GUARD_S)


@pytest.mark.parametrize("takes_batches", [False, True])
def test_batches_are_used_where_they_are_taken(takes_batches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, late = FakeCuda(), LateDevice(0)
    cuda.uses_host_pointers = takes_batches
    late_cuda(late, monkeypatch)
    monkeypatch.setattr(streams_module, "find_runtime", cuda.runtime)
    streams = streams_of(torch.device("cuda", 1))
    copy = Copy(np.ones(4, np.uint8), 0, 4, 0)
    streams.copy(Direction.IN, [copy], buffer := torch.zeros(4, dtype=torch.uint8))
    assert (len(cuda.batches), buffer.tolist()) == (int(takes_batches), [1] * 4)


@pytest.mark.parametrize("are_caches_made_in_it", [False, True])
def test_caches_bound_in_inference_mode_are_written_to_outside(*, are_caches_made_in_it: bool) -> None:
    """Engines like to start in that mode; other threads are not in it, nor need the model's be."""
    with torch.inference_mode(are_caches_made_in_it):
        caches = {"l": torch.zeros((8, 2, 16), dtype=torch.bfloat16), "m": torch.zeros((8, 2, 3), dtype=torch.uint8)}
    layers = [find_planes(name, cache, 8) for name, cache in caches.items()]
    layout = KVLayout(tuple(layer[0].page_bytes for layer in layers), 1, 2, 4)
    with torch.inference_mode():
        layers = [find_planes(name, cache, 8) for name, cache in caches.items()]
        paged = DevicePagedKV(layers, layout, 8, streams=Streams(torch.device("cpu")))
    payload = np.full(layout.slot_bytes, 7, np.uint8)
    for inside in (False, True):
        with torch.inference_mode(inside):
            paged.scatter(as_block_ids([1, 2]), payload, 2, 0)
            payload[:] = 0
            paged.gather(as_block_ids([1, 2]), payload)
        assert (payload[: layout.payload_bytes(2)] == 7).all()


# Memory


def test_a_device_without_room_at_start() -> None:
    with pytest.raises(ConfigError, match=r"cannot take .* of which 100 bytes are free: lower max_local_gpu_size"):
        Model(LateDevice(0, size_bytes=100))


def test_what_is_taken_at_start_is_what_is_taken() -> None:
    device = LateDevice(0)
    model = Model(device)
    taken = (1 << 24) - device.memory.free_bytes
    assert taken == model.paged.device_bytes + model.side.device_bytes
    for layered in (False, True):
        for paged in (model.paged, model.side):
            model.gather(paged, 3, layered=layered)
            model.scatter(paged, 3, layered=layered)
    assert taken == (1 << 24) - device.memory.free_bytes


@pytest.mark.schedules
@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("launches_before", [0, 1])
@pytest.mark.parametrize("direction", Direction)
def test_a_device_that_is_full_in_a_call_fails_that_call_only(
    seed: int, launches_before: int, direction: Direction
) -> None:
    device = LateDevice(seed, eagerness=device_eagerness(seed))
    model = Model(device)
    full = Failure(torch.OutOfMemoryError("CUDA out of memory"), is_under_way=seed % 3 > 0)
    for _ in range(12):
        model.compute(device.dice.randrange(BLOCKS))
        spare = [Slot(model.paged.layout.slot_bytes) for _ in range(2)]
        chunks = [model.paged.chunk(as_block_ids([n]), slot.payload) for n, slot in enumerate(spare)]
        device.failures.extend([None] * launches_before + [full])
        with pytest.raises(DeviceFullError, match="cpu has no memory left to copy a chunk: lower"):
            (model.paged.gather_chunks if direction is Direction.OUT else model.paged.scatter_chunks)(chunks)
        model.compute(0)  # blocks of a failed load hold garbage
        model.compute(1)
        model.gather(model.paged, 2, layered=device.dice.random() < 0.5)
        model.scatter(model.paged, 2, layered=device.dice.random() < 0.5)
    model.check()


@pytest.mark.parametrize("direction", Direction)
def test_copies_before_one_that_failed_are_uses(direction: Direction) -> None:
    device = LateDevice(0)
    model = Model(device)
    device.run_all()
    streams = model.paged.streams
    assert isinstance(streams, LateStreams)
    device.stalled = [streams.copying[direction]]
    full = Failure(torch.OutOfMemoryError("CUDA out of memory"), is_under_way=True)
    device.failures.extend([None, full] if direction is Direction.OUT else [full])
    chunks = [model.paged.chunk(as_block_ids([1]), model.slots[0].payload)]
    with pytest.raises(DeviceFullError):
        (model.paged.gather_chunks if direction is Direction.OUT else model.paged.scatter_chunks)(chunks)
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
