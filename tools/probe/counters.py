"""Readings of a vLLM's ``/metrics`` before and after two requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import httpx

from kvstore.tools.vllmclient import samples_of

PREFIX = "vllm:kvstore_"


@dataclass(frozen=True)
class Counters:
    """Samples of one reading, summed over all engines.

    Attributes:
        values: sums by name and by the value of the label ``tier`` or ``reason``, empty without such a label; a
            direction follows the tier, as in ``disk|load``.
        num_engines: number of engines with kvstore's metrics.
    """

    values: Mapping[tuple[str, str], float]
    num_engines: int

    @property
    def has_any(self) -> bool:
        """True if vLLM exports its own counters."""
        return any(name.startswith("vllm:prompt_tokens") for name, _ in self.values)

    @property
    def has_store(self) -> bool:
        """True if vLLM runs with kvstore."""
        return any(name.startswith(PREFIX) for name, _ in self.values)

    def __getitem__(self, name: str) -> float:
        """Return the sum of one of kvstore's metrics over all its labels."""
        return sum(value for (found, _), value in self.values.items() if found == PREFIX + name)

    def by_label(self, name: str) -> dict[str, float]:
        """Return one of kvstore's metrics by the value of its label."""
        return {label: value for (found, label), value in self.values.items() if found == PREFIX + name}

    @property
    def settled_chunks(self) -> float:
        """Chunks with a known outcome: stored, refused or failed."""
        return sum(self[f"{name}_total"] for name in ("stored_chunks", "refused_chunks", "failed_stores"))


def read_counters(client: httpx.Client) -> Counters | None:
    """Read the counters; return None if the server has no ``/metrics``.

    Raises:
        httpx.HTTPError: the server does not answer.
        ValueError: the answer is not in the format of metrics.
    """
    answer = client.get("/metrics")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    values: defaultdict[tuple[str, str], float] = defaultdict(float)
    engines = set()
    for sample in samples_of(answer):
        labels = (sample.labels.get("tier") or sample.labels.get("reason"), sample.labels.get("direction"))
        values[sample.name, "|".join(filter(None, labels))] += sample.value
        if sample.name.startswith(PREFIX):
            engines.add(sample.labels.get("engine"))
    return Counters(values, len(engines))


@dataclass(frozen=True)
class Seen:
    """Readings before the first request, between the two, and after the second."""

    before: Counters
    between: Counters
    after: Counters

    @classmethod
    def of(cls, *readings: Counters | None) -> Self | None:
        """Return the three readings; None if the server exports no metrics."""
        found = [reading for reading in readings if reading is not None]
        return cls(*found) if len(found) == len(readings) else None

    @property
    def tiers(self) -> dict[str, int]:
        """Tokens found for the second request, by tier, without tiers that found none."""
        return grown_by_label(self.between.by_label("hit_tokens_total"), self.after.by_label("hit_tokens_total"))

    @property
    def reasons(self) -> dict[str, int]:
        """Reasons why the second request's match ended, with their counts; several if there were other requests."""
        return grown_by_label(self.between.by_label("misses_total"), self.after.by_label("misses_total"))

    def grown(self, name: str) -> float:
        """Return the growth of one of kvstore's counters from the first reading to the last."""
        return self.after[name] - self.before[name]

    def others(self, own: int) -> bool:
        """Tell if more than ``own`` requests were looked up between the last two readings."""
        return self.after["lookups_total"] - self.between["lookups_total"] > own


def grown_by_label(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Return the growth of a counter by label, without labels that did not grow."""
    grown = {label: int(value - before.get(label, 0)) for label, value in after.items()}
    return {label: number for label, number in grown.items() if number > 0}
