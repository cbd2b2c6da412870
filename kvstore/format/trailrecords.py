"""Trails in a file: records of one size, so that a torn one spoils no other; each has a checksum.

``docs/FORMAT.md`` describes them. A folder's note and a pack have them. Everything here is thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

from kvstore.keys import PREFIX_KEY_BYTES

_SUM_BYTES: Final = 8


class TrailRecords:
    """Writes and reads records of trails.

    Args:
        blocks_per_chunk: the most blocks of a trail.

    Attributes:
        record_bytes: the size of each record.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._trail_bytes = blocks_per_chunk * PREFIX_KEY_BYTES
        self.record_bytes = _SUM_BYTES + self._trail_bytes

    def takes(self, trail: bytes) -> bool:
        """Whether a trail is worth a record, and fits: that of one block says nothing but its key."""
        return PREFIX_KEY_BYTES < len(trail) <= self._trail_bytes

    def record(self, trail: bytes) -> bytes:
        """The record of a trail that it ``takes``."""
        body = trail.ljust(self._trail_bytes, b"\0")
        return xxhash.xxh3_64_digest(body) + body

    def read(self, data: bytes) -> Iterator[bytes]:
        """The trails of those records that are whole and sound."""
        for begin in range(0, len(data) - self.record_bytes + 1, self.record_bytes):
            body = data[begin + _SUM_BYTES : begin + self.record_bytes]
            if data[begin : begin + _SUM_BYTES] == xxhash.xxh3_64_digest(body):
                yield _without_padding(body)


def _without_padding(body: bytes) -> bytes:
    """The trail of a record: a key of zeros stands for none."""
    end = len(body)
    while end and not any(body[end - PREFIX_KEY_BYTES : end]):
        end -= PREFIX_KEY_BYTES
    return body[:end]
