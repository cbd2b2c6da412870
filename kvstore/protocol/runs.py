"""Runs of pages in a cache server's pool, which hold the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from kvstore.model.errors import ProtocolError

PAGE_BYTES: Final = 16 << 10
Run: TypeAlias = tuple[int, int]
"""Consecutive pages: the number of the first, and their count."""


class Extent(NamedTuple):
    """A range of the pool's bytes."""

    begin: int
    num_bytes: int


def extents(runs: Sequence[Run], offset_bytes: int, num_bytes: int) -> list[Extent]:
    """Return the ranges of the pool for ``num_bytes`` from an offset on in the concatenated runs.

    Raises:
        ProtocolError: the runs are shorter.
    """
    found = []
    for first, pages in runs:
        run_bytes = pages * PAGE_BYTES
        if offset_bytes < run_bytes and num_bytes:
            take = min(run_bytes - offset_bytes, num_bytes)
            found.append(Extent(first * PAGE_BYTES + offset_bytes, take))
            num_bytes -= take
        offset_bytes = max(0, offset_bytes - run_bytes)
    if num_bytes:
        raise ProtocolError("a part of a chunk lies behind its end")
    return found
