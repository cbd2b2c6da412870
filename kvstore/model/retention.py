"""Promise that a chunk stays on disk until a time."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.model.chunks import ChunkRef


class Retention(NamedTuple):
    """Promise that a chunk stays on disk.

    Attributes:
        ref: the chunk.
        until_s: the end, on the index's clock; between processes and on disk in seconds since 1970.
        tenant: ``KeyExtras.tenant`` of the chunk's requests.
    """

    ref: ChunkRef
    until_s: float
    tenant: bytes

    def later(self, by_s: float) -> Retention:
        """Return it on a clock that is so far ahead."""
        return self._replace(until_s=self.until_s + by_s)
