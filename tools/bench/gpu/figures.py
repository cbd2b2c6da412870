"""Figures of a run of steps, each with the limit measured in the same run and the ratio of both, and their table."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from kvstore.tools.bench.samples import Pair
from kvstore.tools.console import numbers

GB_PER_S, MS, US, COUNT = "GB/s", "ms", "us", ""
_STYLES = {"ok": "green", "short": "yellow", "failed": "red", "timed out": "red"}


@dataclass(frozen=True)
class Figure:
    """Result of one measurement.

    Attributes:
        figure: name of the measurement.
        value: measured value in ``unit``.
        limit: value it is compared with, measured in the same run, in the same unit.
        ratio: speed, time or count relative to the limit. For speeds it is the median over pairs of samples, not the
            quotient of ``value`` and ``limit``.
        unit: unit of value and limit.
        goal: goal of the ratio; None if it is for information only.
        at_most: the ratio must not exceed the goal, instead of reaching it.
        more: samples and other data that explain the figure.
    """

    figure: str
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
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> Figure:
        """Return the figure that ``to_json`` serialized."""
        return cls(**{name: found[name] for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Ended:
    """Outcome of a step.

    Attributes:
        name: name of the step.
        outcome: done, failed, timed out, skipped; or answered, for a question that failed.
        said: reason of a failure or skip; last line of a program.
        seconds: duration of the step.
        figures: figures measured before its end.
    """

    name: str
    outcome: str
    said: str = ""
    seconds: float = 0.0
    figures: Sequence[Figure] = field(default=())

    @property
    def is_failed(self) -> bool:
        """True if the step makes the run fail."""
        return self.outcome in {"failed", "timed out"}


def speed(name: str, pairs: Sequence[Pair], size_bytes: int, goal: float | None = None) -> Figure:
    """Return the speed of a path that moved ``size_bytes`` in each sample, against that of its limit."""
    limits_s, paths_s = map(list, zip(*pairs, strict=True))
    value, limit = (size_bytes / statistics.median(samples_s) / 1e9 for samples_s in (paths_s, limits_s))
    ratio = statistics.median(pair.limit_s / pair.path_s for pair in pairs)
    more = {"samples_s": paths_s, "limit_samples_s": limits_s}
    return Figure(name, value, limit, ratio, GB_PER_S, goal, more=more)


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


def figure_table(ended: Sequence[Ended], title: str) -> Table:
    """Return a table with a line for each figure, and one for each step that failed or has no figures."""
    table = Table("step", "figure", *numbers("limit", "measured", "ratio", "goal"), "verdict", title=title)
    for step in ended:
        for one in step.figures:
            goal = "" if one.goal is None else f"{'<= ' if one.at_most else ''}{one.goal:.2f}"
            limit, value = (f"{x:.2f} {one.unit}" if one.unit else f"{x:g}" for x in (one.limit, one.value))
            table.add_row(step.name, one.figure, limit, value, f"{one.ratio:.2f}", goal, _styled(one.verdict))
        if step.is_failed or not step.figures:
            verdict = "failed" if step.is_failed else "ok" if step.outcome == "done" else step.outcome
            table.add_row(step.name, escape(step.said), "", "", "", "", _styled(verdict))
    return table


def _styled(verdict: str) -> str:
    style = _STYLES.get(verdict)
    return f"[{style}]{verdict}[/]" if style else verdict
