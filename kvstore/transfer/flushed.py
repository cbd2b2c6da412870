"""What a flush has found."""

from __future__ import annotations

from typing import NamedTuple


class Flushed(NamedTuple):
    """What was to be written to slower tiers since the last flush, and is not there. False if there is any.

    Chunks that were removed, cleared or reset before they were written do not count.

    Attributes:
        failed: writes that a tier has refused, or that could not be begun.
        full: writes for which there was no room, in a tier or in the queue to it.
        pending: writes and removals that had not ended when time ran out.
    """

    failed: int = 0
    full: int = 0
    pending: int = 0

    def __bool__(self) -> bool:
        return not any(self)

    def plus(self, other: Flushed) -> Flushed:
        """What two tiers have not taken."""
        return Flushed(self.failed + other.failed, self.full + other.full, self.pending + other.pending)
