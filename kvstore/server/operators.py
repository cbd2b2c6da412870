"""Operators: their orders, and the reports for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Sequence
from heapq import nlargest
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final

from kvstore.model.chunks import ChunkRef, chunk_of
from kvstore.model.version import __version__
from kvstore.protocol import messages
from kvstore.protocol.messages import Refusal
from kvstore.server.clients import Client
from kvstore.server.core import Core
from kvstore.server.sessions import Session
from kvstore.server.spaces import NO_QUOTA, Chunk, Quota, Space, fields_bytes

_MAX_LISTED: Final = 1024  # groups of pins
_MAX_SPACES: Final = 256
_MAX_SLOWEST: Final = 20
_MAX_FIELDS_BYTES: Final = 256 << 10  # of all namespaces in a report


class Orders:
    """Carries out orders. Belongs to the thread that decides. The caller checks that the sender is an operator.

    The orders of an operator with a tenant reach this tenant's chunks only, as if there were no others.

    Args:
        core: the shared state of the server.
        pin_max_s: longest time for which a chunk may be pinned.
        clear: forgets the chunks of a namespace, and returns their number.
    """

    def __init__(self, core: Core, pin_max_s: float, clear: Callable[[Space], int]) -> None:
        self._core = core
        self._stock = core.stock
        self.pin_max_s = pin_max_s
        self._clear = clear

    def carry_out(self, client: Client, order: messages.Order) -> Generator[None, None, messages.Answer]:
        """Carry out an order of a client, in steps, and report its result."""
        match order:
            case messages.ClearSpaces():
                count = 0
                for cleared in self._spaces(client, order.namespace):
                    count += self._clear(cleared)
                    yield
                return report(order, {"chunks": count})
            case messages.UnpinSpaces():
                wanted = {space.id for space in self._spaces(client, order.namespace)}
                pinned = [chunk for chunk in self._stock.pins if chunk.space.id in wanted]
                return report(order, {"chunks": (yield from self._unpin(pinned))})
            case messages.Pins():
                spaces = {space.id for space in self._spaces(client)}
                return report(order, self._stock.pins.listed(self._core.now(), _MAX_LISTED, spaces))
        space = self._stock.spaces.get(order.space)
        if space is None or not _reaches(client, space):
            return messages.Refused(order.serial, Refusal.UNKNOWN, "there is no such namespace")
        refs = messages.unpack_refs(order.refs)
        if isinstance(order, messages.Explain):
            return report(order, (yield from self._explain(space, refs)))
        if order.is_wanted:
            return report(order, {"chunks": (yield from self._pin(space, refs, order.seconds))})
        pinned = [space.chunks[ref] for ref in refs if ref in space.chunks]
        return report(order, {"chunks": (yield from self._unpin(pinned))})

    def _pin(self, space: Space, refs: Sequence[ChunkRef], seconds: int) -> Generator[None, None, int]:
        end_s = self._core.now() + min(seconds or self.pin_max_s, self.pin_max_s)
        count = 0
        for ref in refs:
            count += self._stock.pins.pin(space, [ref], end_s)
            yield
        return count

    def _unpin(self, chunks: Sequence[Chunk]) -> Generator[None, None, int]:
        count = 0
        for chunk in chunks:
            count += self._stock.pins.unpin([chunk])
            yield
        return count

    def _explain(self, space: Space, refs: Sequence[ChunkRef]) -> Generator[None, None, dict[str, object]]:
        """Say where each chunk is; if all are ends of one chunk's blocks, also name the chunk that holds most."""
        places = []
        for ref in refs:
            places.append(self._stock.why(space, ref))
            yield
        tree: dict[str, object] = {"chunks": places}
        holder = holder_of(space, refs)
        if holder is not None:
            ref, shared_blocks = holder
            tree["nearest"] = [ref.prefix_key.hex(), ref.num_blocks, shared_blocks, self._stock.why(space, ref)]
        return tree

    def _spaces(self, client: Client, namespace_id: bytes = b"") -> list[Space]:
        wanted = [space for space in self._stock.spaces.values() if namespace_id in {b"", space.namespace.id}]
        return [space for space in wanted if _reaches(client, space)]


def _reaches(client: Client, space: Space) -> bool:
    return client.runs_all or client.tenant == space.tenant


