"""A pool of memory cut into equal slots, touched before it is needed.

Fresh pages cost about ten times a copy, so the pool is mapped once, asks for huge pages, and is populated by a
background thread; a slot used before the thread reaches it works, only slower. Slots start at page boundaries, as
direct I/O wants. Who owns which slot is the index's business, not the pool's.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np

from kvstore.errors import ConfigError
from kvstore.layout import ALIGNMENT_BYTES, round_up
from kvstore.tiers.base import ByteArray

_POPULATE_PIECE_BYTES = 8 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, a foreign call releases the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SlabPool:
    """``num_slots`` slots of ``slot_bytes`` each, in one anonymous mapping.

    Thread-safe in so far as different slots may be used by different threads. ``close`` ends the background thread; the
    memory itself lives until the last view of it is gone.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots <= 0 or slot_bytes <= 0 or slot_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"a pool needs at least one slot of a multiple of {ALIGNMENT_BYTES} bytes, "
                f"not {num_slots} x {slot_bytes}: raise max_local_cpu_size"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        total_bytes = round_up(num_slots * slot_bytes, mmap.PAGESIZE)
        try:
            self._map = mmap.mmap(-1, total_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot map {total_bytes / 2**30:.1f} GiB for the CPU pool ({error}): lower max_local_cpu_size"
            ) from error
        self._bytes: ByteArray = np.frombuffer(self._map, dtype=np.uint8)
        self._slots = [self._bytes[i * slot_bytes : (i + 1) * slot_bytes] for i in range(num_slots)]
        self._closing = threading.Event()
        self._populator = threading.Thread(target=self._populate, name="kvstore-populate", daemon=True)
        self._populator.start()

    def slot(self, number: int) -> ByteArray:
        """The bytes of slot ``number``: uint8 ``[slot_bytes]``, page-aligned, the same view each time."""
        return self._slots[number]

    def wait_populated(self, timeout_s: float) -> bool:
        """Wait until every page has been touched; for benchmarks and tests."""
        self._populator.join(timeout_s)
        return not self._populator.is_alive()

    def close(self) -> None:
        """Stop populating. Idempotent."""
        self._closing.set()
        self._populator.join()

    def _populate(self) -> None:
        base, total_bytes = self._bytes.ctypes.data, self._bytes.nbytes
        _libc.madvise(base, total_bytes, _MADV_HUGEPAGE)  # a hint: failure changes nothing
        for offset in range(0, total_bytes, _POPULATE_PIECE_BYTES):
            if self._closing.is_set():
                return
            piece_bytes = min(_POPULATE_PIECE_BYTES, total_bytes - offset)
            if _libc.madvise(base + offset, piece_bytes, _MADV_POPULATE_WRITE) != 0:
                return  # Linux before 5.14: pages come on first use instead
