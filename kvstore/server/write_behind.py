"""Writes to the server's disk of chunks that clients stored in its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from kvstore.server.core import Core
from kvstore.server.spaces import Chunk

_MAX_UNWRITTEN: Final = 65_536  # chunks that wait for the disk; beyond that, chunks stay in memory only


class WriteBehind:
    """Starts the writes, some at once. Belongs to the thread that decides.

    Args:
        core: the shared state of the server.
        max_writes: number of chunks that are written at once.

    Attributes:
        num_writing: number of chunks that are being written.
        is_held: no write begins meanwhile.
    """

    def __init__(self, core: Core, max_writes: int) -> None:
        self.num_writing = 0
        self.is_held = False
        self._core = core
        self._max_writes = max_writes
        self._unwritten: deque[Chunk] = deque(maxlen=_MAX_UNWRITTEN)
        self._noting: set[Chunk] = set()  # whose ends are being changed on disk

    @property
    def num_unwritten(self) -> int:
        """Number of chunks that are being written to disk, or wait for it."""
        return self.num_writing + len(self._unwritten)

    @property
    def num_changing(self) -> int:
        """Number of chunks whose files are being written, or whose ends are being changed."""
        return self.num_writing + len(self._noting)

    @property
    def waiting(self) -> Iterable[Chunk]:
        """Chunks that wait for the disk."""
        return tuple(self._unwritten)

    @property
    def is_changing_files(self) -> bool:
        """True while chunks are on their way to disk, or files of evicted chunks are still there."""
        return bool(self.num_unwritten) or (self._core.disk is not None and self._core.disk.is_busy)

    def begin(self, chunk: Chunk) -> None:
        """Start to write a chunk to disk, or note that it waits for others."""
        core, disk = self._core, self._core.disk
        if disk is None:
            return
        if not self._may_begin():
            self._unwritten.append(chunk)
            return
        if not core.stock.prepare_write(chunk, disk.size_of(chunk.space, chunk.ref)):
            return
        core.sweep()  # evicted files must be deleted before this write
        self.num_writing += 1

        def written(size_bytes: int | None) -> None:
            self.num_writing -= 1
            core.stock.written(chunk, size_bytes)
            core.slices.begin(self.go_on())

        disk.write(chunk, core.pool.parts(chunk.runs, 0, chunk.size_bytes), written)

    def go_on(self) -> Iterator[None]:
        """Start to write the chunks that wait, one in each step."""
        while self._unwritten and self._may_begin():
            self.begin(self._unwritten.popleft())
            yield

    def _may_begin(self) -> bool:
        return self.num_writing < self._max_writes and not (self.is_held or self._core.stock.has_cleared)

    def note_end(self, chunk: Chunk) -> None:
        """Start to change the end of a chunk's time to live on disk, if it is there; one change at a time."""
        if not chunk.disk_bytes or chunk in self._noting:
            return
        assert self._core.disk is not None
        self._noting.add(chunk)
        until_s = chunk.until_s

        def noted() -> None:
            self._noting.discard(chunk)
            if chunk.until_s != until_s:
                self.note_end(chunk)

        self._core.disk.limit(chunk, until_s, noted)
