"""Samples of what a cache server, an engine or a proxy counts, and the rates between them, for ``kvstore top``.

All of them are series under the names of their ``/metrics`` pages, whatever way they came.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

_SERVER: Final = "kvstore_server_"
_ENGINE: Final = "vllm:kvstore_"
_PROXY: Final = "kvstore_proxy_"
_TTFT: Final = "vllm:time_to_first_token_seconds_"
_PREFIXES: Final = (_ENGINE, _SERVER, _PROXY, _TTFT)
_GROWING: Final = ("_total", "_count", "_sum")
_LEFT_OUT: Final = ("_created", "_bucket")
_SERVER_LEVELS: Final = ("clients", "leases", "leased_bytes")
_SPACE_LEVELS: Final = ("chunks", "used_bytes", "clients")
_ROUNDED_S: Final = 0.1  # ages have one decimal
_MAX_SPACES: Final = 256
_MAX_SHOWN: Final = 20  # namespaces


class Series(NamedTuple):
    """Name and labels of a time series."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, name: str, labels: Mapping[str, object]) -> Series:
        """Return the series with these labels, of which empty ones count as missing."""
        return cls(name, tuple(sorted((label, str(text)) for label, text in labels.items() if text)))

    @property
    def grows(self) -> bool:
        """True for counters, whose differences make a rate."""
        return self.name.endswith(_GROWING)

    def has(self, labels: Mapping[str, str]) -> bool:
        """Tell if it has these labels; an empty one must be missing."""
        own = dict(self.labels)
        return all(own.get(label, "") == text for label, text in labels.items())


@dataclass(frozen=True)
class Sample:
    """The values of all series at one time.

    Attributes:
        at_s: time on a clock that only goes on.
        values: by series.
        about: version and status, as far as they are known.
        uptime_s: age of the process; None if it does not tell.
        asked_s: time of the question, when the process had at most that age.
    """

    at_s: float
    values: Mapping[Series, float]
    about: str = ""
    uptime_s: float | None = None
    asked_s: float = 0.0

    @classmethod
    def of_page(cls, at_s: float, samples: Iterable[tuple[str, Mapping[str, str], float]]) -> Sample:
        """Return what a ``/metrics`` page says of us."""
        values = Counter[Series]()
        for name, labels, value in samples:
            if name.startswith(_PREFIXES) and not name.endswith(_LEFT_OUT) and math.isfinite(value):
                values[Series.of(name, labels)] += value  # type: ignore[assignment] # a fraction
        return cls(at_s, values)

    @classmethod
    def of_stats(cls, asked_s: float, at_s: float, tree: Mapping[str, Any]) -> Sample:
        """Return what a cache server's report for operators says, which may be one of another version."""
        values = Counter[Series]()
        for name, labels, value in _reported(tree):
            if isinstance(value, int | float) and math.isfinite(value):
                values[Series.of(f"{_SERVER}{name}", labels)] += value  # type: ignore[assignment] # a fraction
        values[Series(f"{_SERVER}draining")] = int(tree.get("status") == "closing")
        about = f"kvstore {tree.get('version', '?')}, {tree.get('status', '?')}"
        uptime_s = tree.get("uptime_s")
        return cls(at_s, values, about, float(uptime_s) if isinstance(uptime_s, int | float) else None, asked_s)

    @cached_property
    def _by_name(self) -> dict[str, list[Series]]:
        found: dict[str, list[Series]] = {}
        for series in self.values:
            found.setdefault(series.name, []).append(series)
        return found

    def series(self, name: str, labels: Mapping[str, str]) -> Iterator[Series]:
        """Yield the series of a metric with these labels."""
        return (series for series in self._by_name.get(name, ()) if series.has(labels))

    def has(self, name: str) -> bool:
        """Tell if there is a series of this metric."""
        return name in self._by_name

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all series of a metric with these labels."""
        return sum(self.values[series] for series in self.series(name, labels))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a metric by labels, in the order of their series."""
        sums: dict[tuple[str, ...], float] = {}
        for series in self._by_name.get(name, ()):
            given = dict(series.labels)
            key = tuple(given.get(label, "") for label in labels)
            sums[key] = sums.get(key, 0) + self.values[series]
        return sums


