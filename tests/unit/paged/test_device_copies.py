"""Work of a device for some chunks: launches, copies, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda
from support.late_device import LateDevice, LateStream, late_paged
from support.late_model import BLOCKS, LAYERS, SMALL_BUFFERS, TWO_LAYERS, CudaEvent, Model, N, by_layer, late_cuda

from kvstore.paged.streams import Direction
from kvstore.transfer.mover import as_block_ids


def counted_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each copy between the host and the device from now on."""
    copies: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        copies.append(len(source))
        return copy(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    return copies


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("direction", Direction)
def test_calls_for_each_launch(direction: Direction, layered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are one kernel for three chunks or, by layer, for a layer's planes; a copy for each slot; a few events."""
    device = LateDevice(0)
    model = Model(device, 3 * SMALL_BUFFERS)
    chunks = [
        model.paged.chunk(as_block_ids([2 * n, 2 * n + 1]), slot.payload) for n, slot in enumerate(model.slots[:3])
    ]
    device.counts.clear()
    copies = counted_copies(monkeypatch)
    out = direction is Direction.OUT
    if layered:
        by_layer(model.paged, direction, chunks)
    else:
        (model.paged.gather_chunks if out else model.paged.scatter_chunks)(chunks)
    device.run_all()
    launches = LAYERS if layered else 1
    assert (device.counts["run"], device.counts[direction.name]) == (launches, launches)
    assert len(copies) == 1 + 3 * launches  # the places once, and a copy for each slot
    assert device.counts["now"] + device.counts["hold"] <= 3 * launches
    assert device.counts["reach"] == 0


class CudaCalls(Counter[str]):
    """Calls of the CUDA runtime made through ``CudaStreams``, without launches of kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for owner, name in ((CudaEvent, "record"), (LateStream, "wait_event"), (torch.Tensor, "copy_")):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)), raising=False)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self[name] += 1
            return call(*arguments, **options)

        return counted


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("chunks", "in_a_buffer", "launches"), [(1, 1, 1), (5, 1, 5), (3, 3, 1), (5, 3, 2)])
def test_calls_of_the_runtime(
    direction: Direction,
    chunks: int,
    in_a_buffer: int,
    launches: int,
    in_batches: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each launch of a kernel has two waits and two events, each chunk or launch a copy, and each call the places."""
    device, cuda = LateDevice(0), FakeCuda()
    caches = {
        f"l{n}": torch.zeros((BLOCKS, 512), dtype=torch.uint8) for n in range(4)
    }  # a chunk has as much as a buffer
    paged = late_paged(
        device,
        caches,
        num_blocks=BLOCKS,
        block_tokens=N,
        chunk_tokens=2 * N,
        staging_bytes=in_a_buffer * 4096,
        streams=late_cuda(device, monkeypatch, cuda if in_batches else None),
    )
    payloads = np.zeros((chunks, paged.layout.slot_bytes), np.uint8)
    moved = [paged.chunk(as_block_ids([2 * n, 2 * n + 1]), payload) for n, payload in enumerate(payloads)]
    device.run_all()
    calls = CudaCalls(monkeypatch)
    (paged.gather_chunks if direction is Direction.OUT else paged.scatter_chunks)(moved)
    device.run_all()
    copies = 1 if in_batches else chunks + 1
    assert calls == {"wait_event": 2 * launches, "record": 2 * launches, "copy_": copies}
    assert (len(cuda.batches), sum(cuda.batches)) == ((launches, chunks) if in_batches else (0, 0))
    assert not cuda.wrong


@pytest.mark.parametrize("direction", Direction)
def test_calls_of_the_runtime_by_layer(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(0)
    model = Model(device, 3 * SMALL_BUFFERS, late_cuda(device, monkeypatch))
    moved = [model.paged.chunk(as_block_ids([2 * n, 2 * n + 1]), slot.payload) for n, slot in enumerate(model.slots)]
    device.run_all()
    calls = CudaCalls(monkeypatch)
    by_layer(model.paged, direction, moved)
    device.run_all()
    former_uses = LAYERS - 1  # of the places
    assert calls == {"wait_event": 2 * LAYERS + former_uses, "record": 2 * LAYERS, "copy_": len(moved) * LAYERS + 1}


@pytest.mark.parametrize("num_blocks", [1024, 3000])
def test_a_load_by_layer_that_does_not_fit_into_a_buffer_waits_for_nothing(num_blocks: int) -> None:
    """Its places are written once, and not for every part of every layer, which would fill the ring."""
    device = LateDevice(1, eagerness=0.0)
    caches = {f"l{n}": torch.zeros((num_blocks, 16), dtype=torch.uint8) for n in range(32)}
    paged = late_paged(device, caches, num_blocks=num_blocks, block_tokens=16, chunk_tokens=256)
    parts = -(-num_blocks // (paged._staging.size_bytes // 16))
    assert parts > 1
    device.run_all()
    device.current.launch(lambda: None)  # the step before
    device.stalled = [device.current]
    device.counts.clear()
    blocks = [as_block_ids(range(begin, min(begin + 16, num_blocks))) for begin in range(0, num_blocks, 16)]
    chunks = [paged.chunk(ids, np.full(paged.layout.slot_bytes, 7, np.uint8)) for ids in blocks]
    for layer in range(32):
        paged.scatter_layers(paged.layers_with(layer), chunks)
    assert device.counts["run"] == 32 * parts
    assert device.counts["reach"] == 0
    device.stalled = []
    device.run_all()
    assert all((cache == 7).all() for cache in caches.values())


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("copy_bytes", "launches"), [(1, 3), (TWO_LAYERS, 2), (1 << 18, 1)])
def test_small_layers_go_together(
    direction: Direction, copy_bytes: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are joined until a copy is worth its overhead, which saves launches, and copies of each chunk."""
    device = LateDevice(0)
    model = Model(device, 3 * SMALL_BUFFERS, copy_bytes=copy_bytes)
    chunks = [
        model.paged.chunk(as_block_ids([2 * n, 2 * n + 1]), slot.payload) for n, slot in enumerate(model.slots[:3])
    ]
    device.run_all()
    device.counts.clear()
    copies = counted_copies(monkeypatch)
    by_layer(model.paged, direction, chunks)
    device.run_all()
    assert (device.counts["run"], device.counts[direction.name]) == (launches, launches)
    layers = [len(group) for group in model.paged.layout.layer_groups(copy_bytes)]
    assert sorted(copies) == sorted([24, *(3 * [96 * number for number in layers])])  # the first are the places


@pytest.mark.parametrize(
    ("copy_bytes", "num_copies", "num_bytes"),
    [
        (1, 6, 6 * 24),  # a block of each plane
        (25, 1, 6 * 48 - 24),  # starting a copy costs more than the block between two
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
    """This holds at any cost of starting a copy."""
    device = LateDevice(0)
    model = Model(device, copy_bytes=1 << 18)
    slot = model.slots[0]
    model.spoil(slot)
    model.compute(7)
    model.paged.streams.reach(
        model.paged.gather_layers(range(LAYERS), [model.paged.chunk(as_block_ids([7]), slot.payload, 2, 1)])
    )
    for layer in range(LAYERS):
        begin, end = model.paged.layout.layer_range(layer, 2)
        pages = slot.payload[begin:end].reshape(2, 2, -1)
        assert (pages[:, 0] == 0xEE).all()
        assert (pages[:, 1] == (model.wanted[7] + 31 * layer) % 256).all()
