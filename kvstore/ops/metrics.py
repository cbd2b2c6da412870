"""What is counted: every metric's name, labels and meaning, and the plain numbers on their way to whoever shows them.

Nothing here knows Prometheus: a ``Tally`` is three dictionaries of numbers, under keys such as ``hit_tokens|disk``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvstore.catalog.plans import MissReason, Place

_SEPARATOR = "|"
_TIERS: Final = tuple(place.value for place in Place)
_SLOW_TIERS: Final = (Place.DISK.value, Place.REMOTE.value)


class Kind(Enum):
    """How a metric behaves."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # as it is now
    HISTOGRAM = "histogram"  # seconds


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix that a monitoring system wants; units are in it.
        kind: how it behaves.
        meaning: a sentence without its full stop.
        labels: what it is divided by.
        values: the values of each label, where they are known beforehand: these begin at 0 instead of being absent.
        worst: of several workers' gauges the highest counts, and not the sum.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    worst: bool = False

    def key(self, *label_values: str) -> str:
        """The key of one time series in a ``Tally``."""
        return _SEPARATOR.join((self.name, *label_values))


def split_key(key: str) -> tuple[Metric, tuple[str, ...]]:
    """The metric of a time series, and the values of its labels."""
    name, *values = key.split(_SEPARATOR)
    return METRICS[name], tuple(values)


_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_BY_TIER: Final = tuple((tier,) for tier in _TIERS)
_BY_SLOW_TIER: Final = tuple((tier,) for tier in _SLOW_TIERS)

