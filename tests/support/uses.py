"""How much is unfinished in an index."""

from __future__ import annotations

from kvstore.catalog.index import ChunkIndex


def uses_of(index: ChunkIndex) -> int:
    """Plans and writes in flight, and leases, counted per chunk; 0 when idle."""
    return sum(chunk.uses for chunk in index._chunks.values())