def holder_of(space: Space, ends: Sequence[ChunkRef]) -> tuple[ChunkRef, int] | None:
    """Find the chunk that holds most of a chunk's first blocks, given as the tails that end with each block.

    Returns:
        The chunk and the number of shared blocks; None if no chunk shares any, or the tails are not of such a form.
    """
    if [ref.num_blocks for ref in ends] != list(range(1, len(ends) + 1)):
        return None
    trail, shared = next(space.trails.neighbours(b"".join(ref.prefix_key for ref in ends)), (b"", 0))
    return (chunk_of(trail), shared) if shared else None


def report(request: messages.Request, tree: object) -> messages.Report:
    """Return an answer for people, as JSON."""
    return messages.Report(request.serial, json.dumps(tree).encode())


def stats(core: Core, uptime_s: float, num_unwritten: int) -> dict[str, Any]:
    """Report the server, its tiers, and the namespaces that hold most."""
    return {
        **part_of_stats(core, core.stock.spaces.values()),
        "uptime_s": round(uptime_s, 1),
        "clients": len(core.sessions.by_peer),
        "leases": core.sessions.num_leases,
        "leased_bytes": core.sessions.leased_bytes,
        "disk_errors": core.disk.num_errors if core.disk is not None else 0,
        "tiers": _tiers(core, num_unwritten),
        "quotas": [_quota(quota) for quota in core.stock.spaces.quotas if quota.limit_bytes != NO_QUOTA],
        "slowest_clients": _slowest(core),
        "denied": [{"client": name, "lacked": lacked, "count": n} for (name, lacked), n in core.denied.items()],
    }


def _slowest(core: Core) -> list[dict[str, Any]]:
    """List the clients that have held a lease for longest, or have not received what was sent to them."""
    now_s = core.now()

    def held_s(session: Session) -> float:
        return now_s - next(iter(session.leases.values())).since_s if session.leases else 0.0

    busy = [session for session in core.sessions.by_peer.values() if session.leases or session.unsent_bytes]
    return [
        {
            "client": session.client.name,
            "tenant": session.client.tenant,
            "namespace": session.space.namespace.id.hex(),
            "held_s": round(held_s(session), 3),
            "leases": len(session.leases),
            "leased_bytes": session.leased_bytes,
            "unsent_bytes": session.unsent_bytes,
        }
        for session in nlargest(_MAX_SLOWEST, busy, key=lambda session: (held_s(session), session.unsent_bytes))
    ]


def part_of_stats(core: Core, spaces: Collection[Space]) -> dict[str, Any]:
    """Report those of some namespaces that hold most, for clients that may know of no others.

    The report is short, so that other clients do not wait for it.
    """
    largest = nlargest(_MAX_SPACES, spaces, key=attrgetter("used_bytes"))
    sizes = accumulate(fields_bytes(space.namespace.fields) for space in largest)
    listed = [_space(space) for space, size in zip(largest, sizes, strict=True) if size <= _MAX_FIELDS_BYTES]
    return {
        "version": __version__,
        "status": core.status,
        "namespaces": listed,
        "namespaces_left_out": len(spaces) - len(listed),
    }


def _quota(quota: Quota) -> dict[str, Any]:
    return {
        "tenant": quota.tenant,
        "name": quota.name,
        "used_bytes": quota.used_bytes,
        "capacity_bytes": quota.limit_bytes,
    }


def _tiers(core: Core, num_unwritten: int) -> dict[str, Any]:
    tiers: dict[str, Any] = {
        "memory": {
            "capacity_bytes": core.pool.num_bytes,
            "used_bytes": core.pool.used_bytes,
            "chunks": core.stock.num_in_memory,
            "pinned_bytes": core.stock.pins.used_bytes,
        }
    }
    if core.disk is not None:
        tiers["disk"] = {
            "capacity_bytes": core.disk.capacity_bytes,
            "used_bytes": core.disk.used_bytes,
            "chunks": core.stock.num_on_disk,
            "unwritten": num_unwritten,
        }
    return tiers


def _space(space: Space) -> dict[str, Any]:
    return {
        "id": space.namespace.id.hex(),
        "tenant": space.tenant,
        "space": space.id.hex(),
        "fields": dict(space.namespace.fields),
        "chunk_tokens": space.layout.chunk_tokens,
        "block_tokens": space.layout.block_tokens,
        "chunks": len(space.chunks),
        "used_bytes": space.used_bytes,
        "quota_bytes": None if space.quota.limit_bytes == NO_QUOTA else space.quota.limit_bytes,
        "clients": space.num_sessions,
        "counters": dict(vars(space.counters)),
    }
