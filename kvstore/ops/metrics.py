"""Metrics: the name, labels and meaning of each, and the plain numbers on their way to a monitoring system.

Nothing here knows Prometheus: a ``Tally`` is three dictionaries of numbers, with keys such as ``hit_tokens|disk``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from typing import Final

from kvstore.index.plans import MissReason, Place

_SEPARATOR = "|"
_TIERS: Final = tuple(place.value for place in Place)
_SLOW_TIERS: Final = (Place.DISK.value, Place.REMOTE.value)
_HINTS: Final = ("demote", "drop", "retain", "prefetch", "pin")
_REQUEST_FIELDS: Final = ("skip_save", "skip_load", "max_save_tokens", "ttl", "tag", *_HINTS)


class MetricKind(Enum):
    """Kinds of metrics."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # the current value
    HISTOGRAM = "histogram"  # seconds


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: name with the unit, without the prefix that a monitoring system adds.
        kind: counter, gauge or histogram.
        meaning: a sentence without its full stop.
        labels: names of its labels.
        values: all combinations of label values, if they are known beforehand; their series start at 0, not absent.
        is_named: the first label is a name in the configuration, and ``values`` are those of the others.
        worst: True to combine several workers' gauges by their maximum instead of their sum.
    """

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    worst: bool = False
    is_named: bool = False

    def known_values(self, names: Iterable[str] = ()) -> tuple[tuple[str, ...], ...]:
        """Return the label values of all series that exist before anything happens, given the names."""
        known = self.values if self.labels else ((),)
        return tuple((name, *rest) for name in names for rest in known) if self.is_named else known

    def key(self, *label_values: str) -> str:
        """Return the key of one time series in a ``Tally``."""
        return _SEPARATOR.join((self.name, *label_values))


def split_key(key: str) -> tuple[Metric, tuple[str, ...]]:
    """Return the metric of a time series, and the values of its labels."""
    name, *values = key.split(_SEPARATOR)
    return METRICS[name], tuple(values)


def _by_quota(name: str, meaning: str, **labels: tuple[str, ...]) -> Metric:
    """Return a counter whose first label is the name of a quota."""
    rest = _combined(labels) if labels else ((),)
    return Metric(name, MetricKind.COUNTER, meaning, ("quota", *labels), rest, is_named=True)


def _counter(name: str, meaning: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, MetricKind.COUNTER, meaning, tuple(labels), _combined(labels))


def _gauge(name: str, meaning: str, *labels: str, worst: bool = False) -> Metric:
    return Metric(name, MetricKind.GAUGE, meaning, labels, worst=worst)


def _histogram(name: str, meaning: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, meaning, tuple(labels), _combined(labels))


def _combined(labels: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(product(*labels.values())) if labels else ()


LOOKUPS = _counter("lookups", "Requests that were looked up, each once, when first scheduled")
ASKED_TOKENS = _counter("asked_tokens", "Their tokens that vLLM's own prefix cache lacked")
HIT_TOKENS = _counter("hit_tokens", "Of these, tokens that were found, by tier", tier=_TIERS)
MISSES = _counter(
    "misses",
    "Requests of which a whole block or more was not found, by reason",
    reason=tuple(reason.value for reason in MissReason),
)
REQUEST_FIELD_ERRORS = _counter(
    "request_field_errors",
    "Requests served without the cache because of a wrong field, by that or the nearest field",
    field=(*_REQUEST_FIELDS, "probe", "handover", "other"),
)
HINTS = _counter(
    "hints",
    "Prompts about which requests gave hints, by result",
    hint=_HINTS,
    result=("done", "partly", "refused"),
)
LOOKUP_TIMEOUTS = _counter("lookup_timeouts", "Lookups that the remote tier did not answer in time")
STORED_CHUNKS = _counter("stored_chunks", "Chunks stored in memory")
REFUSED_CHUNKS = _counter("refused_chunks", "Chunks not stored: no slot was free, or the policy refused them")
FAILED_STORES = _counter("failed_stores", "Chunks that could not be stored, or came from invalid KV")
EVICTED_CHUNKS = _counter("evicted_chunks", "Chunks evicted to make room", tier=("memory", "disk"))
EXPIRED_CHUNKS = _counter("expired_chunks", "Chunks whose time to live ended")
FAILED_LOADS = _counter("failed_loads", "Chunks not loaded as promised; vLLM computed them")
LOST_CHUNKS = _counter("lost_chunks", "Of these, missing or damaged ones, which are forgotten")
WRITES = _counter(
    "writes",
    "Chunks written to a slower tier; dropped ones found its queue or the tier full",
    tier=_SLOW_TIERS,
    result=("done", "failed", "dropped"),
)
PREFETCHED_CHUNKS = _counter("prefetched_chunks", "Chunks brought to memory before a request asked for them")
LOADED_CHUNKS = _counter("loaded_chunks", "Chunks loaded into the paged cache, by tier", tier=_TIERS)
GPU_LOADED_CHUNKS = _counter("gpu_loaded_chunks", "Of these, from the GPU tier")
MOVED_BYTES = _counter(
    "moved_bytes",
    "Bytes between the paged cache and memory, or memory and a slower tier",
    tier=_TIERS,
    direction=("load", "store"),
)
CORRUPT_CHUNKS = _counter("corrupt_chunks", "Chunks whose checksums did not match", tier=_SLOW_TIERS)
MISLABELLED_SLOTS = _counter("mislabelled_slots", "Loads refused because a slot held another chunk")
FAILED_COPIES = _counter("failed_copies", "Chunks not copied: the GPU had no memory left")
READ_TIMEOUTS = _counter("read_timeouts", "Reads given up; their slots stay out of use until they end")
VERIFIED_CHUNKS = _counter(
    "verified_chunks",
    "Chunks computed again and compared with what was stored",
    result=("equal", "mismatch"),
)
VERIFY_DEVIATION = _gauge(
    "verify_deviation",
    "Largest deviation of these, relative to the layer's largest value; else fraction of bytes",
    worst=True,
)
TIER_ERRORS = _counter("tier_errors", "Calls in which a tier failed as a whole, time-outs included", tier=_SLOW_TIERS)
TIER_TIMEOUTS = _counter("tier_timeouts", "Calls that did not end in time", tier=_SLOW_TIERS)
HELD_CHUNKS = _counter("held_chunks", "Chunks whose staging memory late calls may still use")
CLIENT_RESTARTS = _counter("client_restarts", "Processes of the remote tier that were replaced")
TIER_CALL_SECONDS = _histogram(
    "tier_call_seconds", "Time of a call to a slower tier", tier=_SLOW_TIERS, direction=("load", "store")
)
LOAD_SECONDS = _histogram("load_seconds", "Wait of a worker for the loads of one request")
PUSHED_CHUNKS = _counter(
    "pushed_chunks",
    "Chunks handed over to other engines; refused ones found no room, here or there",
    result=("sent", "refused", "failed"),
)
PUSHED_BYTES = _counter("pushed_bytes", "Bytes of the chunks that other engines received")
CHANNEL_BYTES = _counter("channel_bytes", "Bytes that other engines read here through transfer_channel")
PUSH_SECONDS = _histogram("push_seconds", "From the end of a step until the other engine had all of it")
HANDOVER_TIMEOUTS = _counter("handover_timeouts", "Requests that waited in vain for KV")
STORE_SECONDS = _histogram("store_seconds", "Time to gather what one request stores in a step")
BREAKER_STATE = _gauge(
    "breaker_state",
    "Whether a tier is left out: 0 no, 1 yes and being tried, 2 yes",
    "tier",
    worst=True,
)
ENABLED = _gauge("enabled", "0 after the cache was switched off", worst=True)
DRAINING = _gauge("draining", "1 once the engine was told to drain", worst=True)
KNOWN_CHUNKS = _gauge("known_chunks", "Chunks in memory and on disk")
SLOTS = _gauge("slots", "Memory slots, equal in every worker")
USED_SLOTS = _gauge("used_slots", "Slots that hold a chunk or are being filled")
LEASES = _gauge("leases", "Leases that keep chunks from eviction")
RETAINED_CHUNKS = _gauge("retained_chunks", "Chunks that requests keep on disk until a time")
QUOTA_CAPACITY_BYTES = _gauge("quota_capacity_bytes", "Quota of a worker", "quota", "tier")
QUOTA_USED_BYTES = _gauge("quota_used_bytes", "Bytes counted against it", "quota", "tier")
QUOTA_ASKED_TOKENS = _by_quota("quota_asked_tokens", "Asked tokens, by quota")
QUOTA_HIT_TOKENS = _by_quota("quota_hit_tokens", "Of these, found ones")
QUOTA_STORED_CHUNKS = _by_quota("quota_stored_chunks", "Chunks stored")
QUOTA_REFUSED_CHUNKS = _by_quota("quota_refused_chunks", "Chunks that found no room")
QUOTA_EVICTED_CHUNKS = _by_quota("quota_evicted_chunks", "Chunks evicted", tier=("memory", "disk"))
QUEUED_WRITES = _gauge("queued_writes", "Chunks waiting to be written, or being written", "tier")
DISK_USED_BYTES = _gauge("disk_used_bytes", "Bytes on disk, of all workers, spare files included")
DISK_CAPACITY_BYTES = _gauge("disk_capacity_bytes", "Bytes that they may fill")

METRICS: Final = {value.name: value for value in tuple(globals().values()) if isinstance(value, Metric)}
"""All metrics by name, in the order of their display."""

MAX_SAMPLES: Final = 4096
"""The most times that one series of a ``Tally`` holds; further ones are dropped, in case the tally is never taken."""


@dataclass
class Tally:
    """Counts, times and gauges since the last tally was taken. Not thread-safe.

    Attributes:
        counters: increments, by time series.
        samples: times in seconds, by time series.
        gauges: values by time series and source; of each source, the last value counts.
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
        """Add another rank's tally, or a later one."""
        for key, number in later.counters.items():
            self.count(key, number)
        for key, times_s in later.samples.items():
            self.observe(key, times_s)
        for key, by_source in later.gauges.items():
            self.gauges.setdefault(key, {}).update(by_source)

    def levels(self) -> dict[str, float]:
        """Return the gauges, with one value for all sources."""
        return {
            key: max(by_source.values()) if split_key(key)[0].worst else math.fsum(by_source.values())
            for key, by_source in self.gauges.items()
        }


