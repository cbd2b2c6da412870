"""What the server holds and did, as one tree of numbers, and for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from heapq import nlargest
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final

import kvstore
from kvstore.protocol.messages import fields_bytes
from kvstore.server.pool import Pool
from kvstore.server.service import Service
from kvstore.server.sessions import Sessions
from kvstore.server.shelves import Shelves
from kvstore.server.spaces import NO_QUOTA, Space
from kvstore.server.stock import Stock

_MAX_SPACES: Final = 256
_MAX_FIELDS_BYTES: Final = 256 << 10  # of all of them


class Reporter:
    """Reads everything that can be counted. Belongs to the thread that decides."""

    def __init__(self, pool: Pool, stock: Stock, sessions: Sessions, shelves: Shelves | None, service: Service) -> None:
        self._pool = pool
        self._stock = stock
        self._sessions = sessions
        self._shelves = shelves
        self._service = service
        self._began_s = time.monotonic()

    def tree(self) -> dict[str, Any]:
        """Everything: the server, its tiers, and each namespace."""
        return {
            "version": kvstore.__version__,
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            "status": "closing" if self._service.is_closing else "ok",
            "clients": len(self._sessions.by_peer),
            "leases": self._sessions.num_leases,
            "leased_bytes": self._sessions.leased_bytes,
            "tiers": self._tiers(),
            **self._spaces(),
        }

    def _spaces(self) -> dict[str, Any]:
        """Those that hold most, and how many others there are: a report must not keep clients waiting."""
        spaces = nlargest(_MAX_SPACES, self._stock.spaces.values(), key=attrgetter("used_bytes"))
        sizes = accumulate(fields_bytes(dict(space.namespace.fields)) for space in spaces)
        listed = [self._space(space) for space, size in zip(spaces, sizes, strict=True) if size <= _MAX_FIELDS_BYTES]
        return {"namespaces": listed, "namespaces_left_out": len(self._stock.spaces) - len(listed)}

    def _tiers(self) -> dict[str, Any]:
        tiers: dict[str, Any] = {
            "memory": {
                "capacity_bytes": self._pool.num_bytes,
                "used_bytes": self._pool.used_bytes,
                "chunks": self._stock.num_in_memory,
                "pinned_bytes": self._stock.pinned_bytes,
            }
        }
        if self._shelves is not None:
            tiers["disk"] = {
                "capacity_bytes": self._shelves.capacity_bytes,
                "used_bytes": self._shelves.used_bytes,
                "chunks": self._stock.num_on_disk,
                "unwritten": self._service.num_unwritten,
            }
        return tiers

    @staticmethod
    def _space(space: Space) -> dict[str, Any]:
        layout = space.layout
        return {
            "id": space.id.hex(),
            "fields": dict(space.namespace.fields),
            "chunk_tokens": layout.chunk_tokens,
            "block_tokens": layout.block_tokens,
            "chunks": len(space.chunks),
            "used_bytes": space.used_bytes,
            "quota_bytes": None if space.quota_bytes == NO_QUOTA else space.quota_bytes,
            "clients": space.num_sessions,
            "counters": asdict(space.counters),
        }


_GAUGES = {"clients": "Clients connected.", "leases": "Places of the pool in use by clients."}
_COUNTERS = {"malformed": "Messages that cost their sender the connection.", "refused": "Clients not on the list."}


def exposition(tree: Mapping[str, Any]) -> str:
    """The tree in Prometheus's text format."""
    lines: list[str] = []
    for name, meaning in _GAUGES.items():
        lines += _metric(f"kvstore_server_{name}", "gauge", meaning, [({}, tree[name])])
    for name, meaning in _COUNTERS.items():
        lines += _metric(f"kvstore_server_{name}_total", "counter", meaning, [({}, tree[name])])
    for what in ("capacity_bytes", "used_bytes", "chunks"):
        values = [({"tier": tier}, numbers[what]) for tier, numbers in tree["tiers"].items()]
        lines += _metric(f"kvstore_server_tier_{what}", "gauge", f"Of each tier: {what}.", values)
    spaces = tree["namespaces"]
    for what in ("chunks", "used_bytes", "clients"):
        values = [(_labels(space), space[what]) for space in spaces]
        lines += _metric(f"kvstore_server_namespace_{what}", "gauge", f"Of each namespace: {what}.", values)
    for what in spaces[0]["counters"] if spaces else ():
        values = [(_labels(space), space["counters"][what]) for space in spaces]
        lines += _metric(f"kvstore_server_{what}_total", "counter", f"Since the start: {what}.", values)
    return "\n".join(lines) + "\n"


def _labels(space: Mapping[str, Any]) -> dict[str, str]:
    return {"namespace": space["id"], "model": str(space["fields"].get("model", ""))}


def _metric(name: str, kind: str, meaning: str, values: list[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inner}}} {value}" if inner else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
