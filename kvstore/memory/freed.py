"""Memory that was freed stays in the process."""

from __future__ import annotations

import ctypes
from typing import Final

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES: Final = 32 << 20  # the most that may be asked for


def keep_freed(num_bytes: int) -> None:
    """Let the C library keep so much freed memory, for the whole process, where it is glibc.

    Messages are then received into memory that earlier ones have freed: fresh pages cost as much as the copy itself.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, num_bytes)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
