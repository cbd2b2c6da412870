"""Figures of a GPU run, each with the limit measured in the same run and the ratio of both."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvstore.tools.bench.samples import Pair

GB_PER_S, MS, US, COUNT = "GB/s", "ms", "us", ""


@dataclass(frozen=True)
class Figure:
    """Result of one measurement.

    Attributes:
        name: name of the measurement.
        value: measured value in ``unit``.
        limit: value it is compared with, measured in the same run, in the same unit.
        ratio: speed, time or count relative to the limit. For speeds it is the median over pairs of samples, not the
            quotient of ``value`` and ``limit``.
        unit: unit of value and limit.
        goal: goal of the ratio; None if it is for information only.
        at_most: the ratio must not exceed the goal, instead of reaching it.
        more: samples and other data that explain the figure.
    """

    name: str
    value: float
    limit: float
    ratio: float
    unit: str
    goal: float | None = None
    at_most: bool = False
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Ratio against its goal, in a word; empty without a goal."""
        if self.goal is None:
            return ""
        is_kept = self.ratio <= self.goal if self.at_most else self.ratio >= self.goal
        return "ok" if is_kept else "short"

    def to_json(self) -> dict[str, object]:
        """Return all data of the figure."""
        return {
            "figure": self.name,
            "value": self.value,
            "limit": self.limit,
            "ratio": self.ratio,
            "unit": self.unit,
            "goal": self.goal,
            "at_most": self.at_most,
            "verdict": self.verdict,
            "more": dict(self.more),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> Figure:
        """Return the figure that ``to_json`` serialized."""
        names = ("value", "limit", "ratio", "unit", "goal", "at_most", "more")
        return cls(str(found["figure"]), **{name: found[name] for name in names})  # type: ignore[arg-type]


def speed(name: str, pairs: Sequence[Pair], size_bytes: int, goal: float | None = None) -> Figure:
    """Return the speed of a path that moved ``size_bytes`` in each sample, against that of its limit."""
    path_s = statistics.median(pair.path_s for pair in pairs)
    limit_s = statistics.median(pair.limit_s for pair in pairs)
    ratio = statistics.median(pair.limit_s / pair.path_s for pair in pairs)
    samples = {"samples_s": [pair.path_s for pair in pairs], "limit_samples_s": [pair.limit_s for pair in pairs]}
    return Figure(name, size_bytes / path_s / 1e9, size_bytes / limit_s / 1e9, ratio, GB_PER_S, goal, more=samples)


def duration(
    name: str,
    value_s: float,
    limit_s: float,
    unit: str,
    goal: float | None = None,
    *,
    more: Mapping[str, object] | None = None,
) -> Figure:
    """Return a time, whose ratio to its limit should not exceed ``goal``."""
    scale = {MS: 1e3, US: 1e6}[unit]
    return Figure(name, value_s * scale, limit_s * scale, value_s / limit_s, unit, goal, at_most=True, more=more or {})


def count(name: str, value: int, of: int, goal: float | None = 1.0) -> Figure:
    """Return a count as a fraction of ``of``."""
    return Figure(name, value, of, value / of, COUNT, goal)


def percentile(samples_s: Iterable[float], share: float) -> float:
    """Return the smallest sample that ``share`` percent do not exceed."""
    return float(np.percentile(list(samples_s), share, method="higher"))


def append_line(file: Path, line: Mapping[str, object]) -> None:
    """Append one JSON line to a file and sync it to disk, so that it survives a crash of the machine."""
    data = (json.dumps(line) + "\n").encode()
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
