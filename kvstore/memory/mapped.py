"""Mapped memory, in huge pages where possible, and populated before it is needed."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np

from kvstore.model.chunks import ByteArray

_STEP_BYTES = 8 << 20  # populated between two calls of ``stops``
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, a foreign call releases the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_bytes(num_bytes: int, fd: int = -1) -> ByteArray:
    """Map ``num_bytes``: shared for a file, private for anonymous memory. Dropping the last view unmaps them.

    Raises:
        OSError, OverflowError, ValueError: the system refused.
    """
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(fd, num_bytes, flags), dtype=np.uint8)
    _libc.madvise(memory.ctypes.data, memory.nbytes, _MADV_HUGEPAGE)  # a hint: failure changes nothing
    return memory


def keep_from_children(memory: ByteArray) -> None:
    """Leave a mapping out of processes that this one forks.

    Otherwise a fork copies pinned pages, and copies other pages at the next write, which doubles the memory in use.
    """
    _libc.madvise(memory.ctypes.data, memory.nbytes, _MADV_DONTFORK)


def populate(memory: ByteArray, begin: int, end: int, stops: Callable[[], bool]) -> bool:
    """Allocate every page of a range without changing its content; False if ``stops`` ended it early."""
    address = memory.ctypes.data
    for offset in range(begin, end, _STEP_BYTES):
        if stops():
            return False
        # Fails on Linux before 5.14, where pages are allocated on first use.
        _libc.madvise(address + offset, min(_STEP_BYTES, end - offset), _MADV_POPULATE_WRITE)
    return True


def populate_read(memory: ByteArray, begin: int, end: int) -> None:
    """Fill this process's page tables for a range of a file whose pages are already allocated."""
    # Fails on Linux before 5.14, where each page is mapped on first use.
    _libc.madvise(memory.ctypes.data + begin, end - begin, _MADV_POPULATE_READ)