class Meter:
    """Turns growing totals into increments since the last call, and passes on only the gauges that changed.

    Args:
        source: name of the source of the gauges.
    """

    def __init__(self, source: str = "") -> None:
        self._source = source
        self._last: dict[str, float] = {}
        self._levels: dict[str, float] = {}

    def advance(self, totals: Mapping[str, float], tally: Tally) -> None:
        """Count the increments since the last call."""
        for key, total in totals.items():
            last = self._last.get(key, 0)
            if total > last:  # the difference of two totals, which are read one after the other, may shrink briefly
                tally.count(key, total - last)
                self._last[key] = total

    def show(self, levels: Mapping[str, float], tally: Tally) -> None:
        """Set the gauges that differ from the last call's."""
        for key, value in levels.items():
            if self._levels.get(key) != value:
                self._levels[key] = value
                tally.show(key, value, self._source)


class Totals:
    """Sums of all tallies since the start, for display. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = Tally()
        self._times: dict[str, tuple[int, float, float]] = {}  # number, sum, longest

    def add(self, tally: Tally) -> None:
        """Add a tally."""
        with self._lock:
            self._sums.add(Tally(tally.counters, {}, tally.gauges))
            for key, times_s in tally.samples.items():
                number, total_s, max_s = self._times.get(key, (0, 0.0, 0.0))
                self._times[key] = (number + len(times_s), total_s + sum(times_s), max(max_s, *times_s))

    def __getitem__(self, key: str) -> float:
        return self._sums.counters.get(key, 0)

    def levels(self) -> dict[str, float]:
        """Return the gauges as last seen, with one value for all sources."""
        with self._lock:
            return self._sums.levels()

    def as_tree(self) -> dict[str, object]:
        """Return all metrics by name, those with labels as mappings: ``{"hit_tokens": {"disk": 512}}``."""
        tree: dict[str, object] = {}
        for metric in METRICS.values():
            if metric.kind is MetricKind.COUNTER:
                tree.update({metric.name: {}} if metric.labels else {})
                for values in metric.known_values():
                    _hang(tree, metric, values, self[metric.key(*values)])
        with self._lock:
            times, counters = dict(self._times), dict(self._sums.counters)
        for key, value in (*counters.items(), *self.levels().items()):
            _hang(tree, *split_key(key), value)
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
