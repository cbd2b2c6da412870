"""Moves chunks between buffers and files, and sums them up meanwhile.

A large chunk is read in pieces, and its checksums are calculated aside: those of one piece while the next is on its
way, or all of them while the payload is written. So the disk hardly ever waits for a checksum.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.chunks import ByteArray, ChunkRef
from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.wholeio import read_whole, write_whole
from kvstore.keys import ChunkKey
from kvstore.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.tiers.base import Transfer, payload_view
from kvstore.tiers.disk.folder import FILE_MODE
from kvstore.tiers.disk.shared_reads import SharedReads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

PIECE_BYTES = 8 << 20  # what is not longer is summed up in place: handing it over would cost more
SUM_THREADS = 2


class Body(NamedTuple):
    """A checked transfer: its buffer cut to what stands behind the header, and whether direct I/O can use it."""

    ref: ChunkRef
    array: ByteArray
    is_aligned: bool


class Writable(NamedTuple):
    """A body on its way to a file, the size that the file will have, and its whole content if a codec made that."""

    body: Body
    size_bytes: int
    image: ByteArray | None = None


class _Piece(NamedTuple):
    """A range of the body, and the layers that are complete once it was moved and were not before."""

    begin_bytes: int
    end_bytes: int
    layers: range


class ChunkIO:
    """Reads and writes the files of one layout, as they are. Thread-safe.

    ``file_bytes`` are the most that a file has for each number of blocks; without a codec, all have just these.
    ``namespace_id`` stands in every header; the owner sets it before the first use, and again for a new epoch.

    Args:
        layout: the geometry of the chunks.
        direct_flag: ``os.O_DIRECT`` or 0; only buffers that start on a page use it.
    """

    def __init__(self, layout: KVLayout, direct_flag: int = 0) -> None:
        self.direct_flag = direct_flag
        self.namespace_id = b""
        self.file_bytes = tuple(chunkfile.file_bytes(layout, blocks) for blocks in range(layout.blocks_per_chunk + 1))
        self._layout = layout
        self._header_bytes = chunkfile.header_bytes(layout)
        self._pieces = tuple(tuple(_cut(layout, blocks)) for blocks in range(layout.blocks_per_chunk + 1))
        self._thread = threading.local()
        self._shared = SharedReads()
        self._aside = ThreadPoolExecutor(SUM_THREADS, "kvstore-sum")

    def check(self, transfer: Transfer) -> Body:
        """Turn down buffers and lengths that break the contract.

        Raises:
            InvalidCallError: what is wrong.
        """
        ref, buffer = transfer.ref, transfer.buffer
        payload_view(self._layout, transfer)
        return Body(
            ref, buffer[: chunkfile.body_bytes(self._layout, ref.num_blocks)], buffer.ctypes.data % ALIGNMENT_BYTES == 0
        )

    def may_be(self, num_blocks: int, size_bytes: int) -> bool:
        """Whether the file of a chunk of ``num_blocks`` blocks can have that size."""
        return num_blocks < len(self.file_bytes) and size_bytes == self.file_bytes[num_blocks]

    @contextmanager
    def prepared(self, body: Body) -> Iterator[Writable]:
        """What ``write`` takes, once there is room for it."""
        yield Writable(body, self.file_bytes[body.ref.num_blocks])

    def read(self, path: Path, body: Body, used_ns: int) -> Damage | None:
        """Fill the buffer from a chunk's file, whatever stands there; None if it is the chunk.

        Then ``used_ns``, in ns since 1970, becomes the file's mtime.

        Raises:
            OSError: nothing stands there, or the system refused to read it.
        """
        if (damage := self._look(path, body)) is not None:
            return damage
        header = self._header_buffer()
        sums = []
        with self._opened(path, os.O_RDONLY | os.O_NOFOLLOW, is_aligned=body.is_aligned) as fd:
            pieces = self._pieces[body.ref.num_blocks]
            with closing(self._results([self._read_of(fd, body, header, piece) for piece in pieces])) as results:
                for piece, is_whole in zip(pieces, results, strict=True):
                    if not is_whole:
                        return Damage.SIZE
                    sums.append(self._sum_up(body, piece.layers))
            layer_sums = "".join(part() for part in sums)
            damage = chunkfile.compare(self._layout, self._key(body.ref), body.ref.num_blocks, header, layer_sums)
            if damage is None:
                touch(fd, used_ns)
        return damage

    def read_layers(self, path: Path, body: Body, layers: range, used_ns: int) -> Damage | None:
        """``read`` for some layers only. Nothing else of the buffer is written to."""
        if (damage := self._look(path, body)) is not None:
            return damage
        header, num_blocks = self._header_buffer(), body.ref.num_blocks
        with self._opened(path, os.O_RDONLY | os.O_NOFOLLOW, is_aligned=body.is_aligned) as fd:
            if not self._read_range(fd, body, layers, header):
                return Damage.SIZE
            layer_sums = chunkfile.checksums(self._layout, num_blocks, body.array, layers)
            key = self._key(body.ref)
            damage = chunkfile.compare_layers(
                self._layout, key, num_blocks, header, layers=layers, layer_sums=layer_sums
            )
            if damage is None:
                touch(fd, used_ns)
        return damage

    def layer_range(self, num_blocks: int, layers: range) -> tuple[int, int]:
        """Begin and end of layers in a row, in the payload of a chunk of ``num_blocks`` blocks."""
        ends = self._layout.layer_range(layers.start, num_blocks), self._layout.layer_range(layers[-1], num_blocks)
        return ends[0][0], ends[1][1]

    def write(self, path: Path, chunk: Writable, used_ns: int) -> None:
        """Make ``path`` the file of a chunk, with an mtime of ``used_ns``; the padding in the buffer becomes zeros.

        Raises:
            OSError: the system refused; what stands in the file is undefined.
        """
        is_aligned = chunk.body.is_aligned or chunk.image is not None
        with self._opened(path, os.O_WRONLY | os.O_CREAT, is_aligned=is_aligned) as fd:
            if chunk.image is not None:
                write_whole(fd, [chunk.image.data], 0)
            else:
                self._write_body(fd, chunk.body)
            if os.fstat(fd).st_size != chunk.size_bytes:
                os.ftruncate(fd, chunk.size_bytes)
            touch(fd, used_ns)

    def _write_body(self, fd: int, body: Body) -> None:
        """Write header and payload; of a large one the first piece last, as the header needs the checksums."""
        num_blocks = body.ref.num_blocks
        body.array[self._layout.payload_bytes(num_blocks) :] = 0
        sums = self._sum_up(body, range(self._layout.num_layers))
        first = min(PIECE_BYTES, len(body.array))  # goes with the header, once the checksums are there
        if first < len(body.array):
            write_whole(fd, [body.array.data[first:]], self._header_bytes + first)
        write_whole(fd, [self._header(body.ref, sums()).data, body.array.data[:first]], 0)

    def close(self) -> None:
        """End the threads that calculate. Only after the last call."""
        self._aside.shutdown(wait=False)

    def _look(self, path: Path, body: Body) -> Damage | None:
        """Whether what stands there could be the file of a chunk.

        Raises:
            OSError: nothing stands there.
        """
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return Damage.NOT_A_CHUNK
        return None if status.st_size == self.file_bytes[body.ref.num_blocks] else Damage.SIZE

    def _read_range(self, fd: int, body: Body, layers: range, header: ByteArray) -> bool:
        """Read the header, and layers to their place in the buffer; False if the file ends before.

        Layers do not begin where pages do, which direct I/O asks for: the pages that they share with their neighbours
        pass through a place of this thread's own.

        Raises:
            OSError: the system refused.
        """
        begin, end = self.layer_range(body.ref.num_blocks, layers)
        if not (self.direct_flag and body.is_aligned):
            return self._read_behind_header(fd, header, [body.array.data[begin:end]], begin)
        head, tail = self._own_buffer("edges", 2 * ALIGNMENT_BYTES).reshape(2, -1)
        first, inner_begin = begin - begin % ALIGNMENT_BYTES, round_up(begin, ALIGNMENT_BYTES)
        inner_end = max(inner_begin, end - end % ALIGNMENT_BYTES)
        views = [head.data] if first < inner_begin else []
        views += [body.array.data[inner_begin:inner_end]] if inner_begin < inner_end else []
        views += [tail.data] if inner_end < end else []
        is_whole = self._read_behind_header(fd, header, views, first)
        head_end = min(inner_begin, end)
        body.array[begin:head_end] = head[begin - first : head_end - first] if first < inner_begin else head[:0]
        if inner_end < end:
            body.array[inner_end:end] = tail[: end - inner_end]
        return is_whole

    def _read_behind_header(self, fd: int, header: ByteArray, views: Sequence[memoryview], begin_bytes: int) -> bool:
        """Read the header and a range of the body; in one call if the body's begin is asked for.

        Raises:
            OSError: the system refused.
        """
        if begin_bytes == 0:
            return read_whole(fd, [header.data, *views], 0)
        return read_whole(fd, [header.data], 0) and read_whole(fd, views, self._header_bytes + begin_bytes)

    def _read_of(self, fd: int, body: Body, header: ByteArray, piece: _Piece) -> Callable[[], bool]:
        """Reads a piece, the first one with the header."""
        views = [body.array.data[piece.begin_bytes : piece.end_bytes]]
        if piece.begin_bytes == 0:
            return partial(read_whole, fd, [header.data, *views], 0)
        return partial(read_whole, fd, views, self._header_bytes + piece.begin_bytes)

    def _results(self, reads: Sequence[Callable[[], bool]]) -> Generator[bool, None, None]:
        """Carry out reads in order; several at once where the disk itself is read, and not the system's cache."""
        if len(reads) > 1 and self.direct_flag:
            yield from self._shared.results(reads)
        else:
            for read in reads:
                yield read()

    def _sum_up(self, body: Body, layers: range) -> Callable[[], str]:
        """Start to sum up layers of a payload; the result waits for their checksums."""
        num_blocks = body.ref.num_blocks
        arguments = self._layout, num_blocks, body.array, layers
        if len(self._pieces[num_blocks]) > 1:
            with suppress(RuntimeError):  # the interpreter is about to exit, and starts nothing any more
                return self._aside.submit(chunkfile.checksums, *arguments).result
        return partial(chunkfile.checksums, *arguments)

    def _header(self, ref: ChunkRef, layer_sums: str) -> ByteArray:
        """A header in this thread's place for one."""
        header = self._header_buffer()
        header[:] = np.frombuffer(
            chunkfile.build_header(self._layout, self._key(ref), ref.num_blocks, layer_sums), np.uint8
        )
        return header

    @contextmanager
    def _opened(self, path: Path, flags: int, *, is_aligned: bool) -> Iterator[int]:
        direct = self.direct_flag if is_aligned else 0
        fd = os.open(path, flags | direct | os.O_CLOEXEC, FILE_MODE)
        try:
            yield fd
        finally:
            os.close(fd)

    def _header_buffer(self) -> ByteArray:
        """This thread's page-aligned place for a header."""
        return self._own_buffer("header", self._header_bytes)

    def _own_buffer(self, name: str, size_bytes: int) -> ByteArray:
        buffer: ByteArray | None = getattr(self._thread, name, None)
        if buffer is None:
            buffer = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
            setattr(self._thread, name, buffer)
        return buffer

    def _key(self, ref: ChunkRef) -> ChunkKey:
        return ChunkKey(self.namespace_id, ref.prefix_key)


def _cut(layout: KVLayout, num_blocks: int) -> Iterator[_Piece]:
    """The pieces of a body of ``num_blocks`` blocks, in order."""
    body_bytes = chunkfile.body_bytes(layout, num_blocks)
    done_layers = 0
    for begin_bytes in range(0, body_bytes, PIECE_BYTES):
        end_bytes = min(begin_bytes + PIECE_BYTES, body_bytes)
        first = done_layers
        while done_layers < layout.num_layers and layout.layer_range(done_layers, num_blocks)[1] <= end_bytes:
            done_layers += 1
        yield _Piece(begin_bytes, end_bytes, range(first, done_layers))


def touch(fd: int, used_ns: int) -> None:
    """Note when a file was used; a failure loses only the order of use."""
    with suppress(OSError):
        os.utime(fd, ns=(used_ns, used_ns))
