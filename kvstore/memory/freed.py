"""Setting of the C library's allocator that keeps freed memory in the process, because fresh pages are slow."""

from __future__ import annotations

import ctypes
from typing import Final

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES: Final = 32 << 20  # the maximum that glibc accepts


def keep_freed(num_bytes: int) -> None:
    """Let glibc keep up to ``num_bytes`` of freed memory, for the whole process; does nothing with other C libraries.

    Messages are then received into memory that earlier ones have freed: fresh pages cost as much as the copy itself.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, num_bytes)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
