"""End of a chunk's time to live."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from kvstore.model.chunks import ChunkRef

LAST_END_S: Final = 253_402_300_799  # the end of the year 9999


class Lifetime(NamedTuple):
    """Time until when a chunk may be kept.

    Attributes:
        ref: the chunk.
        until_s: the end, on the index's clock; between processes and on disk in seconds since 1970. None for no end.
    """

    ref: ChunkRef
    until_s: float | None

    def later(self, by_s: float) -> Lifetime:
        """Return it on a clock that is so far ahead."""
        return self if self.until_s is None else self._replace(until_s=self.until_s + by_s)


def lasts(expires_s: float | None, until_s: float | None) -> bool:
    """Tell if a copy that expires at a time is kept at least until another; None means without end."""
    return expires_s is None or (until_s is not None and until_s <= expires_s)


def rest_ms(until_s: float) -> int:
    """Return the time until an end since 1970, at least 1; other hosts' clocks may differ, so they are told no end."""
    return max(1, int((min(until_s, LAST_END_S) - time.time()) * 1000))


def clock_ahead_s() -> float:
    """Return by how much the time since 1970 is ahead of the monotonic clock now."""
    return time.time() - time.monotonic()
