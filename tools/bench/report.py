"""Report of a run, its tables, and the comparison with an older one for ``kvstore bench --compare``."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.table import Table

from kvstore.model.errors import ConfigError
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.lines import Line
from kvstore.tools.bench.load import Load
from kvstore.tools.console import numbers

NOISE = 0.10  # fractions of an unchanged tree vary this much
_STYLES = {"ok": "green", "below goal": "yellow"}


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

    @property
    def failure_style(self) -> str:
        """Style of a line below its floor, which is milder if other processes kept the machine busy."""
        return "yellow" if self.load.is_busy else "red"

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


class Change(NamedTuple):
    """Fractions of one path's limit in the older run and in this one; None where it was not measured."""

    name: str
    then: float | None
    now: float | None

    @property
    def share(self) -> float | None:
        """Change relative to the older run; None if either fraction is missing or the older one is 0."""
        return None if self.then is None or self.now is None or not self.then else self.now / self.then - 1

    @property
    def is_loss(self) -> bool:
        """True if the path is slower by more than noise."""
        return self.share is not None and self.share < -NOISE

    @property
    def is_gain(self) -> bool:
        """True if the path is faster by more than noise."""
        return self.share is not None and self.share > NOISE


def read_fractions(file: Path, geometry: str) -> dict[str, float]:
    """Return the fractions in a file that ``kvstore bench --json`` wrote.

    Raises:
        ConfigError: the file has another format, or was measured with another geometry.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        found = report["geometry"]["name"]
        fractions = {str(line["name"]): float(line["fraction"]) for line in report["lines"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not what kvstore bench --json writes: {error!r}") from error
    if found != geometry:
        raise ConfigError(f"{file} is of geometry {found}, and this run of {geometry}: they cannot be compared")
    return fractions


def compare(old: dict[str, float], report: BenchReport) -> list[Change]:
    """Return a change for every path of either run, those of this run first."""
    now = {line.subject.name: line.fraction for line in report.lines}
    return [Change(name, old.get(name), now.get(name)) for name in now | old]


def bench_table(report: BenchReport) -> Table:
    """Return a table of the speed, fraction of the limit and p99 of every path."""
    chunks = report.batch_bytes // report.geometry.chunk_bytes
    figures = numbers("path's speed", "limit's speed", "fraction", "goal", "floor", "p99 of a call")
    title = (
        f"kvstore bench, {report.geometry.name}: {chunks} chunks of "
        f"{report.geometry.chunk_bytes / (1 << 20):.0f} MiB a call, medians of {report.rounds} rounds"
    )
    table = Table("path", "limit", *figures, "verdict", title=title)
    for line in report.lines:
        speeds = (_speed(line, line.path_s), _speed(line, line.limit_s))
        fractions = (f"{share:.2f}" for share in (line.fraction, *line.bound))
        style = report.failure_style if line.failed else _STYLES[line.verdict]
        verdict = f"[{style}]{line.verdict}[/]"
        table.add_row(*line.subject[:2], *speeds, *fractions, _sample(line, line.p99_s), verdict)
    table.caption = f"machine: {report.load}"
    if report.skipped:
        table.caption += "\nnot measured: " + "; ".join(report.skipped)
    return table


def timed_table(report: BenchReport) -> Table:
    """Return a table of the steps in the timed part of every path."""
    table = Table(title="what is timed; every byte moved is compared outside of it", show_header=False)
    for line in report.lines:
        table.add_row(line.subject.name, line.subject.includes)
    return table


def change_table(changes: Iterable[Change], old_name: str) -> Table:
    """Return a table of the fractions of an older run and of this one."""
    table = Table("path", *numbers("then", "now", "change"), title=f"fractions, compared with {old_name}")
    for change in changes:
        style = "red" if change.is_loss else "green" if change.is_gain else "dim"
        fractions = ("" if fraction is None else f"{fraction:.2f}" for fraction in (change.then, change.now))
        table.add_row(change.name, *fractions, "" if change.share is None else f"[{style}]{change.share:+.0%}[/]")
    return table


def failure(line: Line) -> str:
    """Return a message about a line below its floor."""
    name, limit = line.subject[:2]
    return f"{name}: {line.fraction:.2f} of {limit} is below the floor of {line.bound.floor:.2f}"


def _speed(line: Line, sample: float) -> str:
    return f"{line.size_bytes / sample / 1e9:.2f} GB/s" if line.size_bytes else _sample(line, sample)


def _sample(line: Line, sample: float) -> str:
    if line.subject.unit == "bytes":
        return f"{sample:,.0f} B"
    return f"{sample * 1e6:.0f} us" if sample < 1e-3 else f"{sample * 1e3:.1f} ms"
