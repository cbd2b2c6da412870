"""Times of the passes of the thread that decides, during which no client is answered."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any, Final

BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)


class Passes:
    """Histogram of times. Belongs to the thread that decides."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def note(self, time_s: float) -> None:
        """Count a pass."""
        self._counts[bisect_left(BOUNDS_S, time_s)] += 1
        self._sum_s += time_s

    def tree(self) -> dict[str, Any]:
        """Return the number of passes up to each bound, of all passes, and the sum of their times."""
        *counts, total = accumulate(self._counts)
        return {"up_to_s": dict(zip(map(str, BOUNDS_S), counts, strict=True)), "count": total, "sum_s": self._sum_s}
