"""Batches of small chunks that one call writes to a tier: a call costs as much as moving some of them."""

from __future__ import annotations

from typing import Final

_MAX_CHUNKS: Final = 8  # a call has a deadline
_MAX_BYTES: Final = 12 << 20


def chunks_per_batch(slot_bytes: int) -> int:
    """Return the most chunks that one call writes."""
    return max(1, min(_MAX_CHUNKS, _MAX_BYTES // slot_bytes))
