"""Trails in a file: records of one size, so that a torn one damages no other, each with a checksum.

``docs/FORMAT.md`` describes them. A folder's note and a pack contain them. Everything here is thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

from kvstore.model.keys import PREFIX_KEY_BYTES

_SUM_BYTES: Final = 8


class TrailRecords:
    """Writer and reader of trail records.

    Args:
        blocks_per_chunk: the maximum of a trail's blocks.

    Attributes:
        record_bytes: the size of each record.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._trail_bytes = blocks_per_chunk * PREFIX_KEY_BYTES
        self.record_bytes = _SUM_BYTES + self._trail_bytes

    def takes(self, trail: bytes) -> bool:
        """Tell if a trail fits and is worth a record: the trail of one block is nothing but its key."""
        return PREFIX_KEY_BYTES < len(trail) <= self._trail_bytes

    def record(self, trail: bytes) -> bytes:
        """Return the record of a trail that it ``takes``."""
        body = trail.ljust(self._trail_bytes, b"\0")
        return xxhash.xxh3_64_digest(body) + body

    def read(self, data: bytes) -> Iterator[bytes]:
        """Yield the trails of those records that are whole and sound."""
        for begin in range(0, len(data) - self.record_bytes + 1, self.record_bytes):
            body = data[begin + _SUM_BYTES : begin + self.record_bytes]
            if data[begin : begin + _SUM_BYTES] == xxhash.xxh3_64_digest(body):
                yield _without_padding(body)


def _without_padding(body: bytes) -> bytes:
    """Return the trail of a record; a key of zeros is padding."""
    end = len(body)
    while end and not any(body[end - PREFIX_KEY_BYTES : end]):
        end -= PREFIX_KEY_BYTES
    return body[:end]
