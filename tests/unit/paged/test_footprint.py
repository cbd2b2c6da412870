"""Device memory that a worker takes, compared with what was announced before."""

from __future__ import annotations

import pytest
import torch

from kvstore.model.layout import KVLayout
from kvstore.paged.binding import bind_groups
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.footprint import STAGING_BYTES, WORKER_THREADS, device_bytes, table_bytes
from kvstore.paged.planes import find_planes
from kvstore.paged.streams import Streams
from kvstore.transfer.hot import HotChunks

BLOCKS, LAYERS, TOKENS = 6, 3, 4


class Counting(Streams):
    """Streams that count the bytes requested by all threads together."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.taken: list[int] = []

    def allocate(self, size_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        self.taken.append(size_bytes)
        return super().allocate(size_bytes, dtype)


@pytest.mark.parametrize(("width", "planes"), [(64, 1), (64, 2), (1 << 17, 2)])
def test_all_is_taken_at_start_and_was_said_before(width: int, planes: int) -> None:
    """Chunks may be smaller than a staging buffer, or larger; the kernels' table may be missing."""
    caches = [torch.zeros(*([2] * (planes - 1)), BLOCKS, TOKENS, width // 64, 64) for _ in range(LAYERS)]
    layers = [find_planes(f"layer.{number}", cache, BLOCKS) for number, cache in enumerate(caches)]
    page_bytes = layers[0][0].page_bytes
    layout = KVLayout((page_bytes,) * LAYERS, planes, TOKENS, 4 * TOKENS)
    assert (layout.slot_bytes > STAGING_BYTES) == (width > 64)
    streams = Counting()
    paged = DevicePagedKV(layers, layout, BLOCKS, streams=streams)
    others = [paged.for_thread() for _ in range(WORKER_THREADS - 1)]
    hot = HotChunks(paged, 2 * layout.slot_bytes + 1)
    said = device_bytes(layout, tier_bytes=2 * layout.slot_bytes + 1)
    assert said.total - table_bytes(layout) <= sum(streams.taken) <= said.total
    assert sum(each.device_bytes for each in (paged, *others)) == sum(streams.taken) - said.tier
    taken = len(streams.taken)
    ids, payload = torch.arange(4).numpy(), torch.zeros(layout.slot_bytes, dtype=torch.uint8).numpy()
    paged.streams.reach(paged.gather(ids, payload))
    paged.scatter(ids, payload, 4, 0)
    paged.streams.wait()
    hot.close()
    assert len(streams.taken) == taken, "nothing is taken later"


@pytest.mark.parametrize(("windows", "full"), [(5, 1), (40, 8)])
def test_what_several_groups_take_was_said_before(windows: int, full: int) -> None:
    """Buffers are those of the first group, but hold what is moved at once and not as many tokens of its layers."""
    streams, page_bytes = Counting(), 1 << 16
    first: DevicePagedKV | None = None
    groups = []
    piece_bytes = full * page_bytes * 64
    for group, num_layers in enumerate((windows, full)):
        caches = {f"{group}.{n}": torch.zeros((4, page_bytes), dtype=torch.uint8) for n in range(num_layers)}
        layout = KVLayout((page_bytes,) * num_layers, 1, 16, 1024)
        planes = [find_planes(*layer, 4) for layer in caches.items()]
        groups.append(DevicePagedKV(planes, layout, 4, 1, streams=streams, piece_bytes=piece_bytes, beside=first))
        first = groups[0]
    layout = bind_groups(groups, [1], block_tokens=16, chunk_tokens=1024).layout
    assert layout.slot_bytes == piece_bytes
    said = device_bytes(layout, threads=1)
    assert said.total - table_bytes(layout) <= sum(streams.taken) <= said.total
