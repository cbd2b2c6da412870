"""Counters of what a mover has moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass
class MoverCounters:
    """Counts of chunks and bytes moved since the start."""

    chunks_loaded: int = 0
    chunks_loaded_from_disk: int = 0
    chunks_loaded_from_remote: int = 0
    chunks_stored: int = 0
    bytes_scattered: int = 0
    bytes_gathered: int = 0
    chunks_loaded_from_gpu: int = 0
    mislabelled_slots: int = 0
    read_timeouts: int = 0
    failed_copies: int = 0

    @classmethod
    def sum(cls, parts: Iterable[MoverCounters]) -> MoverCounters:
        """Return the sum over several movers."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))
