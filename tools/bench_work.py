"""What the bench moves and against what it is held: KV of a model's geometry, memcpy, and raw direct I/O.

Nothing here uses the library's own copies to make or to check data: blocks are filled and compared through torch's
indexing, so the paths measured cannot vouch for themselves.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
import torch

from kvstore import chunkfile
from kvstore.binding import bind_paged_kv
from kvstore.errors import KVStoreError
from kvstore.lanes import WRITE_THREADS
from kvstore.layout import round_up
from kvstore.slabs import SlabPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from kvstore.layout import KVLayout
    from kvstore.tiers.base import ByteArray

T = TypeVar("T")

_ELEMENT_BYTES = 2  # bfloat16
_MEMCPY_PIECE_BYTES = 32 << 20
_POPULATE_TIMEOUT_S = 300.0
_POISON = 0x5A5A


class BenchError(KVStoreError):
    """A path lost or changed what it moved: its times mean nothing."""


@dataclass(frozen=True)
class Geometry:
    """The KV cache of a model, in bfloat16.

    Attributes:
        name: as ``--geometry`` takes it.
        layers: layers with a KV cache.
        kv_heads: KV heads of a layer.
        head_size: elements of a head, for K and for V.
        block_tokens: tokens in a block of vLLM.
        chunk_tokens: tokens in a chunk of ours.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    block_tokens: int = 16
    chunk_tokens: int = 256

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers, K and V."""
        return self.layers * self.block_tokens * self.kv_heads * 2 * self.head_size * _ELEMENT_BYTES

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.blocks_per_chunk * self.block_bytes


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("llama-8b", layers=32, kv_heads=8, head_size=128),
        Geometry("qwen-0.5b", layers=24, kv_heads=2, head_size=64),
    )
}


class Pair(NamedTuple):
    """One sample: a path, and its limit measured right beside it."""

    limit_s: float
    path_s: float


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """How long a call took, in seconds, and what it returned."""
    begin_s = time.perf_counter()
    result = call()
    return time.perf_counter() - begin_s, result


def paired(limit: Callable[[], object], path: Callable[[], T], *, limit_first: bool) -> tuple[Pair, T]:
    """Time a path and its limit, one right after the other, and return the path's result with the times.

    Callers alternate ``limit_first``, so that neither always finds what the other left in caches and queues.
    """
    limit_s = timed(limit)[0] if limit_first else 0.0
    path_s, result = timed(path)
    if not limit_first:
        limit_s = timed(limit)[0]
    return Pair(limit_s, path_s), result


def prefaulted(size_bytes: int) -> ByteArray:
    """A page-aligned buffer on huge pages, every page of it touched: what the library's own pool is made of."""
    pool = SlabPool(1, round_up(size_bytes, 4096))
    if not pool.wait_populated(_POPULATE_TIMEOUT_S):
        raise BenchError(f"{size_bytes} bytes of memory were not there within {_POPULATE_TIMEOUT_S:.0f} s")
    pool.slot(0)[:] = 1  # kernels before 5.14 do not populate
    return pool.slot(0)[:size_bytes]


