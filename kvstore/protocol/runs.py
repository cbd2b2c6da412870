"""Pages of a cache server's pool, in rows: where in the pool something lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from kvstore.errors import ProtocolError

PAGE_BYTES: Final = 16 << 10
Run: TypeAlias = tuple[int, int]
"""A row of pages: the number of the first, and how many."""


class Extent(NamedTuple):
    """A part of memory: where, and how much."""

    begin: int
    num_bytes: int


def extents(runs: Sequence[Run], offset_bytes: int, num_bytes: int) -> list[Extent]:
    """Where, in the pool, a part of what lies in some runs is.

    Raises:
        ProtocolError: they do not reach so far.
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