def _reported(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, object], Any]]:
    """Yield name, labels and value of all that a report contains; a client with a tenant gets less."""
    for name in _SERVER_LEVELS:
        yield name, {}, tree.get(name)
    for name in ("malformed", "refused", "disk_errors"):
        yield f"{name}_total", {}, tree.get(name)
    for tier, numbers in tree.get("tiers", {}).items():
        for name, value in numbers.items():
            yield f"tier_{name}", {"tier": tier}, value
    for quota in tree.get("quotas", ()):
        for name in ("used_bytes", "capacity_bytes"):
            yield f"quota_{name}", {"tenant": quota["tenant"], "quota": quota["name"]}, quota[name]
    for denied in tree.get("denied", ()):
        yield "denied_total", {"client": denied["client"], "lacked": denied["lacked"]}, denied["count"]
    for space in tree.get("namespaces", ())[:_MAX_SPACES]:
        labels = {"namespace": space["id"], "model": space["fields"].get("model", ""), "tenant": space["tenant"]}
        for name in _SPACE_LEVELS:
            yield f"namespace_{name}", labels, space[name]
        for name, value in space["counters"].items():
            yield f"{name}_total", labels, value


@dataclass
class Course:
    """The latest samples of one target, with its restarts and gaps.

    Attributes:
        now: the latest sample; None before the first.
        before: the one to compare with; None if there is none, or the process was restarted since.
        restarts: restarts that were seen.
        gap_s: time without an answer, which lasts or has just ended.
        error: the reason why there is no answer at present; empty if there is one.
    """

    now: Sample | None = None
    before: Sample | None = None
    restarts: int = 0
    gap_s: float = 0.0
    error: str = ""

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        last, had_gap = self.now, bool(self.error)
        has_restarted = last is not None and _is_restart(last, sample)
        self.now, self.before = sample, None if has_restarted else last
        self.restarts += has_restarted
        self.gap_s = sample.at_s - last.at_s if last is not None and had_gap else 0.0
        self.error = ""

    def miss(self, at_s: float, error: str) -> None:
        """Note that there was no answer."""
        self.error = error
        self.gap_s = at_s - self.now.at_s if self.now is not None else 0.0

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the growth of a counter in each second; None if there is nothing to compare with.

        A series that is new does not count: of a cache server's namespaces only the largest are listed.
        """
        if self.now is None or self.before is None or self.error:
            return None
        seconds = self.now.at_s - self.before.at_s
        if seconds <= 0:
            return None
        now, then = self.now.values, self.before.values
        known = (series for series in self.now.series(name, labels) if series in then)
        return sum(max(now[series] - then[series], 0.0) for series in known) / seconds


def _is_restart(before: Sample, now: Sample) -> bool:
    """Tell if the process is another one.

    Without a report of its age: if no counter that had grown has kept its value. One alone may fall, because a cache
    server forgets namespaces.
    """
    if before.uptime_s is not None and now.uptime_s is not None:
        return now.asked_s - now.uptime_s > before.at_s - before.uptime_s + _ROUNDED_S
    grown = [(series, value) for series, value in before.values.items() if series.grows and value > 0]
    return bool(grown) and all(now.values.get(series, 0.0) < value for series, value in grown)


class Flow(NamedTuple):
    """A counter that is shown as a rate: by the values of some labels, or as a sum."""

    label: str
    name: str
    unit: str
    by: tuple[str, ...] = ()


class Kind(NamedTuple):
    """Kind of a process that is watched.

    Attributes:
        name: for people.
        mark: a metric that only such a process has.
        found: counter of what was found.
        asked: counters that add up to what was looked up.
        unit: of both.
        flows: counters to show with their rates.
        failures: the same, shown only if they are not 0.
        tiers: by name: metrics of the used and the whole room, and their unit.
        states: gauges to show as they are.
        draining: gauge that is 1 once it was told to drain.
    """

    name: str
    mark: str
    found: str = ""
    asked: tuple[str, ...] = ()
    unit: str = ""
    flows: tuple[Flow, ...] = ()
    failures: tuple[Flow, ...] = ()
    tiers: Mapping[str, tuple[str, str, str]] = {}
    states: tuple[Flow, ...] = ()
    draining: str = ""


KINDS: Final = (
    Kind(
        "cache server",
        f"{_SERVER}clients",
        f"{_SERVER}found_chunks_total",
        (f"{_SERVER}found_chunks_total", f"{_SERVER}missing_chunks_total"),
        "chunks",
        (
            Flow("read", f"{_SERVER}read_bytes_total", "bytes"),
            Flow("stored", f"{_SERVER}stored_bytes_total", "bytes"),
            Flow("read", f"{_SERVER}read_chunks_total", "chunks"),
            Flow("stored", f"{_SERVER}stored_chunks_total", "chunks"),
            Flow("from disk", f"{_SERVER}loaded_chunks_total", "chunks"),
            Flow("evicted", f"{_SERVER}evicted_chunks_total", "chunks"),
            Flow("expired", f"{_SERVER}expired_chunks_total", "chunks"),
        ),
        (
            Flow("no room", f"{_SERVER}full_total", ""),
            Flow("failed", f"{_SERVER}failed_total", ""),
            Flow("disk errors", f"{_SERVER}disk_errors_total", ""),
            Flow("keys not listed", f"{_SERVER}refused_total", ""),
            Flow("malformed", f"{_SERVER}malformed_total", ""),
            Flow("denied", f"{_SERVER}denied_total", "", ("client", "lacked")),
        ),
        states=(Flow("clients", f"{_SERVER}clients", ""), Flow("leases", f"{_SERVER}leases", "")),
        draining=f"{_SERVER}draining",
    ),
    Kind(
        "engine",
        f"{_ENGINE}lookups_total",
        f"{_ENGINE}hit_tokens_total",
        (f"{_ENGINE}asked_tokens_total",),
        "tokens",
        (
            Flow("found in", f"{_ENGINE}hit_tokens_total", "tokens", ("tier",)),
            Flow("asked for", f"{_ENGINE}asked_tokens_total", "tokens"),
            Flow("moved", f"{_ENGINE}moved_bytes_total", "bytes", ("tier", "direction")),
            Flow("stored", f"{_ENGINE}stored_chunks_total", "chunks"),
            Flow("evicted from", f"{_ENGINE}evicted_chunks_total", "chunks", ("tier",)),
        ),
        (
            Flow("loads", f"{_ENGINE}failed_loads_total", ""),
            Flow("lost", f"{_ENGINE}lost_chunks_total", ""),
            Flow("stores", f"{_ENGINE}failed_stores_total", ""),
            Flow("corrupt", f"{_ENGINE}corrupt_chunks_total", "", ("tier",)),
            Flow("tier errors", f"{_ENGINE}tier_errors_total", "", ("tier",)),
            Flow("late reads", f"{_ENGINE}read_timeouts_total", ""),
            Flow("late lookups", f"{_ENGINE}lookup_timeouts_total", ""),
            Flow("wrong labels", f"{_ENGINE}mislabelled_slots_total", ""),
            Flow("late hand-overs", f"{_ENGINE}handover_timeouts_total", ""),
        ),
        {
            "memory": (f"{_ENGINE}used_slots", f"{_ENGINE}slots", "slots"),
            "disk": (f"{_ENGINE}disk_used_bytes", f"{_ENGINE}disk_capacity_bytes", "bytes"),
        },
        (
            Flow("tier", f"{_ENGINE}breaker_state", "", ("tier",)),
            Flow("switched on", f"{_ENGINE}enabled", ""),
            Flow("queued writes", f"{_ENGINE}queued_writes", "", ("tier",)),
            Flow("leases", f"{_ENGINE}leases", ""),
        ),
        f"{_ENGINE}draining",
    ),
    Kind(
        "proxy",
        f"{_PROXY}in_flight",
        flows=(
            Flow("requests", f"{_PROXY}requests_total", "", ("path", "status")),
            Flow("first tokens", f"{_PROXY}first_tokens_total", ""),
        ),
        failures=(
            Flow("errors", f"{_PROXY}errors_total", "", ("reason",)),
            Flow("fallbacks", f"{_PROXY}fallbacks_total", "", ("reason",)),
        ),
        states=(
            Flow("in flight", f"{_PROXY}in_flight", ""),
            Flow("engine answers", f"{_PROXY}engine_healthy", "", ("role", "engine")),
        ),
    ),
)


def kind_of(sample: Sample) -> Kind | None:
    """Return the kind of process that a sample is of; None if it is not one of ours."""
    return next((kind for kind in KINDS if sample.has(kind.mark) or _is_report(kind, sample)), None)


def _is_report(kind: Kind, sample: Sample) -> bool:
    return kind is KINDS[0] and bool(sample.about)  # one for a client that may see no more than its own namespaces


def figures(course: Course) -> dict[str, Any]:
    """Return what there is to show of a course, as ``--json`` prints it; empty without a known sample."""
    now = course.now
    kind = kind_of(now) if now is not None else None
    if now is None or kind is None:
        return {}
    return {
        "kind": kind.name,
        "about": now.about,
        "draining": now.total(kind.draining) > 0,
        "uptime_s": now.uptime_s,
        "hit_rate": _hit_rate(course, now, kind),
        "first_token_s": _first_token(course, now),
        "states": {" ".join((flow.label, *key)): value for flow, key, value in _parts(now, kind.states)},
        "tiers": _tiers(now, kind),
        "flows": [
            {
                "label": " ".join((flow.label, *key)),
                "unit": flow.unit,
                "per_s": _rate(course, flow, key),
                "total": value,
            }
            for flow, key, value in _parts(now, kind.flows)
        ],
        "failures": {
            " ".join((flow.label, *key)): {"per_s": _rate(course, flow, key), "total": value}
            for flow, key, value in _parts(now, kind.failures)
        },
        "namespaces": _namespaces(course, now),
        "quotas": _quotas(now),
    }


def _parts(sample: Sample, flows: Iterable[Flow]) -> Iterator[tuple[Flow, tuple[str, ...], float]]:
    for flow in flows:
        for key, value in sample.by(flow.name, *flow.by).items():
            yield flow, key, value


def _rate(course: Course, flow: Flow, key: tuple[str, ...]) -> float | None:
    return course.rate(flow.name, **dict(zip(flow.by, key, strict=True)))


def _hit_rate(course: Course, sample: Sample, kind: Kind, **labels: str) -> dict[str, Any]:
    if not kind.found:
        return {}
    asked = sum(sample.total(name, **labels) for name in kind.asked)
    found_per_s = course.rate(kind.found, **labels)
    rates = [course.rate(name, **labels) for name in kind.asked]
    asked_per_s = sum(rate or 0.0 for rate in rates)
    return {
        "now": found_per_s / asked_per_s if found_per_s is not None and asked_per_s else None,
        "total": sample.total(kind.found, **labels) / asked if asked else None,
        "unit": kind.unit,
    }


def _first_token(course: Course, sample: Sample) -> dict[str, float | None]:
    """Return vLLM's mean time to the first token, now and since its start; empty without vLLM."""
    count = sample.total(f"{_TTFT}count")
    if not count:
        return {}
    count_per_s, sum_per_s = (course.rate(f"{_TTFT}{name}") for name in ("count", "sum"))
    is_known = count_per_s and sum_per_s is not None
    return {
        "now": sum_per_s / count_per_s if is_known and sum_per_s and count_per_s else None,
        "total": sample.total(f"{_TTFT}sum") / count,
    }


