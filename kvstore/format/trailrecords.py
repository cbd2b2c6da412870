"""Trails in records: in a pack, and in the note by which chunks are also found by the ends of their blocks.

A trail follows from a chunk's tokens, like its key; chunks that the note lacks are found only as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstore.format.notes import SUM_BYTES, Note, bodies, sealed
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.model.layout import KVLayout

TRAILS_FILE: Final = "trails"


class TrailRecords:
    """Writer and reader of trail records.

    Args:
        blocks_per_chunk: the maximum of a trail's blocks.

    Attributes:
        record_bytes: the size of each record.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._trail_bytes = blocks_per_chunk * PREFIX_KEY_BYTES
        self.record_bytes = SUM_BYTES + self._trail_bytes

    def takes(self, item: bytes) -> bool:
        """Tell if a trail fits and is worth a record: the trail of one block is nothing but its key."""
        return PREFIX_KEY_BYTES < len(item) <= self._trail_bytes

    def record(self, item: bytes) -> bytes:
        """Return the record of a trail that it ``takes``."""
        return sealed(item.ljust(self._trail_bytes, b"\0"))

    def read(self, data: bytes) -> Iterator[bytes]:
        """Yield the trails of those records that are whole and sound."""
        return map(_without_padding, bodies(data, self.record_bytes))

    def key_of(self, item: bytes) -> PrefixKey:
        """Return the key of the trail's chunk."""
        return item[-PREFIX_KEY_BYTES:]


def _without_padding(body: bytes) -> bytes:
    """Return the trail of a record; a key of zeros is padding."""
    end = len(body)
    while end and not any(body[end - PREFIX_KEY_BYTES : end]):
        end -= PREFIX_KEY_BYTES
    return body[:end]


class TrailNote(Note[bytes]):
    """Note of the trails in a namespace's folder.

    Args:
        layout: of the chunks.
    """

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(TRAILS_FILE, TrailRecords(layout.blocks_per_chunk))
