"""Checks of the order of work across streams, with sleeping kernels that delay the model's stream.

A gather must read the bytes written by the kernels before it, and not those written by the kernels after it. Kernels
after a scatter must see its bytes, and no copy may enter a staging buffer that a scatter still reads.
``check_broken_order`` leaves the waits out, and must find wrong bytes, because otherwise the check proves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from kvstore.memory.slabs import SlabPool
from kvstore.model.chunks import ByteArray
from kvstore.paged.base import BlockIds, PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.streams import CudaStreams, DeviceEvent, Direction, Streams, Work
from kvstore.tools.bench.gpu.bed import Scale
from kvstore.tools.bench.gpu.figures import Figure, count
from kvstore.tools.bench.samples import require

LAYERS, BLOCKS, BLOCK_TOKENS, CHUNK_BLOCKS, CHUNKS = 3, 64, 16, 4, 8
_PAGE = (2, BLOCK_TOKENS, 8, 64)  # 32 KiB in bfloat16
_SLEEP_CYCLES = (1_000_000, 20_000_000)  # up to 10 ms
_LATER = 251  # written by kernels after a gather or scatter
_TIMEOUT_S = 30.0


class Ground:
    """Paged cache in which all bytes of a block have one value, with pinned and unpinned slots."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        shape = (BLOCKS, *_PAGE)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16, device=scale.device) for _ in range(LAYERS)]
        self._bytes = [cache.view(torch.uint8).view(BLOCKS, -1) for cache in self.caches]
        self.paged = self.bind({f"layers.{n}": cache for n, cache in enumerate(self.caches)})
        layout = self.paged.layout
        self.size_bytes = layout.payload_bytes(CHUNK_BLOCKS)
        self._pool = SlabPool(CHUNKS, layout.slot_bytes, self.paged.device)
        require(self._pool.wait_populated(_TIMEOUT_S), f"the pool was not there within {_TIMEOUT_S:.0f} s")
        self._plain = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(CHUNKS)]

    def bind(self, caches: Mapping[str, torch.Tensor]) -> PagedKV:
        """Return the paged cache of these tensors."""
        chunk_tokens = CHUNK_BLOCKS * BLOCK_TOKENS
        return bind_paged_kv(caches, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, chunk_tokens=chunk_tokens)

    def slots(self, *, pinned: bool) -> list[ByteArray]:
        """Return one slot for each chunk."""
        return [self._pool.slot(n) for n in range(CHUNKS)] if pinned else self._plain

    def on_device(self, ids: BlockIds) -> torch.Tensor:
        """Return block ids for ``write`` and ``read``; call it in advance, because the copy waits for the device."""
        return torch.from_numpy(ids).to(self._scale.device)

    def write(self, where: torch.Tensor, value: int) -> None:
        """Launch kernels that fill blocks."""
        for cache in self._bytes:
            cache.index_fill_(0, where, value)

    def read(self, where: torch.Tensor) -> torch.Tensor:
        """Launch kernels that read blocks, and return the smallest and the largest byte of each layer."""
        found = [cache.index_select(0, where) for cache in self._bytes]
        return torch.stack([edge for part in found for edge in (part.min(), part.max())])

    def hold_up(self, dice: random.Random) -> None:
        """Delay the current stream for a random time."""
        if self._scale.is_cuda:
            torch.cuda._sleep(dice.randint(*_SLEEP_CYCLES))  # type: ignore[no-untyped-call]  # noqa: SLF001

    def wait(self) -> None:
        """Wait for all launched work."""
        self.paged.streams.wait()
        self._scale.wait()

    def close(self) -> None:
        """Unpin the slots."""
        self._pool.close()


class Chunk(NamedTuple):
    """Block ids, on the host and on the device, the byte value that fills the blocks, and a slot."""

    ids: BlockIds
    where: torch.Tensor
    value: int
    slot: ByteArray


class Case(NamedTuple):
    """One random order: its direction, its seed, and whether host memory is pinned."""

    direction: str
    seed: int
    pinned: bool