def _tiers(sample: Sample, kind: Kind) -> dict[str, dict[str, Any]]:
    capacities = sample.by(f"{_SERVER}tier_capacity_bytes", "tier")
    found = {
        tier: {
            "used": sample.total(f"{_SERVER}tier_used_bytes", tier=tier),
            "capacity": capacity,
            "unit": "bytes",
            "chunks": sample.total(f"{_SERVER}tier_chunks", tier=tier),
        }
        for (tier,), capacity in capacities.items()
    }
    for tier, (used, whole, unit) in kind.tiers.items():
        if sample.total(whole):
            found[tier] = {"used": sample.total(used), "capacity": sample.total(whole), "unit": unit}
    return found


def _namespaces(course: Course, sample: Sample) -> list[dict[str, Any]]:
    """Return the namespaces of a cache server, the largest first."""
    held = sample.by(f"{_SERVER}namespace_used_bytes", "namespace", "model", "tenant")
    server = KINDS[0]
    found = []
    for (namespace, model, tenant), used_bytes in sorted(held.items(), key=lambda item: -item[1])[:_MAX_SHOWN]:
        labels = {"namespace": namespace, "tenant": tenant}
        found.append(
            {
                "namespace": namespace,
                "model": model,
                "tenant": tenant,
                "used_bytes": used_bytes,
                "chunks": sample.total(f"{_SERVER}namespace_chunks", **labels),
                "clients": sample.total(f"{_SERVER}namespace_clients", **labels),
                "hit_rate": _hit_rate(course, sample, server, **labels),
            }
        )
    return found


def _quotas(sample: Sample) -> list[dict[str, Any]]:
    """Return the quotas, the fullest first, because there may be hundreds."""
    capacities = sample.by(f"{_SERVER}quota_capacity_bytes", "tenant", "quota")
    used = sample.by(f"{_SERVER}quota_used_bytes", "tenant", "quota")
    fullest = sorted(capacities, key=lambda key: used.get(key, 0.0) / max(capacities[key], 1.0), reverse=True)
    return [
        {"tenant": key[0], "quota": key[1], "used_bytes": used.get(key, 0.0), "capacity_bytes": capacities[key]}
        for key in fullest
    ]