class Workbench:
    """A paged KV cache of two batches, the data of the batch at hand, and memcpy of as many bytes.

    Caches are logical ``[B, H, N, C]`` tensors in NHD order, as vLLM registers them. A *batch* is one prompt of
    ``num_chunks`` whole chunks.
    """

    def __init__(self, geometry: Geometry, num_chunks: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._geometry = geometry
        self._batch_blocks = num_chunks * geometry.blocks_per_chunk
        self.num_chunks = num_chunks
        self.num_tokens = num_chunks * geometry.chunk_tokens
        self.batch_bytes = num_chunks * geometry.chunk_bytes
        self.tokens: list[int] = []
        shape = (2 * self._batch_blocks, geometry.block_tokens, geometry.kv_heads, 2 * geometry.head_size)
        caches = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(geometry.layers)]
        self._caches = [cache.view(torch.int16) for cache in caches]  # NaNs are not equal to themselves
        self.paged = bind_paged_kv(
            {f"layers.{layer}": cache.permute(0, 2, 1, 3) for layer, cache in enumerate(caches)},
            num_blocks=shape[0],
            block_tokens=geometry.block_tokens,
            chunk_tokens=geometry.chunk_tokens,
        )
        self._base = self._random.integers(1 << 63, size=self.batch_bytes // 8, dtype=np.uint64)
        self._data = prefaulted(self.batch_bytes)
        self._copy = prefaulted(self.batch_bytes)
        self._expected = torch.from_numpy(self._data.view(np.int16)).view(
            geometry.layers, self._batch_blocks, *shape[1:]
        )

    def memcpy(self) -> None:
        """The limit: one thread copies the batch's data in contiguous pieces of 32 MiB."""
        for begin in range(0, self.batch_bytes, _MEMCPY_PIECE_BYTES):
            end = begin + _MEMCPY_PIECE_BYTES
            np.copyto(self._copy[begin:end], self._data[begin:end])

    def new_batch(self) -> torch.Tensor:
        """Put a prompt never seen before, with random KV, in random blocks; returns its slot mapping."""
        np.multiply(
            self._base, self._random.integers(1 << 63, dtype=np.uint64) | np.uint64(1), out=self._data.view("u8")
        )
        self.tokens = self._random.integers(32_000, size=self.num_tokens).tolist()
        block_ids = self._some_blocks()
        for cache, expected in zip(self._caches, self._expected, strict=True):
            cache[block_ids] = expected
        return self._slot_mapping(block_ids)

    def destination(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Overwrite the whole cache, and name the random blocks that the batch is to return to.

        Returns:
            Their ids, for ``check``, and their slot mapping.
        """
        for cache in self._caches:
            cache.fill_(_POISON)
        block_ids = self._some_blocks()
        return block_ids, self._slot_mapping(block_ids)

    def check(self, block_ids: torch.Tensor) -> None:
        """Compare every byte of the cache: the batch in ``block_ids``, and poison everywhere else.

        Raises:
            BenchError: something differs.
        """
        others = torch.ones(2 * self._batch_blocks, dtype=torch.bool)
        others[block_ids] = False
        for layer, (cache, expected) in enumerate(zip(self._caches, self._expected, strict=True)):
            if not torch.equal(cache[block_ids], expected):
                raise BenchError(f"layer {layer}: the bytes retrieved are not those stored")
            if not bool((cache[others] == _POISON).all()):
                raise BenchError(f"layer {layer}: blocks were overwritten that nobody asked for")

    def _some_blocks(self) -> torch.Tensor:
        return torch.from_numpy(self._random.permutation(2 * self._batch_blocks)[: self._batch_blocks])

    def _slot_mapping(self, block_ids: torch.Tensor) -> torch.Tensor:
        size = self._geometry.block_tokens
        return (block_ids[:, None] * size + torch.arange(size)).reshape(-1)


class RawDisk:
    """The limit of a folder: direct I/O of as many files, of the same size, as a batch has chunks, and nothing else.

    Files are made once and then overwritten, as the disk tier recycles its own. Threads are as many as the library's.
    """

    def __init__(self, folder: Path, layout: KVLayout, num_chunks: int, read_threads: int) -> None:
        folder.mkdir()
        self._paths = [folder / str(number) for number in range(num_chunks)]
        header_bytes = chunkfile.header_bytes(layout)
        body_bytes = chunkfile.body_bytes(layout, layout.blocks_per_chunk)
        self._headers = prefaulted(num_chunks * header_bytes).reshape(num_chunks, header_bytes)
        self._bodies = prefaulted(num_chunks * body_bytes).reshape(num_chunks, body_bytes)
        self._writers = ThreadPoolExecutor(WRITE_THREADS)
        self._readers = ThreadPoolExecutor(read_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writers.shutdown()
        self._readers.shutdown()

    def write(self) -> None:
        """Write all files."""
        for _ in self._writers.map(self._write, range(len(self._paths))):
            pass

    def read(self) -> None:
        """Read all files."""
        for _ in self._readers.map(self._read, range(len(self._paths))):
            pass

    def _write(self, number: int) -> None:
        self._move(number, os.O_WRONLY | os.O_CREAT, os.pwritev)

    def _read(self, number: int) -> None:
        self._move(number, os.O_RDONLY, os.preadv)

    def _move(self, number: int, flags: int, call: Callable[[int, list[memoryview], int], int]) -> None:
        buffers = [self._headers[number].data, self._bodies[number].data]
        fd = os.open(self._paths[number], flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            moved_bytes = call(fd, buffers, 0)
        finally:
            os.close(fd)
        if moved_bytes != sum(buffer.nbytes for buffer in buffers):
            raise BenchError(f"a raw transfer moved only {moved_bytes} bytes: is the disk full?")
