"""Reused buffers for encoding and decoding chunks, allocated when first needed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, LifoQueue

import numpy as np

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import TierError

SCRATCH_BUFFERS = 4  # number of threads that encode at once; more than there are cores would not be faster


class Scratch:
    """At most ``SCRATCH_BUFFERS`` page-aligned buffers. Thread-safe.

    Args:
        size_bytes: of each.
        timeout_s: longest wait while all are in use; None waits until one is free.
    """

    def __init__(self, size_bytes: int, timeout_s: float | None = None) -> None:
        self._size_bytes = size_bytes
        self._timeout_s = timeout_s
        self._buffers: LifoQueue[ByteArray | None] = LifoQueue()
        for _ in range(SCRATCH_BUFFERS):
            self._buffers.put(None)

    @contextmanager
    def borrowed(self) -> Iterator[ByteArray]:
        """Yield a buffer for one chunk, with arbitrary content.

        Raises:
            TierError: all of them were in use for ``timeout_s``.
        """
        try:
            buffer = self._buffers.get(timeout=self._timeout_s)
        except Empty as error:
            raise TierError(
                f"all {SCRATCH_BUFFERS} buffers of the codec are in use for {self._timeout_s} s: the storage is too "
                "slow for so many threads; lower their number or raise the time-out"
            ) from error
        try:
            if buffer is None:
                memory = mmap.mmap(-1, self._size_bytes)
                with suppress(OSError):  # a kernel without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
                buffer = np.frombuffer(memory, np.uint8)
            yield buffer
        finally:
            self._buffers.put(buffer)
