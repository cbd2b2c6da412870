"""Value of keeping a chunk, from the fate of chunks like it: a survival estimate and its Gittins index.

A chunk's *class* is its number of uses, up to four; its *age* is the number of chunks touched since its last use. For
every class and age bucket the table counts uses (events) and chunks that were no longer observed (censored). From these
and the chunks still waiting it estimates the hazard of a use at that age (Kaplan and Meier, 1958). The value of keeping
a chunk of age b is the best ratio, over all times T to hold it, of the chance of a use up to T to the expected time
held: the Gittins index of the chunk, in uses per chunk touched.

Ranking cached objects by hits per space and time from observed ages is LHD's idea (Beckmann, Chen, Cidon, NSDI 2018).
LHD holds an object without a time limit, where this table looks for the best time to give up.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import log2
from operator import add

NUM_CLASSES = 4
_FIRST_AGE, _OCTAVES = 16, 20
EDGES = [round(_FIRST_AGE * 2 ** (step / 2)) for step in range(2 * _OCTAVES)]
"""Ages at which a new bucket begins: two per octave, up to 12 million."""
NUM_BUCKETS = len(EDGES) + 1
_WIDTHS = [b - a for a, b in zip([0, *EDGES], [*EDGES, 2 * EDGES[-1]], strict=True)]
_PRIOR_WEIGHT = 30.0  # chunks
_PRIOR = [1 - 0.97 ** (2 * log2(_FIRST_AGE)), *([0.03] * len(EDGES))]
"""Hazards before any observations: the same for every half octave, so that the oldest is evicted first."""
_DECAY = 0.995  # of past counts, at each update

Row = list[float]


def bucket_of(age: int) -> int:
    """Return the bucket of an age."""
    return bisect_right(EDGES, age)


class SurvivalTable:
    """Counts the fate of chunks of each class, and estimates the value of keeping one.

    Attributes:
        values: by class and age bucket; a chunk used more often is never worth less at the same age.
    """

    def __init__(self) -> None:
        self._hits = _rows()
        self._lost = _rows()
        self._waiting = _rows()
        self.values = _rows()
        self.update()

    def hit(self, cls: int, age: int, count: int = 1) -> None:
        """Count chunks of this class that were used at this age."""
        self._hits[cls][bisect_right(EDGES, age)] += count

    def lose(self, cls: int, age: int, count: int = 1) -> None:
        """Count chunks of this class that are no longer observed."""
        self._lost[cls][bisect_right(EDGES, age)] += count

    def wait(self, cls: int, age: int, count: int = 1) -> None:
        """Count observed chunks of this class that reached this age without a use. Counted anew for each update."""
        self._waiting[cls][bisect_right(EDGES, age)] += count

    def update(self) -> None:
        """Recompute the values, and decay past counts."""
        censored = [list(map(add, *rows)) for rows in zip(self._lost, self._waiting, strict=True)]
        self._waiting = _rows()
        pool_hits = [sum(column) for column in zip(*self._hits, strict=True)]
        pool_censored = [sum(column) for column in zip(*censored, strict=True)]
        pool = _hazards(pool_hits, pool_censored, _PRIOR)
        self.values = [_values(_hazards(*rows, pool)) for rows in zip(self._hits, censored, strict=True)]
        for lower, upper in zip(self.values, self.values[1:], strict=False):
            upper[:] = map(max, lower, upper)
        for row in (*self._hits, *self._lost):
            row[:] = [_DECAY * count for count in row]


def _rows() -> list[Row]:
    return [[0.0] * NUM_BUCKETS for _ in range(NUM_CLASSES)]


def _hazards(hits: Row, censored: Row, prior: Row) -> Row:
    """Return the chance of a use in each bucket, if reached; censored chunks saw half of their last bucket."""
    reached = list(accumulate(reversed([h + c for h, c in zip(hits, censored, strict=True)])))[::-1]
    return [
        min(1.0, (h + _PRIOR_WEIGHT * p) / (n - c / 2 + _PRIOR_WEIGHT))
        for h, c, n, p in zip(hits, censored, reached, prior, strict=True)
    ]


def _values(hazards: Row) -> Row:
    """Return the steepest slope from each bucket to a later one, over time held and expected uses: a convex hull."""
    time, survival, points = 0.0, 1.0, [(0.0, 0.0)]
    for hazard, width in zip(hazards, _WIDTHS, strict=True):
        time += survival * (1 - hazard / 2) * width
        survival *= 1 - hazard
        points.append((time, 1 - survival))
    values: Row = []
    hull = [points.pop()]
    for point in reversed(points):
        while len(hull) > 1 and _slope(point, hull[-1]) <= _slope(point, hull[-2]):
            hull.pop()
        values.append(_slope(point, hull[-1]))
        hull.append(point)
    return values[::-1]


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    return (end[1] - start[1]) / max(end[0] - start[0], 1e-12)
