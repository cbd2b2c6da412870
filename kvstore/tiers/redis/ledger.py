"""Which writes of ours are in Redis, as far as is known: the accounting of the redis tier.

Every write of a chunk has an id of its own. A server tells whoever ends a write, by replacing or removing its chunk,
which id that was. So a write is booked before it is sent, and struck off when its end is reported, in whatever order
the threads get to know: no lock has to be held while a server is asked.

A chunk is known by the epoch that it is stored in: while that changes, a call that began in the old one says nothing of
what another has stored in the new one.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.chunks import ChunkRef

WRITE_ID_BYTES = 8
WriteId = bytes


Place = tuple[bytes, "ChunkRef"]
"""The epoch, and the chunk in it."""


@dataclass
class _Write:
    place: Place
    size_bytes: int
    is_settled: bool  # its commit was seen, so a later look that does not find it proves its end


class Ledger:
    """The writes booked, and their bytes. Thread-safe; nothing here waits.

    Args:
        capacity_bytes: ``used_bytes`` never exceeds it, unless by what ``adopt`` found.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._writes: dict[WriteId, _Write] = {}
        self._ids: dict[Place, set[WriteId]] = {}
        self._scans = 0
        self._ended: set[Place] = set()  # chunks of which a write ended while a scan was under way

    def book(self, epoch: bytes, ref: ChunkRef, size_bytes: int) -> WriteId | None:
        """Book a new write, which is about to begin; None if there is no room for it."""
        with self._lock:
            if self.used_bytes + size_bytes > self._capacity_bytes:
                return None
            return self._enter((epoch, ref), size_bytes, is_settled=False)

    def settle(self, write_id: WriteId) -> None:
        """The write is complete, or may be: it counts until its end is known."""
        with self._lock:
            write = self._writes.get(write_id)
            if write is not None:
                write.is_settled = True

    def settled(self, epoch: bytes, ref: ChunkRef) -> set[WriteId]:
        """The complete writes of a chunk. One that a later look does not find has ended for good."""
        with self._lock:
            return {write_id for write_id in self._ids.get((epoch, ref), ()) if self._writes[write_id].is_settled}

    def size_of(self, epoch: bytes, ref: ChunkRef) -> int | None:
        """The bytes of a chunk's complete write, of the largest if there may be several; None if there is none."""
        with self._lock:
            writes = [self._writes[write_id] for write_id in self._ids.get((epoch, ref), ())]
            return max((write.size_bytes for write in writes if write.is_settled), default=None)

    def strike(self, write_ids: Iterable[WriteId]) -> None:
        """These writes have ended; those that are not booked are ignored."""
        with self._lock:
            for write_id in write_ids:
                self._strike(write_id)

    def strike_all(self, change: Callable[[], bool]) -> None:
        """Everything has ended, also what is being written, if ``change`` says so, called under the same lock."""
        with self._lock:
            if not change():
                return
            self._writes.clear()
            self._ids.clear()
            self.used_bytes = 0

    def begin_scan(self) -> set[WriteId]:
        """Returns all complete writes; those of chunks that the scan does not find have ended."""
        with self._lock:
            self._scans += 1
            return {write_id for write_id, write in self._writes.items() if write.is_settled}

    def end_scan(
        self, before: set[WriteId], epoch: bytes, found: dict[ChunkRef, int], is_valid: Callable[[], bool]
    ) -> bool:
        """Strike off what was not found in the epoch, and book what is new, as far as it has not ended meanwhile.

        Returns:
            What ``is_valid`` said, which is called under the same lock as ``change`` in ``strike_all``. If that was
            False, nothing was done.
        """
        with self._lock:
            if not is_valid():
                self._close_scan()
                return False
            here = {(epoch, ref): size_bytes for ref, size_bytes in found.items()}
            for write_id in before:
                if write_id in self._writes and self._writes[write_id].place not in here:
                    self._strike(write_id)
            for place, size_bytes in here.items():
                if place not in self._ids and place not in self._ended:
                    self._enter(place, size_bytes, is_settled=True)
            self._close_scan()
            return True

    def break_scan(self) -> None:
        """The scan did not come to its end."""
        with self._lock:
            self._close_scan()

    def _close_scan(self) -> None:
        self._scans -= 1
        if not self._scans:
            self._ended.clear()

    def _enter(self, place: Place, size_bytes: int, *, is_settled: bool) -> WriteId:
        write_id = secrets.token_bytes(WRITE_ID_BYTES)
        self._writes[write_id] = _Write(place, size_bytes, is_settled)
        self._ids.setdefault(place, set()).add(write_id)
        self.used_bytes += size_bytes
        return write_id

    def _strike(self, write_id: WriteId) -> None:
        write = self._writes.pop(write_id, None)
        if write is None:
            return
        self.used_bytes -= write.size_bytes
        ids = self._ids[write.place]
        ids.remove(write_id)
        if not ids:
            del self._ids[write.place]
        if self._scans:
            self._ended.add(write.place)
