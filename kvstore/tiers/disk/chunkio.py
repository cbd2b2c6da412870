"""Transfer of chunks between buffers and files, with checksums computed at the same time.

A large chunk is read in pieces, and other threads compute the checksums of one piece while the next is read, or all of
them while the payload is written. So the disk hardly ever waits for a checksum. Through the page cache a thread reads
small pieces and hashes each of them itself, since memory is read once less that way.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.wholeio import FILE_MODE, read_whole, write_whole
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.model.threads import start
from kvstore.tiers.base import Transfer, payload_view
from kvstore.tiers.disk.shared_reads import SharedReads

PIECE_BYTES = 8 << 20  # for shorter chunks, handing over to another thread would cost more than the checksums
CACHED_BYTES = 2 << 20  # read through the page cache, then hashed at once, while a processor's own caches hold most
SUM_THREADS = 2


class Body(NamedTuple):
    """Checked transfer.

    Attributes:
        ref: the chunk.
        array: the buffer, cut to the bytes after the header.
        payload_bytes: of the chunk; padding follows in ``array``.
        is_aligned: its I/O can be direct.
        tenant: chooses the key of its encryption.
    """

    ref: ChunkRef
    array: ByteArray
    payload_bytes: int
    is_aligned: bool
    tenant: bytes = b""


class Writable(NamedTuple):
    """Body to be written, the size of its file, and the file's whole content if a codec encoded it."""

    body: Body
    size_bytes: int
    image: ByteArray | None = None


class _Piece(NamedTuple):
    """Range of the body, and the layers that it completes."""

    begin_bytes: int
    end_bytes: int
    layers: range


