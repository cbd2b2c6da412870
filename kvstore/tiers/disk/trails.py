"""A folder's note of trails, so that chunks are found by the ends of their blocks after a restart, too.

A trail follows from a chunk's tokens, like its key. So the note may name chunks that are gone; those that it lacks are
found as a whole only. Records have one size, so that a torn one spoils no other; each has a checksum.
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

from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.layout import KVLayout
from kvstore.tiers.disk.folder import TRAILS_FILE, opened

_SUM_BYTES: Final = 8
_SLACK: Final = 4096  # records of chunks that are gone, beyond as many as there are chunks
_PIECE_RECORDS: Final = 1024  # read at once


class TrailNote:
    """Reads and writes the note in a namespace's folder. Thread-safe; the folder may be renamed meanwhile.

    Args:
        layout: of the chunks.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._trail_bytes = layout.blocks_per_chunk * PREFIX_KEY_BYTES
        self._record_bytes = _SUM_BYTES + self._trail_bytes
        self._lock = threading.Lock()  # held during a write of a few hundred bytes, on threads that write chunks

    def add(self, home: Path, trail: bytes, num_held: int, held: Callable[[], Collection[PrefixKey]]) -> None:
        """Note the trail of a chunk, one of the ``num_held`` that are held now.

        Raises:
            OSError: the system refused; the chunk will be found as a whole only.
        """
        if not PREFIX_KEY_BYTES < len(trail) <= self._trail_bytes:  # that of one block says nothing but its key
            return
        with self._lock, opened(home / TRAILS_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            num_records = os.fstat(fd).st_size // self._record_bytes  # a torn one at the end is overwritten
            if num_records > 2 * num_held + _SLACK:
                num_records = self._shorten(fd, held())
            os.pwrite(fd, self._record(trail), num_records * self._record_bytes)

    def read(self, home: Path, held: Collection[PrefixKey]) -> dict[PrefixKey, bytes]:
        """The trails of those chunks that are held.

        Raises:
            OSError: the system refused.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(FileNotFoundError), self._lock, opened(home / TRAILS_FILE, flags) as fd:
            return self._held(fd, held)
        return {}

    def _shorten(self, fd: int, held: Collection[PrefixKey]) -> int:
        """Keep only the records of chunks that are held. Returns how many that are.

        A crash in between loses trails, no more.
        """
        kept = self._held(fd, held)
        records = b"".join(map(self._record, kept.values()))
        size_bytes = os.pwrite(fd, records, 0)
        os.ftruncate(fd, size_bytes)
        return size_bytes // self._record_bytes

    def _record(self, trail: bytes) -> bytes:
        body = trail.ljust(self._trail_bytes, b"\0")
        return xxhash.xxh3_64_digest(body) + body

    def _held(self, fd: int, held: Collection[PrefixKey]) -> dict[PrefixKey, bytes]:
        trails = self._trails(fd, 4 * len(held) + 2 * _SLACK)
        return {trail[-PREFIX_KEY_BYTES:]: trail for trail in trails if trail[-PREFIX_KEY_BYTES:] in held}

    def _trails(self, fd: int, max_records: int) -> Iterator[bytes]:
        """The trails of all records that are whole; of a file that is too long, those of its end."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        piece_bytes, num_records = _PIECE_RECORDS * self._record_bytes, status.st_size // self._record_bytes
        first_bytes = max(0, num_records - max_records) * self._record_bytes
        for offset in range(first_bytes, status.st_size, piece_bytes):
            data = os.pread(fd, piece_bytes, offset)
            for begin in range(0, len(data) - self._record_bytes + 1, self._record_bytes):
                body = data[begin + _SUM_BYTES : begin + self._record_bytes]
                if data[begin : begin + _SUM_BYTES] == xxhash.xxh3_64_digest(body):
                    yield _without_padding(body)


def _without_padding(body: bytes) -> bytes:
    """The trail of a record: a key of zeros stands for none."""
    end = len(body)
    while end and not any(body[end - PREFIX_KEY_BYTES : end]):
        end -= PREFIX_KEY_BYTES
    return body[:end]
