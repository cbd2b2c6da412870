"""Lines of the bench: a path and its limit is a row, a ``Subject``, whose samples make its line.

Whatever measures a line raises ``BenchError`` if a path lost or changed a byte, and ``ConfigError`` if it cannot run
here, for want of memory, a package or a server.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvstore.tools.bench.floors import Bound, bound_of
from kvstore.tools.bench.samples import Pair, columns

if TYPE_CHECKING:
    from kvstore.tools.bench.workbench import Workbench

Unit = Literal["s", "bytes"]


class Subject(NamedTuple):
    """Subject of a line.

    Attributes:
        name: name of the path.
        limit_name: name of the limit that the path is compared with.
        includes: steps in the timed part of the path.
        unit: unit of the samples: seconds, or counted bytes.
    """

    name: str
    limit_name: str
    includes: str
    unit: Unit = "s"

    def line(self, pairs: Sequence[Pair], geometry: str = "", size_bytes: int = 0) -> Line:
        """Return the line of these samples, with the bounds recorded for a geometry."""
        return Line(self, bound_of(geometry, self.name), pairs, size_bytes)


@dataclass(frozen=True)
class Line:
    """One path against its limit.

    Attributes:
        subject: path and limit.
        bound: goal and floor of the fraction.
        pairs: samples; in bytes instead of seconds if that is the subject's unit.
        size_bytes: bytes moved by one call; 0 for a line that counts calls, not bytes.
    """

    subject: Subject
    bound: Bound
    pairs: Sequence[Pair]
    size_bytes: int = 0

    @property
    def path_s(self) -> float:
        """Median time of a call."""
        return statistics.median(pair.path_s for pair in self.pairs)

    @property
    def limit_s(self) -> float:
        """Median time of the limit."""
        return statistics.median(pair.limit_s for pair in self.pairs)

    @property
    def p99_s(self) -> float:
        """99th percentile of the time of a call; of fewer than 100 calls, the slowest."""
        return float(np.percentile([pair.path_s for pair in self.pairs], 99, method="higher"))

    @property
    def fraction(self) -> float:
        """Path's speed as a fraction of the limit's: the median over pairs, as noise affects both sides of a pair."""
        return statistics.median(pair.limit_s / pair.path_s for pair in self.pairs)

    @property
    def failed(self) -> bool:
        """True if the fraction is below its floor."""
        return self.fraction < self.bound.floor

    @property
    def verdict(self) -> str:
        """Fraction against its bounds, in words."""
        if self.failed:
            return "BELOW FLOOR"
        return "below goal" if self.fraction < self.bound.goal else "ok"

    def to_json(self) -> dict[str, object]:
        """Return all data of the line, samples included."""
        unit = self.subject.unit
        return {
            **self.subject._asdict(),
            "size_bytes": self.size_bytes,
            f"median_{unit}": self.path_s,
            f"limit_median_{unit}": self.limit_s,
            f"p99_{unit}": self.p99_s,
            "fraction": self.fraction,
            "goal": self.bound.goal,
            "floor": self.bound.floor,
            "verdict": self.verdict,
            f"samples_{unit}": [pair.path_s for pair in self.pairs],
            f"limit_samples_{unit}": [pair.limit_s for pair in self.pairs],
        }


class Target(NamedTuple):
    """Row of a line whose limit is a number, in the unit of its samples."""

    subject: Subject
    limit: float
    samples: Callable[[], Iterable[float]]

    def line(self) -> Line:
        """Return the line of new samples."""
        return self.subject.line([Pair(self.limit, sample) for sample in self.samples()])


def target(
    limit: float, name: str, limit_name: str, includes: str, unit: Unit = "s"
) -> Callable[[Callable[[], Iterable[float]]], Target]:
    """Return a decorator that makes a row of a function that yields samples."""
    return lambda samples: Target(Subject(name, limit_name, includes, unit), limit, samples)


class Race(NamedTuple):
    """Row of a line whose limit is a call, timed right before or after the path."""

    subject: Subject
    samples: Callable[[], Iterable[Pair]]

    def line(self) -> Line:
        """Return the line of new samples."""
        return self.subject.line(list(self.samples()))


def race(name: str, limit_name: str, includes: str) -> Callable[[Callable[[], Iterable[Pair]]], Race]:
    """Return a decorator that makes a row of a function that yields samples of a path and its limit."""
    return lambda samples: Race(Subject(name, limit_name, includes), samples)


def move_lines(
    subjects: Iterable[Subject],
    found: Sequence[Sequence[Pair]],
    workbench: Workbench,
    num_chunks: int | None = None,
) -> list[Line]:
    """Return the lines of paths that move a batch, or ``num_chunks``, given the samples of all rounds with warm-up."""
    size_bytes = (num_chunks or workbench.num_chunks) * workbench.geometry.chunk_bytes
    return [
        subject.line(pairs, workbench.geometry.name, size_bytes)
        for subject, pairs in zip(subjects, columns(found), strict=True)
    ]
