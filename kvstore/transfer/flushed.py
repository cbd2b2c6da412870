"""Result of a flush."""

from __future__ import annotations

from typing import NamedTuple


class Flushed(NamedTuple):
    """Number of writes to slower tiers since the last flush that did not store their chunk. True if there are none.

    Chunks that were removed, cleared or reset before they were written do not count.

    Attributes:
        failed: writes that a tier refused, or that could not begin.
        full: writes for which there was no room, in a tier or in its queue.
        pending: writes and removals that had not ended when time ran out.
    """

    failed: int = 0
    full: int = 0
    pending: int = 0

    def __bool__(self) -> bool:
        return not any(self)

    def plus(self, other: Flushed) -> Flushed:
        """Return the sum over two tiers."""
        return Flushed(self.failed + other.failed, self.full + other.full, self.pending + other.pending)
