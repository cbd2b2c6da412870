"""A pool of memory cut into equal slots, touched before it is needed.

Fresh pages cost about ten times a copy, so the pool is mapped once, asks for huge pages, and is populated, and pinned
for the GPU if there is one, by threads in the background. They go upwards, as the index hands out slots, so most stores
find their slot ready; the others work as well, only slower. Slots start at page boundaries, as direct I/O wants. The
index decides who owns which slot.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time

from kvstore.chunks import ByteArray
from kvstore.errors import ConfigError
from kvstore.layout import ALIGNMENT_BYTES, round_up
from kvstore.memory.mapped import map_bytes, populate
from kvstore.memory.pinning import Pinner, find_pinner

logger = logging.getLogger(__name__)

POPULATE_THREADS = 2  # more would take the memory's bandwidth from the engine that is starting
_PIECE_BYTES = 256 << 20  # how much is pinned at once


class SlabPool:
    """``num_slots`` slots of ``slot_bytes`` each, in one anonymous mapping.

    Thread-safe in so far as different slots may be used by different threads. ``close`` ends the background threads and
    unpins; the memory itself lives until the last view of it is gone.

    Args:
        num_slots: at least one.
        slot_bytes: a multiple of 4096.
        pinner: how to pin the slots; None finds out.
        piece_bytes: about how much is pinned at once. A piece consists of whole slots.

    Raises:
        ConfigError: the sizes cannot be used, or the memory cannot be mapped.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, pinner: Pinner | None = None, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        if num_slots <= 0 or slot_bytes <= 0 or slot_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"a pool needs at least one slot of a multiple of {ALIGNMENT_BYTES} bytes, "
                f"not {num_slots} x {slot_bytes}: raise max_local_cpu_size"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._bytes = _map(round_up(num_slots * slot_bytes, mmap.PAGESIZE))
        self._slots = [self._bytes[i * slot_bytes : (i + 1) * slot_bytes] for i in range(num_slots)]
        self._address = self._bytes.ctypes.data
        self._pinner = pinner or find_pinner()
        self._slots_per_piece = max(1, piece_bytes // slot_bytes)
        self._num_pieces = -(-num_slots // self._slots_per_piece)
        self._lock = threading.Lock()
        self._pinned: list[int] = []  # addresses of pieces
        self._pins = True
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._populate, args=(number,), name=f"kvstore-populate-{number}", daemon=True)
            for number in range(min(POPULATE_THREADS, self._num_pieces))
        ]
        for thread in self._threads:
            thread.start()

    def slot(self, number: int) -> ByteArray:
        """The bytes of slot ``number``: uint8 ``[slot_bytes]``, page-aligned, the same view each time."""
        return self._slots[number]

    def wait_populated(self, timeout_s: float) -> bool:
        """Wait until the threads have ended, all slots being ready; for benchmarks and tests."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stop populating, and unpin. No copy may be under way. Idempotent."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        with self._lock:
            pinned, self._pinned = self._pinned, []
        for address in pinned:
            self._pinner.unpin(address)

    def _populate(self, first_piece: int) -> None:
        """On thread ``first_piece``: every second piece, so that all threads together go upwards."""
        piece_bytes = self._slots_per_piece * self.slot_bytes
        for piece in range(first_piece, self._num_pieces, POPULATE_THREADS):
            begin = piece * piece_bytes
            end = min(begin + piece_bytes, self.num_slots * self.slot_bytes)
            if not populate(self._bytes, begin, end, self._closing.is_set):
                return
            self._pin(self._address + begin, end - begin)

    def _pin(self, address: int, num_bytes: int) -> None:
        """Pin one piece; after the first that fails, the rest stays as it is."""
        if not self._pins:
            return
        problem = self._pinner.pin(address, num_bytes)
        with self._lock:
            if problem is None:
                self._pinned.append(address)
                return
            is_first, self._pins = self._pins, False
        if is_first:
            logger.warning("cannot pin the CPU pool (%s): copies between it and the GPU are slower", problem)


def _map(num_bytes: int) -> ByteArray:
    """Addresses for ``num_bytes``, without memory behind them yet.

    Raises:
        ConfigError: the system refused.
    """
    try:
        return map_bytes(num_bytes)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot map {num_bytes / 2**30:.1f} GiB for the CPU pool ({error}): lower max_local_cpu_size"
        ) from error
