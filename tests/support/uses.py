"""Count of unfinished operations and leases in an index."""

from __future__ import annotations

from kvstore.index.index import ChunkIndex


def uses_of(index: ChunkIndex) -> int:
    """Count plans and writes in flight, and leases, per chunk; 0 when idle."""
    return sum(chunk.uses for chunk in index._chunks.values())
