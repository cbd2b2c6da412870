"""Results of the bench: a line for each path, and the report of a run."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from kvstore.tools.bench.floors import Bound, bound_of
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.load import Load
from kvstore.tools.bench.samples import WARM_UP_ROUNDS, Pair
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

    def line(self, geometry: Geometry, pairs: Sequence[Pair], size_bytes: int = 0) -> Line:
        """Return the line of these samples, with its recorded bounds."""
        return Line(self, bound_of(geometry.name, self.name), pairs, size_bytes)


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


def move_lines(subjects: Iterable[Subject], rounds: Iterable[Sequence[Pair]], workbench: Workbench) -> list[Line]:
    """Return the lines of paths that move a batch, each sampled once a round, without the warm-up rounds."""
    return [
        subject.line(workbench.geometry, pairs[WARM_UP_ROUNDS:], workbench.batch_bytes)
        for subject, pairs in zip(subjects, zip(*rounds, strict=True), strict=True)
    ]


@dataclass(frozen=True)
class BenchReport:
    """Result of one run.

    Attributes:
        geometry: geometry of the KV that was moved.
        batch_bytes: bytes moved by one call.
        rounds: samples of most lines.
        lines: measured lines.
        load: load of the machine during the run.
        skipped: sections that were not measured, with reasons.
        interrupted: whether the run was stopped before the last line.
    """

    geometry: Geometry
    batch_bytes: int
    rounds: int
    lines: list[Line]
    load: Load
    skipped: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failed(self) -> list[Line]:
        """Lines below their floors."""
        return [line for line in self.lines if line.failed]

    def to_json(self) -> dict[str, object]:
        """Return the report as one JSON object; times are in seconds."""
        return {
            "geometry": asdict(self.geometry),
            "batch_bytes": self.batch_bytes,
            "rounds": self.rounds,
            "machine": {
                "platform": platform.platform(),
                "cpus": self.load.cores,
                "load": self.load.begin,
                "load_at_end": self.load.end,
                "others_cores": self.load.others_cores,
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                "torch": str(torch.__version__),
                "numpy": np.__version__,
            },
            "lines": [line.to_json() for line in self.lines],
            "skipped": self.skipped,
            "interrupted": self.interrupted,
            "failed": [line.subject.name for line in self.failed],
        }
