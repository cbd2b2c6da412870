"""Trails in a file: records of one size, so that a torn one damages no other, each with a checksum.

``docs/FORMAT.md`` describes them. A pack contains them, and so does the note in a folder of the disk tier, by which
chunks are also found by the ends of their blocks after a restart. A trail follows from a chunk's tokens, like its key.
So the note may name removed chunks; chunks that it lacks are found only as a whole. Everything here is thread-safe.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from kvstore.format.wholeio import opened
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.model.layout import KVLayout

TRAILS_FILE: Final = "trails"
_SUM_BYTES: Final = 8
_SLACK: Final = 4096  # records of removed chunks, in addition to as many as there are chunks
_PIECE_RECORDS: Final = 1024  # read at once


class TrailRecords:
    """Writer and reader of trail records.

    Args:
        blocks_per_chunk: the maximum of a trail's blocks.

    Attributes:
        record_bytes: the size of each record.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._trail_bytes = blocks_per_chunk * PREFIX_KEY_BYTES
        self.record_bytes = _SUM_BYTES + self._trail_bytes

    def takes(self, trail: bytes) -> bool:
        """Tell if a trail fits and is worth a record: the trail of one block is nothing but its key."""
        return PREFIX_KEY_BYTES < len(trail) <= self._trail_bytes

    def record(self, trail: bytes) -> bytes:
        """Return the record of a trail that it ``takes``."""
        body = trail.ljust(self._trail_bytes, b"\0")
        return xxhash.xxh3_64_digest(body) + body

    def read(self, data: bytes) -> Iterator[bytes]:
        """Yield the trails of those records that are whole and sound."""
        for begin in range(0, len(data) - self.record_bytes + 1, self.record_bytes):
            body = data[begin + _SUM_BYTES : begin + self.record_bytes]
            if data[begin : begin + _SUM_BYTES] == xxhash.xxh3_64_digest(body):
                yield _without_padding(body)


def _without_padding(body: bytes) -> bytes:
    """Return the trail of a record; a key of zeros is padding."""
    end = len(body)
    while end and not any(body[end - PREFIX_KEY_BYTES : end]):
        end -= PREFIX_KEY_BYTES
    return body[:end]


class TrailNote:
    """Reader and writer of the note in a namespace's folder. Thread-safe; the folder may be renamed meanwhile.

    Args:
        layout: of the chunks.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._records = TrailRecords(layout.blocks_per_chunk)
        self._lock = threading.Lock()  # held during a write of a few hundred bytes, on threads that write chunks

    def add(self, home: Path, trail: bytes, num_held: int, held: Callable[[], Collection[PrefixKey]]) -> None:
        """Note the trail of a chunk, one of the ``num_held`` that are held now.

        Raises:
            OSError: the system refused; the chunk will be found only as a whole.
        """
        if not self._records.takes(trail):
            return
        with self._lock, opened(home / TRAILS_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            num_records = os.fstat(fd).st_size // self._records.record_bytes  # a torn one at the end is overwritten
            if num_records > 2 * num_held + _SLACK:
                num_records = self._shorten(fd, held())
            os.pwrite(fd, self._records.record(trail), num_records * self._records.record_bytes)

    def read(self, home: Path, held: Collection[PrefixKey]) -> dict[PrefixKey, bytes]:
        """Return the trails of the chunks in ``held``.

        Raises:
            OSError: the system refused.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(FileNotFoundError), self._lock, opened(home / TRAILS_FILE, flags) as fd:
            return self._held(fd, held)
        return {}

    def _shorten(self, fd: int, held: Collection[PrefixKey]) -> int:
        """Keep only the records of chunks that are held. Returns their number.

        A crash in between only loses trails.
        """
        kept = self._held(fd, held)
        records = b"".join(map(self._records.record, kept.values()))
        size_bytes = os.pwrite(fd, records, 0)
        os.ftruncate(fd, size_bytes)
        return size_bytes // self._records.record_bytes

    def _held(self, fd: int, held: Collection[PrefixKey]) -> dict[PrefixKey, bytes]:
        trails = self._trails(fd, 4 * len(held) + 2 * _SLACK)
        return {trail[-PREFIX_KEY_BYTES:]: trail for trail in trails if trail[-PREFIX_KEY_BYTES:] in held}

    def _trails(self, fd: int, max_records: int) -> Iterator[bytes]:
        """Yield the trails of all whole records; of a file that is too long, those at its end."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        record_bytes = self._records.record_bytes
        first_bytes = max(0, status.st_size // record_bytes - max_records) * record_bytes
        for offset in range(first_bytes, status.st_size, _PIECE_RECORDS * record_bytes):
            yield from self._records.read(os.pread(fd, _PIECE_RECORDS * record_bytes, offset))