def check_order(scale: Scale, make: Callable[[Scale], Ground] = Ground) -> Iterator[Figure]:
    """Check random orders of writes, gathers, scatters and reads, each direction, with pinned and unpinned memory.

    Args:
        scale: number of orders.
        make: makes the cache that they run on.
    """
    with closing(make(scale)) as ground:
        for direction in ("out", "in"):
            cases = [Case(direction, seed, pinned) for seed in range(scale.seeds) for pinned in (True, False)]
            wrong = [case for case in cases if not _is_right(ground, case)]
            require(not wrong, f"{len(wrong)} of {len(cases)} orders gave wrong bytes, the first: {wrong[:1]}")
            yield count(f"orders with the right bytes, {direction}", len(cases), len(cases))


def check_broken_order(
    scale: Scale, make: Callable[[Scale], Ground] = Ground, streams: type[Streams] = CudaStreams
) -> Iterator[Figure]:
    """Run the orders of ``check_order`` without the waits between streams, which must give wrong bytes.

    Args:
        scale: number of orders.
        make: makes the cache that they run on.
        streams: class whose waits are left out.
    """
    for direction in ("out", "in"):
        cases = [Case(direction, seed, pinned=True) for seed in range(scale.seeds)]
        with without_waits(streams), closing(make(scale)) as ground:
            wrong = sum(not _is_right(ground, case) for case in cases)
        require(
            wrong > 0, f"without waits {len(cases)} orders {direction} still gave the right bytes: nothing is shown"
        )
        yield count(f"broken orders that were noticed, {direction}", wrong, len(cases), None)


@contextmanager
def without_waits(streams: type[Streams]) -> Iterator[None]:
    """Remove the waits of copy streams, both for a gather and for a scatter that still reads the buffer.

    Waits for copies stay, because block addresses that have not been copied yet would point outside of the cache.
    """
    launch = streams.launch

    def launch_at_once(self: Streams, direction: Direction, work: Work, _after: DeviceEvent) -> DeviceEvent:
        return launch(self, direction, work, None)

    with patch.object(streams, "launch", launch_at_once):
        yield


def _is_right(ground: Ground, case: Case) -> bool:
    dice = random.Random(f"{case}")  # noqa: S311 - an order, not a secret
    chunks = []
    for slot in ground.slots(pinned=case.pinned):
        ids = np.array(dice.sample(range(BLOCKS), CHUNK_BLOCKS), dtype=np.int64)
        chunks.append(Chunk(ids, ground.on_device(ids), dice.randrange(1, _LATER), slot))
    move: Callable[..., bool] = _out if case.direction == "out" else _in
    is_right = move(ground, dice, chunks)
    ground.wait()
    return is_right


def _out(ground: Ground, dice: random.Random, chunks: list[Chunk]) -> bool:
    """Write, gather, and immediately overwrite the same blocks; return True if the slots hold the first write."""
    for chunk in chunks:
        chunk.slot[:] = 0
    moments = []
    for chunk in chunks:
        ground.hold_up(dice)
        ground.write(chunk.where, chunk.value)
        moments.append(ground.paged.gather(chunk.ids, chunk.slot))
        ground.write(chunk.where, _LATER)
    for moment in moments:
        ground.paged.streams.reach(moment)
    return all(bool((chunk.slot[: ground.size_bytes] == chunk.value).all()) for chunk in chunks)


def _in(ground: Ground, dice: random.Random, chunks: list[Chunk]) -> bool:
    """Scatter, read, and immediately overwrite the same blocks; return True if the reads saw the scattered bytes."""
    for chunk in chunks:
        chunk.slot[:] = chunk.value
    found = []
    for chunk in chunks:
        ground.hold_up(dice)
        ground.paged.scatter(chunk.ids, chunk.slot, CHUNK_BLOCKS, 0)
        found.append(ground.read(chunk.where))
        ground.write(chunk.where, _LATER)
    ground.wait()
    return [set(edges.tolist()) for edges in found] == [{chunk.value} for chunk in chunks]
