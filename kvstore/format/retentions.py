"""Retention in records, for the note by which chunks stay on disk after a restart, too."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Final

from kvstore.format.notes import SUM_BYTES, Note, bodies, sealed
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.model.retention import Retention

RETAINED_FILE: Final = "retained"
_TENANT_BYTES: Final = 16
_BODY: Final = struct.Struct(f"<{PREFIX_KEY_BYTES}s{_TENANT_BYTES}sdI")  # a tenant of zeros stands for none


class RetentionRecords:
    """Writer and reader of the records of retention.

    Attributes:
        record_bytes: the size of each record.
    """

    record_bytes = SUM_BYTES + _BODY.size

    def takes(self, item: Retention) -> bool:
        """Tell if it has a tenant as ours are."""
        return len(item.tenant) in {0, _TENANT_BYTES}

    def record(self, item: Retention) -> bytes:
        """Return the record of a retention that it ``takes``."""
        return sealed(_BODY.pack(item.ref.prefix_key, item.tenant, item.until_s, item.ref.num_blocks))

    def read(self, data: bytes) -> Iterator[Retention]:
        """Yield what those records say that are whole and sound."""
        for body in bodies(data, self.record_bytes):
            key, tenant, until_s, num_blocks = _BODY.unpack(body)
            if math.isfinite(until_s):
                yield Retention(ChunkRef(key, num_blocks), until_s, tenant if any(tenant) else b"")

    def key_of(self, item: Retention) -> PrefixKey:
        """Return the key of the chunk."""
        return item.ref.prefix_key


class RetentionNote(Note[Retention]):
    """Note of the retained chunks in a namespace's folder."""

    def __init__(self) -> None:
        super().__init__(RETAINED_FILE, RetentionRecords())
