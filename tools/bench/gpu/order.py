"""The order of work across streams: kernels that only wait hold up the model's stream, and every byte is compared.

A gather must read what the kernels before it wrote, and not what the kernels behind it write; kernels behind a scatter
must see it, and no copy may enter a staging buffer that a scatter still reads. ``check_broken_order`` leaves the waits
out, and must find wrong bytes: otherwise the check shows nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from kvstore.chunks import ByteArray
from kvstore.memory.slabs import SlabPool
from kvstore.paged.base import BlockIds, PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.streams import CudaStreams, Moment, Streams, Way, Work
from kvstore.tools.bench.gpu.figures import Figure, count
from kvstore.tools.bench.gpu.scale import Scale
from kvstore.tools.bench.samples import BenchError, require

LAYERS, BLOCKS, BLOCK_TOKENS, CHUNK_BLOCKS, CHUNKS = 3, 64, 16, 4, 8
_PAGE = (2, BLOCK_TOKENS, 8, 64)  # 32 KiB in bfloat16
_SLEEP_CYCLES = (1_000_000, 20_000_000)  # up to 10 ms
_LATER = 251  # what kernels behind a gather write
_TIMEOUT_S = 30.0


class Ground:
    """A paged cache in which every byte of a block is one number, and slots beside it, pinned and not."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        shape = (BLOCKS, *_PAGE)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16, device=scale.device) for _ in range(LAYERS)]
        self._bytes = [cache.view(torch.uint8).view(BLOCKS, -1) for cache in self.caches]
        self.paged = self.bind({f"layers.{n}": cache for n, cache in enumerate(self.caches)})
        layout = self.paged.layout
        self.size_bytes = layout.payload_bytes(CHUNK_BLOCKS)
        self._pool = SlabPool(CHUNKS, layout.slot_bytes, self.paged.device)
        if not self._pool.wait_populated(_TIMEOUT_S):
            raise BenchError(f"the pool was not there within {_TIMEOUT_S:.0f} s")
        self._plain = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(CHUNKS)]

    def bind(self, caches: Mapping[str, torch.Tensor]) -> PagedKV:
        """The paged cache of these tensors."""
        chunk_tokens = CHUNK_BLOCKS * BLOCK_TOKENS
        return bind_paged_kv(caches, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, chunk_tokens=chunk_tokens)

    def slots(self, *, pinned: bool) -> list[ByteArray]:
        """One slot for each chunk."""
        return [self._pool.slot(n) for n in range(CHUNKS)] if pinned else self._plain

    def on_device(self, ids: BlockIds) -> torch.Tensor:
        """Block ids for ``write`` and ``read``. Copying them there waits for the device: do it before."""
        return torch.from_numpy(ids).to(self._scale.device)

    def write(self, where: torch.Tensor, value: int) -> None:
        """Launch kernels that fill blocks."""
        for cache in self._bytes:
            cache.index_fill_(0, where, value)

    def read(self, where: torch.Tensor) -> torch.Tensor:
        """Launch kernels that read blocks; the smallest and the largest byte of each layer."""
        found = [cache.index_select(0, where) for cache in self._bytes]
        return torch.stack([edge for part in found for edge in (part.min(), part.max())])

    def hold_up(self, dice: random.Random) -> None:
        """Let the current stream wait for a random time."""
        if self._scale.is_cuda:
            torch.cuda._sleep(dice.randint(*_SLEEP_CYCLES))  # type: ignore[no-untyped-call]  # noqa: SLF001

    def wait(self) -> None:
        """Wait for everything."""
        self.paged.streams.wait()
        self._scale.wait()

    def close(self) -> None:
        """Unpin the slots."""
        self._pool.close()


class Chunk(NamedTuple):
    """Blocks, their ids on the device, the number that fills them, and a slot."""

    ids: BlockIds
    where: torch.Tensor
    value: int
    slot: ByteArray


class Case(NamedTuple):
    """One random order: its way, its number, and whether host memory is pinned."""

    way: str
    seed: int
    pinned: bool


def check_order(scale: Scale, make: Callable[[Scale], Ground] = Ground) -> Iterator[Figure]:
    """Random orders of writes, gathers, scatters and reads, each way, to pinned memory and to other.

    Args:
        scale: how many orders.
        make: the cache that they are tried on.

    Raises:
        BenchError: a byte was wrong.
    """
    with closing(make(scale)) as ground:
        for way in ("out", "in"):
            cases = [Case(way, seed, pinned) for seed in range(scale.seeds) for pinned in (True, False)]
            wrong = [case for case in cases if not _is_right(ground, case)]
            require(not wrong, f"{len(wrong)} of {len(cases)} orders gave wrong bytes, the first: {wrong[:1]}")
            yield count(f"orders with the right bytes, {way}", len(cases), len(cases))


def check_broken_order(
    scale: Scale, make: Callable[[Scale], Ground] = Ground, streams: type[Streams] = CudaStreams
) -> Iterator[Figure]:
    """The same without the waits between streams: wrong bytes must come out.

    Args:
        scale: how many orders.
        make: the cache that they are tried on.
        streams: whose waits are left out.

    Raises:
        BenchError: all bytes were right.
    """
    for way in ("out", "in"):
        cases = [Case(way, seed, pinned=True) for seed in range(scale.seeds)]
        with without_waits(streams), closing(make(scale)) as ground:
            wrong = sum(not _is_right(ground, case) for case in cases)
        require(wrong > 0, f"without waits {len(cases)} orders {way} still gave the right bytes: nothing is shown")
        yield count(f"broken orders that were noticed, {way}", wrong, len(cases), None)


@contextmanager
def without_waits(streams: type[Streams]) -> Iterator[None]:
    """Let copy streams wait for nothing: neither for a gather, nor for a scatter that still reads the buffer.

    What waits for copies stays: places of blocks that are not there yet would be addresses outside of the cache.
    """
    launch = streams.launch

    def launch_at_once(self: Streams, way: Way, work: Work, _after: Moment) -> Moment:
        return launch(self, way, work, None)

    with patch.object(streams, "launch", launch_at_once):
        yield


def _is_right(ground: Ground, case: Case) -> bool:
    dice = random.Random(f"{case}")  # noqa: S311 - an order, not a secret
    chunks = []
    for slot in ground.slots(pinned=case.pinned):
        ids = np.array(dice.sample(range(BLOCKS), CHUNK_BLOCKS), dtype=np.int64)
        chunks.append(Chunk(ids, ground.on_device(ids), dice.randrange(1, _LATER), slot))
    move: Callable[..., bool] = _out if case.way == "out" else _in
    is_right = move(ground, dice, chunks)
    ground.wait()
    return is_right


def _out(ground: Ground, dice: random.Random, chunks: list[Chunk]) -> bool:
    """Write, gather, and write the same blocks again at once."""
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
    """Scatter, read, and write the same blocks again at once."""
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