LOOKUPS = Metric("lookups", _COUNTER, "Requests that asked, once each when they are first scheduled")
ASKED_TOKENS = Metric("asked_tokens", _COUNTER, "Tokens that they asked for: what vLLM's own prefix cache lacked")
HIT_TOKENS = Metric(
    "hit_tokens", _COUNTER, "Tokens of these that were found, by the tier they come from", ("tier",), _BY_TIER
)
MISSES = Metric(
    "misses",
    _COUNTER,
    "Requests of which a whole block or more was not found, by the reason",
    ("reason",),
    tuple((reason.value,) for reason in MissReason),
)
LOOKUP_TIMEOUTS = Metric(
    "lookup_timeouts", _COUNTER, "Lookups that the remote tier did not answer in time: they count as not stored there"
)
STORED_CHUNKS = Metric("stored_chunks", _COUNTER, "Chunks stored in memory")
REFUSED_CHUNKS = Metric("refused_chunks", _COUNTER, "Chunks not stored: no slot was free, or the policy refused them")
FAILED_STORES = Metric("failed_stores", _COUNTER, "Chunks that could not be stored, or were computed on garbage")
EVICTED_CHUNKS = Metric(
    "evicted_chunks", _COUNTER, "Chunks that made room for others", ("tier",), (("memory",), ("disk",))
)
EXPIRED_CHUNKS = Metric("expired_chunks", _COUNTER, "Chunks whose time to live was over")
FAILED_LOADS = Metric("failed_loads", _COUNTER, "Chunks that could not be loaded as promised: vLLM computed them")
LOST_CHUNKS = Metric("lost_chunks", _COUNTER, "Chunks of these that were missing or damaged, and are forgotten")
WRITES = Metric(
    "writes",
    _COUNTER,
    "Writes of chunks to a slower tier; dropped ones found its queue or the tier full",
    ("tier", "result"),
    tuple((tier, result) for tier in _SLOW_TIERS for result in ("done", "failed", "dropped")),
)
LOADED_CHUNKS = Metric(
    "loaded_chunks",
    _COUNTER,
    "Chunks brought to the paged cache, by all workers, and the tier they came from",
    ("tier",),
    _BY_TIER,
)
GPU_LOADED_CHUNKS = Metric("gpu_loaded_chunks", _COUNTER, "Chunks of these of which the GPU tier had a copy")
MOVED_BYTES = Metric(
    "moved_bytes",
    _COUNTER,
    "Bytes moved by all workers: between the paged cache and memory, or between memory and a slower tier",
    ("tier", "direction"),
    tuple((tier, direction) for tier in _TIERS for direction in ("load", "store")),
)
CORRUPT_CHUNKS = Metric(
    "corrupt_chunks", _COUNTER, "Chunks whose bytes did not agree with their checksums", ("tier",), _BY_SLOW_TIER
)
MISLABELLED_SLOTS = Metric("mislabelled_slots", _COUNTER, "Loads refused because a slot held another chunk")
READ_TIMEOUTS = Metric("read_timeouts", _COUNTER, "Reads given up, whose slot is out of use until they end")
VERIFIED_CHUNKS = Metric(
    "verified_chunks",
    _COUNTER,
    "Chunks that were computed again, by all workers, and compared with what was stored",
    ("result",),
    (("equal",), ("mismatch",)),
)
VERIFY_DEVIATION = Metric(
    "verify_deviation",
    _GAUGE,
    "The largest deviation seen in these: the largest difference as a part of the layer's largest value, or the part "
    "of the bytes that differ where they are no floats",
    worst=True,
)
TIER_ERRORS = Metric(
    "tier_errors", _COUNTER, "Calls with which a tier failed as a whole, time-outs included", ("tier",), _BY_SLOW_TIER
)
TIER_TIMEOUTS = Metric("tier_timeouts", _COUNTER, "Calls to a tier that did not end in time", ("tier",), _BY_SLOW_TIER)
TIER_CALL_SECONDS = Metric(
    "tier_call_seconds",
    _HISTOGRAM,
    "Time of a call to a slower tier, a chunk each",
    ("tier", "direction"),
    tuple((tier, direction) for tier in _SLOW_TIERS for direction in ("load", "store")),
)
LOAD_SECONDS = Metric("load_seconds", _HISTOGRAM, "Time for which a worker waited for the loads of one request")
PUSHED_CHUNKS = Metric(
    "pushed_chunks",
    _COUNTER,
    "Chunks handed over to other engines, by all workers; refused ones found no room, here or there",
    ("result",),
    (("sent",), ("refused",), ("failed",)),
)
PUSHED_BYTES = Metric("pushed_bytes", _COUNTER, "Bytes of the chunks that other engines have now")
PUSH_SECONDS = Metric(
    "push_seconds", _HISTOGRAM, "Time from the end of a step until another engine had all that it was handed over"
)
HANDOVER_TIMEOUTS = Metric(
    "handover_timeouts", _COUNTER, "Requests that waited in vain for what another engine was to hand over"
)
STORE_SECONDS = Metric(
    "store_seconds", _HISTOGRAM, "Time that a worker took to gather the stores of one request's step"
)
BREAKER_STATE = Metric(
    "breaker_state",
    _GAUGE,
    "Whether a tier is left out: 0 no, 1 yes and being tried, 2 yes; the worst of all workers and folders",
    ("tier",),
    worst=True,
)
ENABLED = Metric("enabled", _GAUGE, "Whether the cache is on: 0 after it was switched off", worst=True)
KNOWN_CHUNKS = Metric("known_chunks", _GAUGE, "Chunks in memory and on disk")
SLOTS = Metric("slots", _GAUGE, "Slots of memory, equal in every worker")
USED_SLOTS = Metric("used_slots", _GAUGE, "Slots that hold a chunk or are being filled")
LEASES = Metric("leases", _GAUGE, "Leases that keep chunks from eviction")
QUEUED_WRITES = Metric("queued_writes", _GAUGE, "Chunks waiting to be written to a tier, or being written", ("tier",))
DISK_USED_BYTES = Metric("disk_used_bytes", _GAUGE, "Bytes on disk, of all workers, spare files included")
DISK_CAPACITY_BYTES = Metric("disk_capacity_bytes", _GAUGE, "Bytes that all workers may fill on disk")

METRICS: Final = {value.name: value for value in tuple(globals().values()) if isinstance(value, Metric)}
"""All metrics by name, in the order in which people read them."""

MAX_SAMPLES: Final = 4096
"""Times that one time series of a ``Tally`` holds; beyond that they are counted no longer, should nobody take them."""