class ChunkIO:
    """Reader and writer of the files of one layout, without a codec. Thread-safe.

    Args:
        layout: of the chunks.

    Attributes:
        direct_flag: ``os.O_DIRECT`` or 0, set by the owner; only page-aligned buffers use it.
        namespace_id: in every header; set by the owner before the first use, and again for a new epoch.
        file_bytes: the largest file size for each number of blocks; without a codec, the only one.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.direct_flag = 0
        self.namespace_id = b""
        self.file_bytes = tuple(chunkfile.file_bytes(layout, blocks) for blocks in range(layout.blocks_per_chunk + 1))
        self._layout = layout
        self._header_bytes = chunkfile.header_bytes(layout)
        self._body_bytes = tuple(chunkfile.body_bytes(layout, blocks) for blocks in range(layout.blocks_per_chunk + 1))
        self._pieces = tuple(tuple(_cut(layout, blocks)) for blocks in range(layout.blocks_per_chunk + 1))
        self._thread = threading.local()
        self._shared = SharedReads()
        self._aside = ThreadPoolExecutor(SUM_THREADS, "kvstore-sum")

    def check(self, transfer: Transfer) -> Body:
        """Check a transfer against the contract.

        Raises:
            InvalidCallError: names the violation.
        """
        payload = payload_view(self._layout, transfer)
        ref, buffer = transfer.ref, transfer.buffer
        is_aligned = buffer.ctypes.data % ALIGNMENT_BYTES == 0
        return Body(ref, buffer[: self._body_bytes[ref.num_blocks]], len(payload), is_aligned, transfer.tenant)

    def may_be(self, num_blocks: int, size_bytes: int) -> bool:
        """Tell if the file of a chunk of ``num_blocks`` blocks can have that size."""
        return num_blocks < len(self.file_bytes) and size_bytes == self.file_bytes[num_blocks]

    @contextmanager
    def prepared(self, body: Body) -> Iterator[Writable]:
        """Yield the input of ``write``, for whose size room must be claimed first."""
        yield Writable(body, self.file_bytes[body.ref.num_blocks])

    def read(self, path: Path, body: Body, used_ns: int, layers: range | None = None) -> Damage | None:
        """Fill the buffer from a chunk's file; returns its damage, or None after setting the mtime to ``used_ns``.

        With ``layers``, only these are read and compared, and no other byte of the buffer is written.

        Raises:
            OSError: there is no file, or the system refused to read it.
        """
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return Damage.NOT_A_CHUNK
        if not self.may_be(body.ref.num_blocks, status.st_size):
            return Damage.SIZE
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | self._direct_flag(body))
        try:
            damage = self._read_file(fd, status.st_size, body, layers)
            if damage is None:
                touch(fd, used_ns)
        finally:
            os.close(fd)
        return damage

    def _read_file(self, fd: int, size_bytes: int, body: Body, layers: range | None) -> Damage | None:  # noqa: ARG002
        """Read from an open file of ``size_bytes``; see ``read``.

        Raises:
            OSError: the system refused.
        """
        header = self._header_buffer()
        if layers is not None:
            sums = self._read_layers(fd, body, layers, header)
        else:
            sums = (self._read_body if self._direct_flag(body) else self._read_and_sum)(fd, body, header)
        if sums is None:
            return Damage.SIZE
        key, num_blocks = self._key(body.ref), body.ref.num_blocks
        return chunkfile.compare(self._layout, key, num_blocks, header, sums, layers=layers)

    def layer_range(self, num_blocks: int, layers: range) -> tuple[int, int]:
        """Return begin and end of consecutive layers in the payload of a chunk of ``num_blocks`` blocks."""
        ends = self._layout.layer_range(layers.start, num_blocks), self._layout.layer_range(layers[-1], num_blocks)
        return ends[0][0], ends[1][1]

    def write(self, path: Path, chunk: Writable, used_ns: int) -> None:
        """Write a chunk to ``path``, with an mtime of ``used_ns``; the padding in the buffer is zeroed.

        Raises:
            OSError: the system refused; the file's content is undefined.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | self._direct_flag(chunk.body), FILE_MODE)
        try:
            if chunk.image is not None:
                write_whole(fd, [chunk.image.data], 0)
            else:
                self._write_body(fd, chunk.body)
            if os.fstat(fd).st_size != chunk.size_bytes:
                os.ftruncate(fd, chunk.size_bytes)
            touch(fd, used_ns)
        finally:
            os.close(fd)

    def _write_body(self, fd: int, body: Body) -> None:
        """Write header and body. The first piece of a large body is written last, as the header has the checksums."""
        body.array[body.payload_bytes :] = 0
        sums = self._sum_up(body, range(self._layout.num_layers))
        first = min(PIECE_BYTES, len(body.array))  # written with the header
        if first < len(body.array):
            write_whole(fd, [body.array.data[first:]], self._header_bytes + first)
        write_whole(fd, [self._header(body.ref, sums()).data, body.array.data[:first]], 0)

    def close(self) -> None:
        """End the checksum threads. Only after the last call."""
        self._aside.shutdown(wait=False)

    def _read_body(self, fd: int, body: Body, header: ByteArray) -> str | None:
        """Read header and body; returns the checksums of all layers, or None if the file ends too early.

        Raises:
            OSError: the system refused.
        """
        pieces = self._pieces[body.ref.num_blocks]
        views = [body.array.data[piece.begin_bytes : piece.end_bytes] for piece in pieces]
        reads = [self._read_of(fd, header, [view], p.begin_bytes) for view, p in zip(views, pieces, strict=True)]
        sums = []
        with closing(self._results(reads)) as results:
            for piece, is_complete in zip(pieces, results, strict=True):
                if not is_complete:
                    return None
                sums.append(self._sum_up(body, piece.layers))
        return "".join(layer_sums() for layer_sums in sums)

    def _read_and_sum(self, fd: int, body: Body, header: ByteArray) -> str | None:
        """``_read_body`` of a file that the page cache may hold, which costs this thread's time and no waiting.

        Raises:
            OSError: the system refused.
        """
        running = chunkfile.RunningSums(self._layout, body.ref.num_blocks)
        for begin in range(0, len(body.array), CACHED_BYTES):
            piece = body.array.data[begin : begin + CACHED_BYTES]
            if not self._read_of(fd, header, [piece], begin)():
                return None
            running.add(piece)
        return running.text()

    def _read_layers(self, fd: int, body: Body, layers: range, header: ByteArray) -> str | None:
        """Read the header, and layers to their place in the buffer; returns their checksums, or None at the file's end.

        Layers do not begin at page boundaries, which direct I/O requires, so the pages that they share with their
        neighbours are read into a buffer of this thread.

        Raises:
            OSError: the system refused.
        """
        begin, end = self.layer_range(body.ref.num_blocks, layers)
        first, inner_begin, inner_end = begin, begin, end
        head, tail = self._own_buffer("edges", 2 * ALIGNMENT_BYTES).reshape(2, -1)
        if self._direct_flag(body):
            first, inner_begin = begin - begin % ALIGNMENT_BYTES, round_up(begin, ALIGNMENT_BYTES)
            inner_end = max(inner_begin, end - end % ALIGNMENT_BYTES)
        views = [head.data] if first < inner_begin else []
        views += [body.array.data[inner_begin:inner_end]] if inner_begin < inner_end else []
        views += [tail.data] if inner_end < end else []
        if first and not read_whole(fd, [header.data], 0):
            return None
        if not self._read_of(fd, header, views, first)():
            return None
        if first < inner_begin:
            head_end = min(inner_begin, end)
            body.array[begin:head_end] = head[begin - first : head_end - first]
        if inner_end < end:
            body.array[inner_end:end] = tail[: end - inner_end]
        return chunkfile.checksums(self._layout, body.ref.num_blocks, body.array, layers)

    def _read_of(self, fd: int, header: ByteArray, views: Sequence[memoryview], begin_bytes: int) -> Callable[[], bool]:
        """Return a read of a range of the body, together with the header if the range is at the body's start."""
        if begin_bytes == 0:
            return partial(read_whole, fd, [header.data, *views], 0)
        return partial(read_whole, fd, views, self._header_bytes + begin_bytes)

    def _results(self, reads: Sequence[Callable[[], bool]]) -> Generator[bool, None, None]:
        """Yield the results of reads, in order; they run in parallel if they bypass the page cache."""
        if len(reads) > 1 and self.direct_flag:
            yield from self._shared.results(reads)
        else:
            for read in reads:
                yield read()

    def _sum_up(self, body: Body, layers: range) -> Callable[[], str]:
        """Start to compute the checksums of layers; the returned function waits for them."""
        sum_up = partial(chunkfile.checksums, self._layout, body.ref.num_blocks, body.array, layers)
        return start(self._aside, sum_up, sum_up).result if len(self._pieces[body.ref.num_blocks]) > 1 else sum_up

    def _header(self, ref: ChunkRef, layer_sums: str) -> ByteArray:
        """Build a header in this thread's buffer."""
        header = self._header_buffer()
        header[:] = np.frombuffer(
            chunkfile.build_header(self._layout, self._key(ref), ref.num_blocks, layer_sums), np.uint8
        )
        return header

    def _direct_flag(self, body: Body) -> int:
        return self.direct_flag if body.is_aligned else 0

    def _header_buffer(self) -> ByteArray:
        """Return this thread's page-aligned buffer for a header."""
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
    """Yield the pieces of a body of ``num_blocks`` blocks, in order."""
    body_bytes = chunkfile.body_bytes(layout, num_blocks)
    done_layers = 0
    for begin_bytes in range(0, body_bytes, PIECE_BYTES):
        end_bytes = min(begin_bytes + PIECE_BYTES, body_bytes)
        first = done_layers
        while done_layers < layout.num_layers and layout.layer_range(done_layers, num_blocks)[1] <= end_bytes:
            done_layers += 1
        yield _Piece(begin_bytes, end_bytes, range(first, done_layers))


def touch(fd: int, used_ns: int) -> None:
    """Set a file's last use; a failure only affects the order of eviction after a restart."""
    with suppress(OSError):
        os.utime(fd, ns=(used_ns, used_ns))
