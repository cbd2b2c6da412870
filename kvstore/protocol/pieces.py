"""Pieces of payload: their checksums, and copies to their places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from kvstore.model.chunks import ByteArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

_STEP_BYTES: Final = 256 << 10  # fits into a core's own cache


def checksum(parts: Iterable[Buffer]) -> bytes:
    """Return the xxh3_64 of the concatenated parts."""
    running = xxhash.xxh3_64()
    for part in parts:
        running.update(part)
    return running.digest()


def scatter(payload: ByteArray, parts: Iterable[ByteArray]) -> None:
    """Copy a payload into consecutive parts, which together have as many bytes."""
    begin = 0
    for part in parts:
        part[:] = payload[begin : begin + len(part)]
        begin += len(part)


class Placing:
    """Copies bytes to several places in turn, and computes the checksum of the copied bytes.

    It copies in steps, and computes the checksum of each while it is in the processor's cache, so that memory is read
    only once.
    """

    def __init__(self) -> None:
        self._running = xxhash.xxh3_64()

    def copy(self, source: memoryview, target: ByteArray) -> None:
        """Copy the next bytes; both arrays have the same length."""
        arrived = np.frombuffer(source, np.uint8)
        for begin in range(0, len(target), _STEP_BYTES):
            step = target[begin : begin + _STEP_BYTES]
            step[:] = arrived[begin : begin + _STEP_BYTES]
            self._running.update(step.data)

    @property
    def checksum(self) -> bytes:
        """xxh3_64 of all bytes copied so far."""
        return self._running.digest()
