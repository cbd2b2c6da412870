"""Limits that paths are compared with: memcpy, with or without checksums, and raw direct I/O. No library code runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from kvstore.chunks import ByteArray
from kvstore.format import chunkfile
from kvstore.layout import KVLayout, round_up
from kvstore.memory.slabs import SlabPool
from kvstore.tools.bench.samples import BenchError
from kvstore.transfer.lane import WRITE_THREADS

_Call = Callable[[int, list[memoryview], int], int]
MEMCPY_PIECE_BYTES = 32 << 20
_POPULATE_TIMEOUT_S = 300.0
_PAGE = 4096  # direct I/O reads whole pages


def prefaulted(size_bytes: int) -> ByteArray:
    """Return a page-aligned buffer on huge pages with every page touched, like the library's pool."""
    pool = SlabPool(1, round_up(size_bytes, 4096))
    if not pool.wait_populated(_POPULATE_TIMEOUT_S):
        raise BenchError(f"{size_bytes} bytes of memory were not there within {_POPULATE_TIMEOUT_S:.0f} s")
    pool.slot(0)[:] = 1  # kernels before 5.14 do not populate
    return pool.slot(0)[:size_bytes]


def memcpy(target: ByteArray, source: ByteArray) -> None:
    """Copy contiguous pieces of 32 MiB on one thread."""
    for begin in range(0, len(source), MEMCPY_PIECE_BYTES):
        end = begin + MEMCPY_PIECE_BYTES
        np.copyto(target[begin:end], source[begin:end])


def memcpy_and_sum(target: ByteArray, source: ByteArray) -> None:
    """Run ``memcpy``, then xxh3 of the copy, on the same thread."""
    memcpy(target, source)
    for begin in range(0, len(target), MEMCPY_PIECE_BYTES):
        xxhash.xxh3_64_intdigest(target[begin : begin + MEMCPY_PIECE_BYTES].data)


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
        self._quarter = [(begin // _PAGE * _PAGE, round_up(end, _PAGE)) for begin, end in quarter]

    def close(self) -> None:
        """End the threads."""
        self._writers.shutdown()
        self._readers.shutdown()

    def write(self) -> None:
        """Write all files."""
        self._all(self._writers, os.O_WRONLY | os.O_CREAT, os.pwritev)

    def read(self) -> None:
        """Read all files."""
        self._all(self._readers, os.O_RDONLY, os.preadv)

    def read_quarter(self) -> None:
        """Read the leading quarter of each chunk, as if it could be verified alone: a range for each layer."""
        for _ in self._readers.map(self._read_quarter, range(len(self._paths))):
            pass

    def _read_quarter(self, number: int) -> None:
        body, header_bytes = self._bodies[number], self._headers.shape[1]
        fd = os.open(self._paths[number], os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            moved_bytes = os.preadv(fd, [self._headers[number].data], 0)
            moved_bytes += sum(
                os.preadv(fd, [body[begin:end].data], header_bytes + begin) for begin, end in self._quarter
            )
        finally:
            os.close(fd)
        if moved_bytes != header_bytes + sum(end - begin for begin, end in self._quarter):
            raise BenchError(f"a raw read moved only {moved_bytes} bytes")

    def _all(self, threads: ThreadPoolExecutor, flags: int, call: _Call) -> None:
        for _ in threads.map(lambda number: self._move(number, flags, call), range(len(self._paths))):
            pass

    def _move(self, number: int, flags: int, call: _Call) -> None:
        buffers = [self._headers[number].data, self._bodies[number].data]
        fd = os.open(self._paths[number], flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            moved_bytes = call(fd, buffers, 0)
        finally:
            os.close(fd)
        if moved_bytes != sum(buffer.nbytes for buffer in buffers):
            raise BenchError(f"a raw transfer moved only {moved_bytes} bytes: is the disk full?")
