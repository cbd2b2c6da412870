"""Limits that paths are compared with: memcpy, with or without checksums, raw direct I/O, and copies to a device.

No library code runs in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import xxhash

from kvstore.format import chunkfile
from kvstore.memory.slabs import SlabPool
from kvstore.model.chunks import ByteArray
from kvstore.model.layout import KVLayout, round_up
from kvstore.tools.bench.samples import BenchError, require
from kvstore.transfer.lane import WRITE_THREADS

_Part = tuple[list[memoryview], int]
_Call = Callable[[int, list[memoryview], int], int]
Pieces = list[tuple[torch.Tensor, torch.Tensor]]
MEMCPY_PIECE_BYTES = 32 << 20
_POPULATE_TIMEOUT_S = 300.0
_PAGE = 4096  # direct I/O reads whole pages


def prefaulted(size_bytes: int) -> ByteArray:
    """Return a page-aligned buffer on huge pages with every page touched, like the library's pool."""
    pool = SlabPool(1, round_up(size_bytes, 4096))
    is_there = pool.wait_populated(_POPULATE_TIMEOUT_S)
    require(is_there, f"{size_bytes} bytes of memory were not there within {_POPULATE_TIMEOUT_S:.0f} s")
    pool.slot(0)[:] = 1  # kernels before 5.14 do not populate
    return pool.slot(0)[:size_bytes]


class Memcpy:
    """Copies of contiguous pieces, on as many threads as the library's copies have.

    Args:
        threads: number of threads that copy at once.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)  # its threads end with this object

    def copy(self, target: ByteArray, source: ByteArray) -> None:
        """Copy all of ``source``."""
        self._each(len(source), lambda piece: np.copyto(target[piece], source[piece]))

    def copy_and_sum(self, target: ByteArray, source: ByteArray) -> None:
        """Copy all of ``source``, and compute xxh3 of each copied piece."""

        def move(piece: slice) -> None:
            np.copyto(target[piece], source[piece])
            xxhash.xxh3_64_intdigest(target[piece].data)

        self._each(len(source), move)

    def _each(self, size_bytes: int, move: Callable[[slice], None]) -> None:
        piece_bytes = min(MEMCPY_PIECE_BYTES, round_up(-(-size_bytes // self._threads), _PAGE))
        pieces = [slice(begin, begin + piece_bytes) for begin in range(0, size_bytes, piece_bytes)]
        if self._threads == 1:
            for piece in pieces:
                move(piece)
        else:
            for _ in self._pool.map(move, pieces):
                pass


class RawDisk:
    """Limit of a folder: direct I/O of as many files of the same size as a batch has chunks, and nothing else.

    Files are created once and then overwritten, because the disk tier recycles its files. There are as many threads as
    in the library.
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
        quarter = layout.front_ranges(layout.blocks_per_chunk, max(1, layout.blocks_per_chunk // 4))
        self._ranges = [(begin // _PAGE * _PAGE, round_up(end, _PAGE)) for begin, end in quarter]

    def close(self) -> None:
        """End the threads."""
        self._writers.shutdown()
        self._readers.shutdown()

    def write(self) -> None:
        """Write all files."""
        self._all(self._writers, os.O_WRONLY | os.O_CREAT, self._whole, os.pwritev)

    def read(self) -> None:
        """Read all files."""
        self._all(self._readers, os.O_RDONLY, self._whole, os.preadv)

    def read_quarter(self) -> None:
        """Read the leading quarter of each chunk, as if it could be verified alone: a range for each layer."""
        self._all(self._readers, os.O_RDONLY, self._quarter, os.preadv)

    def _whole(self, number: int) -> list[_Part]:
        """Return header and body of a file, which one call moves."""
        return [([self._headers[number].data, self._bodies[number].data], 0)]

    def _quarter(self, number: int) -> list[_Part]:
        """Return the header, and the ranges of the leading quarter, each with its place in the file."""
        header, body = self._headers[number], self._bodies[number]
        return [([header.data], 0), *(([body[begin:end].data], len(header) + begin) for begin, end in self._ranges)]

    def _all(self, threads: ThreadPoolExecutor, flags: int, parts: Callable[[int], list[_Part]], call: _Call) -> None:
        for _ in threads.map(lambda number: self._move(number, flags, parts(number), call), range(len(self._paths))):
            pass

    def _move(self, number: int, flags: int, parts: list[_Part], call: _Call) -> None:
        fd = os.open(self._paths[number], flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            moved_bytes = sum(call(fd, buffers, begin) for buffers, begin in parts)
        finally:
            os.close(fd)
        if moved_bytes != sum(buffer.nbytes for buffers, _ in parts for buffer in buffers):
            raise BenchError(f"a raw transfer moved only {moved_bytes} bytes: is the disk full?")


class PinnedCopies:
    """Copies of ``size_bytes`` in pieces. Host memory is pinned if the device is a GPU.

    Args:
        size_bytes: bytes of one direction.
        device: device to copy to and from.
        piece_bytes: bytes copied by one call.
    """

    def __init__(self, size_bytes: int, device: torch.device, piece_bytes: int = MEMCPY_PIECE_BYTES) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        # The two ways share no byte. Pieces are targets and sources.
        self._out, back = (self._pieces(size_bytes, piece_bytes) for _ in range(2))
        self._in = [(source, target) for target, source in back]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._is_cuda else []  # type: ignore[no-untyped-call]

    def to_host(self) -> None:
        """Copy from the device."""
        self._copy(nullcontext(), self._out)
        self._wait()

    def to_device(self) -> None:
        """Copy to the device."""
        self._copy(nullcontext(), self._in)
        self._wait()

    def both_ways(self) -> None:
        """Copy the whole size each way, at once."""
        for number, pieces in enumerate((self._out, self._in)):
            self._copy(torch.cuda.stream(self._streams[number]) if self._is_cuda else nullcontext(), pieces)
        self._wait()

    def _pieces(self, size_bytes: int, piece_bytes: int) -> Pieces:
        on_device = torch.ones(size_bytes, dtype=torch.uint8, device=self._device)
        on_host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        ranges = [slice(begin, begin + piece_bytes) for begin in range(0, size_bytes, piece_bytes)]
        return [(on_host[piece], on_device[piece]) for piece in ranges]

    def _copy(self, stream: AbstractContextManager[object], pieces: Pieces) -> None:
        with stream:
            for target, source in pieces:
                target.copy_(source, non_blocking=True)

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
