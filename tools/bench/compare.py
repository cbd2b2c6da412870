"""``kvstore bench --compare``: the fractions of an older run next to those of this one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tools.bench.lines import BenchReport

NOISE = 0.10  # fractions of an unchanged tree vary by as much


@dataclass(frozen=True)
class Change:
    """One path then and now, as fractions of its limit; None where it was not measured."""

    name: str
    then: float | None
    now: float | None

    @property
    def share(self) -> float | None:
        """The change, relative to then."""
        return None if self.then is None or self.now is None or not self.then else self.now / self.then - 1

    @property
    def is_loss(self) -> bool:
        """Whether it is slower by more than noise."""
        return self.share is not None and self.share < -NOISE

    @property
    def is_gain(self) -> bool:
        """Whether it is faster by more than noise."""
        return self.share is not None and self.share > NOISE


def read_fractions(file: Path, geometry: str) -> dict[str, float]:
    """The fractions in a file that ``kvstore bench --json`` wrote.

    Raises:
        ConfigError: it is no such file, or of another geometry.
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
    """Every path of both runs, those of this run first."""
    now = {line.subject.name: line.fraction for line in report.lines}
    return [Change(name, old.get(name), now.get(name)) for name in now | old]
