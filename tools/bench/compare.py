"""Comparison for ``kvstore bench --compare``: the fractions of an older run next to those of this one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tools.bench.lines import BenchReport

NOISE = 0.10  # fractions of an unchanged tree vary this much


@dataclass(frozen=True)
class Change:
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
