"""How much a device is given to do for some chunks: launches, copies, and their bytes."""

from __future__ import annotations

import pytest
import torch
from support.late_device import LateDevice
from support.late_model import LAYERS, SMALL_BUFFERS, TWO_LAYERS, Model, by_layer

from kvstore.paged.streams import Way
from kvstore.transfer.mover import as_block_ids


def counted_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long each copy is, from now on, between the host and the device."""
    copies: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        copies.append(len(source))
        return copy(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    return copies


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("way", Way)
def test_calls_for_each_launch(way: Way, layered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for three chunks or, by layer, for all planes of a layer; a copy for each slot; a few moments."""
    device = LateDevice(0)
    model = Model(device, 3 * SMALL_BUFFERS)
    chunks = [
        model.paged.chunk(as_block_ids([2 * n, 2 * n + 1]), slot.payload) for n, slot in enumerate(model.slots[:3])
    ]
    device.counts.clear()
    copies = counted_copies(monkeypatch)
    out = way is Way.OUT
    if layered:
        by_layer(model.paged, way, chunks)
    else:
        (model.paged.gather_chunks if out else model.paged.scatter_chunks)(chunks)
    device.run_all()
    launches = LAYERS if layered else 1
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
    by_layer(model.paged, way, chunks)
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
    model.paged.streams.reach(
        model.paged.gather_layers(range(LAYERS), [model.paged.chunk(as_block_ids([7]), slot.payload, 2, 1)])
    )
    for layer in range(LAYERS):
        begin, end = model.paged.layout.layer_range(layer, 2)
        pages = slot.payload[begin:end].reshape(2, 2, -1)
        assert (pages[:, 0] == 0xEE).all()
        assert (pages[:, 1] == (model.wanted[7] + 31 * layer) % 256).all()
