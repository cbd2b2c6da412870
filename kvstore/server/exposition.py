"""Counters of a server in Prometheus's text format, with a bounded number of series."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

_GAUGES: Final = {
    "clients": "Clients connected.",
    "leases": "Chunks leased to clients.",
    "leased_bytes": "Bytes of memory leased to clients.",
}
_COUNTERS: Final = {
    "malformed": "Clients disconnected for a malformed message.",
    "refused": "Clients refused because their key is not listed.",
    "disk_errors": "Calls of the disk that failed, and damaged chunks.",
}
_MOST_NAMES: Final = 256  # namespaces with series of their own
_NAMES_AN_HOUR: Final = 512  # new ones
_HOUR_S: Final = 3600.0
_MOST_CHARACTERS: Final = 128  # of a name that a client gave

Values = list[tuple[dict[str, str], float]]


class _Names:
    """Namespaces with series of their own. Clients name them, so only so many, and so many new ones, get any."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._known: set[str] = set()
        self._added_s: deque[float] = deque(maxlen=_NAMES_AN_HOUR)

    def admit(self, present: Mapping[str, None]) -> set[str]:
        """Return those of the namespaces present, those that hold most first, that get series of their own."""
        self._known &= present.keys()
        for name in present:
            if name not in self._known and len(self._known) < _MOST_NAMES and self._may_add():
                self._known.add(name)
                self._added_s.append(self._now())
        return self._known

    def _may_add(self) -> bool:
        return len(self._added_s) < _NAMES_AN_HOUR or self._now() - self._added_s[0] > _HOUR_S


class _Label(NamedTuple):
    namespace: str
    model: str
    tenant: str


class Exposition:
    """Makes the page of a server's metrics, from what ``stats`` reports. Not thread-safe.

    Args:
        now: the monotonic time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._names = _Names(now)

    def page(self, tree: Mapping[str, Any], reloads: Mapping[str, int] | None = None) -> str:
        """Return the page.

        Args:
            tree: the report of the server.
            reloads: number of times that the configuration was read again, by result.
        """
        return "\n".join([*self._server(tree, reloads or {}), *self._namespaces(tree["namespaces"])]) + "\n"

    def _server(self, tree: Mapping[str, Any], reloads: Mapping[str, int]) -> Iterator[str]:
        ready: Values = [({}, float(tree["status"] == "ok"))]
        yield from _metric("ready", "gauge", "1 while it takes new clients and chunks.", ready)
        draining: Values = [({}, float(tree["status"] == "closing"))]
        yield from _metric("draining", "gauge", "1 once it was told to drain or to end.", draining)
        for name, meaning in _GAUGES.items():
            yield from _metric(name, "gauge", meaning, [({}, tree[name])])
        pinned: Values = [({}, tree["tiers"]["memory"]["pinned_bytes"])]
        yield from _metric("pinned_bytes", "gauge", "Bytes of memory that operators keep from eviction.", pinned)
        for name, meaning in _COUNTERS.items():
            yield from _metric(f"{name}_total", "counter", meaning, [({}, tree[name])])
        yield from _histogram("turn_seconds", "Time of a pass of the thread that decides.", tree["passes"])
        for what in ("capacity_bytes", "used_bytes", "chunks"):
            values: Values = [({"tier": tier}, numbers[what]) for tier, numbers in tree["tiers"].items()]
            yield from _metric(f"tier_{what}", "gauge", f"Of each tier: {what}.", values)
        denied: Values = [({"client": of["client"], "lacked": of["lacked"]}, of["count"]) for of in tree["denied"]]
        yield from _metric("denied_total", "counter", "Requests without the right or the room.", denied)
        for what in ("capacity_bytes", "used_bytes"):
            values = [({"tenant": of["tenant"], "quota": of["name"]}, of[what]) for of in tree["quotas"]]
            yield from _metric(f"quota_{what}", "gauge", f"Of each quota: {what}.", values)
        read: Values = [({"outcome": outcome}, count) for outcome, count in reloads.items()]
        yield from _metric("reloads_total", "counter", "Readings of the configuration while it ran.", read)

    def _namespaces(self, spaces: list[Mapping[str, Any]]) -> Iterator[str]:
        named = self._names.admit(dict.fromkeys(space["id"] for space in spaces))
        for what in ("chunks", "used_bytes", "clients"):
            values = _by_namespace({_label(space, named): space[what]} for space in spaces)
            yield from _metric(f"namespace_{what}", "gauge", f"Of each namespace: {what}.", values)
        own = [space for space in spaces if space["id"] in named]  # a sum of others could fall, as no counter may
        for what in own[0]["counters"] if own else ():
            values = _by_namespace({_label(space, named): space["counters"][what]} for space in own)
            yield from _metric(f"{what}_total", "counter", f"Since the start: {what}.", values)


def _label(space: Mapping[str, Any], named: set[str]) -> _Label:
    if space["id"] not in named:
        return _Label("other", "", "")
    return _Label(space["id"], str(space["fields"].get("model", ""))[:_MOST_CHARACTERS], space["tenant"])


def _by_namespace(values: Iterator[dict[_Label, int]]) -> Values:
    """Sum values by namespace, because one may have several geometries, and a series must not appear twice."""
    totals = Counter[_Label]()
    for value in values:
        totals.update(value)
    return [
        ({"namespace": of.namespace, "model": of.model, **({"tenant": of.tenant} if of.tenant else {})}, total)
        for of, total in totals.items()
    ]


def _histogram(name: str, meaning: str, tree: Mapping[str, Any]) -> Iterator[str]:
    full = f"kvstore_server_{name}"
    yield f"# HELP {full} {meaning}"
    yield f"# TYPE {full} histogram"
    for bound, count in {**tree["up_to_s"], "+Inf": tree["count"]}.items():
        yield f'{full}_bucket{{le="{bound}"}} {count}'
    yield f"{full}_sum {tree['sum_s']}"
    yield f"{full}_count {tree['count']}"


def _metric(name: str, kind: str, meaning: str, values: Values) -> Iterator[str]:
    full = f"kvstore_server_{name}"
    yield f"# HELP {full} {meaning}"
    yield f"# TYPE {full} {kind}"
    for labels, value in values:
        inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{full}{{{inner}}} {value}" if inner else f"{full} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