@dataclass
class Tally:
    """What happened since the last one was taken. Not thread-safe.

    Attributes:
        counters: what was added, by time series.
        samples: times in seconds, by time series.
        gauges: values by time series, and by who said so: of one source the last word counts.
    """

    counters: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counters or self.samples or self.gauges)

    def count(self, key: str, number: float = 1) -> None:
        """Add to a counter."""
        if number:
            self.counters[key] = self.counters.get(key, 0) + number

    def observe(self, key: str, times_s: Iterable[float]) -> None:
        """Add times to a histogram."""
        known = self.samples.get(key, [])
        known += times_s
        del known[MAX_SAMPLES:]
        if known:
            self.samples[key] = known

    def show(self, key: str, value: float, source: str = "") -> None:
        """Set a gauge as one source sees it."""
        self.gauges.setdefault(key, {})[source] = value

    def add(self, later: Tally) -> None:
        """Take in another rank's tally, or a later one."""
        for key, number in later.counters.items():
            self.count(key, number)
        for key, times_s in later.samples.items():
            self.observe(key, times_s)
        for key, by_source in later.gauges.items():
            self.gauges.setdefault(key, {}).update(by_source)

    def levels(self) -> dict[str, float]:
        """The gauges, those of all sources folded into one value."""
        return {
            key: max(by_source.values()) if split_key(key)[0].worst else math.fsum(by_source.values())
            for key, by_source in self.gauges.items()
        }


class Meter:
    """Turns totals that only grow into what was added since the last time."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def advance(self, totals: Mapping[str, float], tally: Tally) -> None:
        """Count what came since the last call."""
        for key, total in totals.items():
            last = self._last.get(key, 0)
            if total > last:  # a difference of two totals that are not of one moment may shrink for a while
                tally.count(key, total - last)
                self._last[key] = total


class Totals:
    """Sums of all tallies since the start, for people. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = Tally()
        self._times: dict[str, tuple[int, float, float]] = {}  # number, sum, longest

    def add(self, tally: Tally) -> None:
        """Take in what happened."""
        with self._lock:
            self._sums.add(Tally(tally.counters, {}, tally.gauges))
            for key, times_s in tally.samples.items():
                number, total_s, max_s = self._times.get(key, (0, 0.0, 0.0))
                self._times[key] = (number + len(times_s), total_s + sum(times_s), max(max_s, *times_s))

    def __getitem__(self, key: str) -> float:
        return self._sums.counters.get(key, 0)

    def levels(self) -> dict[str, float]:
        """The gauges as last seen, those of all sources folded."""
        with self._lock:
            return self._sums.levels()

    def as_tree(self) -> dict[str, object]:
        """All metrics by name, those with labels as mappings: ``{"hit_tokens": {"disk": 512}}``."""
        tree: dict[str, object] = {}
        for metric in METRICS.values():
            if metric.kind is Kind.COUNTER:
                for values in metric.values or ((),):
                    _hang(tree, metric, values, self[metric.key(*values)])
        for key, value in self.levels().items():
            _hang(tree, *split_key(key), value)
        with self._lock:
            times = dict(self._times)
        for key, (number, total_s, max_s) in times.items():
            _hang(tree, *split_key(key), {"count": number, "mean_s": total_s / number, "max_s": max_s})
        return tree


def _hang(tree: dict[str, object], metric: Metric, values: tuple[str, ...], leaf: object) -> None:
    path = (metric.name, *values)
    for name in path[:-1]:
        branch = tree.setdefault(name, {})
        assert isinstance(branch, dict)
        tree = branch
    tree[path[-1]] = int(leaf) if isinstance(leaf, float) and leaf.is_integer() else leaf


def metric_table(prefix: str) -> str:
    """All metrics as a Markdown table, under the names that they have with a prefix."""
    rows = [
        f"| `{prefix}{metric.name}` | {metric.kind.value} | {', '.join(f'`{label}`' for label in metric.labels)} "
        f"| {metric.meaning}. |"
        for metric in METRICS.values()
    ]
    return "\n".join(["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows])
