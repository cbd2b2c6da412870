"""Notes next to chunk files: records of one size, so that a torn one damages no other, each with a checksum.

``docs/FORMAT.md`` describes them. A note may name removed chunks, and what it lacks is only unknown after a restart.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import xxhash

from kvstore.format.wholeio import opened
from kvstore.model.keys import PrefixKey

SUM_BYTES: Final = 8
_SLACK: Final = 4096  # records of removed chunks, in addition to as many as there are chunks
_PIECE_RECORDS: Final = 1024  # read at once

Item = TypeVar("Item")


class Records(Protocol[Item]):
    """Writer and reader of the records of one kind.

    Attributes:
        record_bytes: the size of each record.
    """

    record_bytes: int

    def takes(self, item: Item) -> bool:
        """Tell if an item fits and is worth a record."""

    def record(self, item: Item) -> bytes:
        """Return the record of an item that it ``takes``."""

    def read(self, data: bytes) -> Iterator[Item]:
        """Yield the items of those records that are whole and sound."""

    def key_of(self, item: Item) -> PrefixKey:
        """Return the key of the chunk that an item is about."""


def sealed(body: bytes) -> bytes:
    """Return a record: a checksum and its body."""
    return xxhash.xxh3_64_digest(body) + body


def bodies(data: bytes, record_bytes: int) -> Iterator[bytes]:
    """Yield the bodies of those records that are whole and sound."""
    for begin in range(0, len(data) - record_bytes + 1, record_bytes):
        body = data[begin + SUM_BYTES : begin + record_bytes]
        if data[begin : begin + SUM_BYTES] == xxhash.xxh3_64_digest(body):
            yield body


class Note(Generic[Item]):
    """Reader and writer of a note in a namespace's folder. Thread-safe; the folder may be renamed meanwhile.

    Args:
        name: of the file.
        records: of what is noted; the last one of a chunk counts.
    """

    def __init__(self, name: str, records: Records[Item]) -> None:
        self._name = name
        self._records = records
        self._lock = threading.Lock()  # held during a write, mostly of some hundred bytes, on threads that write chunks

    def add(self, home: Path, item: Item, num_held: int, held: Callable[[], Collection[PrefixKey]]) -> None:
        """Note an item; see ``add_all``."""
        self.add_all(home, [item], num_held, held)

    def add_all(
        self, home: Path, items: Iterable[Item], num_held: int, held: Callable[[], Collection[PrefixKey]]
    ) -> None:
        """Note items about some of the ``num_held`` chunks that are held now.

        Raises:
            OSError: the system refused; the items will be unknown.
        """
        new = [self._records.record(item) for item in items if self._records.takes(item)]
        if not new:
            return
        with self._lock, opened(home / self._name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            num_records = os.fstat(fd).st_size // self._records.record_bytes  # a torn one at the end is overwritten
            if num_records > 2 * num_held + _SLACK:
                num_records = self._shorten(fd, held())
            os.pwrite(fd, b"".join(new), num_records * self._records.record_bytes)

    def read(self, home: Path, held: Collection[PrefixKey]) -> dict[PrefixKey, Item]:
        """Return the items about the chunks in ``held``.

        Raises:
            OSError: the system refused.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(FileNotFoundError), self._lock, opened(home / self._name, flags) as fd:
            return self._held(fd, held)
        return {}

    def _shorten(self, fd: int, held: Collection[PrefixKey]) -> int:
        """Keep only the records of chunks that are held. Returns their number.

        A crash in between only loses items.
        """
        kept = self._held(fd, held)
        records = b"".join(map(self._records.record, kept.values()))
        size_bytes = os.pwrite(fd, records, 0)
        os.ftruncate(fd, size_bytes)
        return size_bytes // self._records.record_bytes

    def _held(self, fd: int, held: Collection[PrefixKey]) -> dict[PrefixKey, Item]:
        found = ((self._records.key_of(item), item) for item in self._items(fd, 4 * len(held) + 2 * _SLACK))
        return {key: item for key, item in found if key in held}

    def _items(self, fd: int, max_records: int) -> Iterator[Item]:
        """Yield the items of all whole records; of a file that is too long, those at its end."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        record_bytes = self._records.record_bytes
        first_bytes = max(0, status.st_size // record_bytes - max_records) * record_bytes
        for offset in range(first_bytes, status.st_size, _PIECE_RECORDS * record_bytes):
            yield from self._records.read(os.pread(fd, _PIECE_RECORDS * record_bytes, offset))
