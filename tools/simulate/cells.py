"""Hit rates of each policy over a trace, in tiers of several sizes, for ``kvstore simulate``.

Runs the index's policies over the requests of a trace, one after the other. ``kvstore/policies/simulation.py`` lists
the simplifications, and ``docs/policies.md`` explains the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.policies import POLICIES, choose_policy, open_policy
from kvstore.policies.simulation import SimulatedStore, TierCounts, best_hits
from kvstore.policies.traces import Request, read_trace

BEST = "best possible"
GIB = 1 << 30
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)  # default sizes, as fractions of a trace's distinct chunks
_TICK = 500  # requests between two progress reports

Tick = Callable[[int], None]
"""Callback with the number of requests replayed since the last call."""


class Scale(NamedTuple):
    """Unit of sizes: bytes, at ``bytes_per_token``, or chunks if that is None."""

    bytes_per_token: int | None = None

    def sizes_of(self, request: Request) -> list[int]:
        """Return the size of each chunk of a request."""
        if self.bytes_per_token is None:
            return [1] * len(request.keys)
        return [request.tokens_of(place) * self.bytes_per_token for place in range(len(request.keys))]

    def capacity(self, size: float) -> int:
        """Convert a size that users give in chunks or GiB to chunks or bytes."""
        return round(size) if self.bytes_per_token is None else round(size * GIB)

    def label(self, size: float) -> str:
        """Format a size for people."""
        return f"{size:,.0f}" if self.bytes_per_token is None else f"{size:g} GiB"


class Trace(NamedTuple):
    """Trace in memory, with the size of every chunk."""

    name: str
    chains: list[tuple[bytes, ...]]
    sizes: list[list[int]]

    @property
    def num_chunks(self) -> int:
        """Number of chunks in all requests together."""
        return sum(map(len, self.chains))

    def distinct_size(self, _scale: Scale) -> int:
        """Return the total size of all distinct chunks."""
        found: dict[bytes, int] = {}
        for chain, sizes in zip(self.chains, self.sizes, strict=True):
            found.update(zip(chain, sizes, strict=True))
        return sum(found.values())


@dataclass(frozen=True)
class Cell:
    """Result of one policy for one trace at one size.

    Attributes:
        size, disk: sizes of memory and disk, in chunks or GiB; no disk if None.
        hit_rate: leading chunks found of each request, over all chunks requested.
        hit_bytes, used_bytes: bytes of the chunks found, and of all chunks; None if sizes are in chunks.
        written_rate: chunks written over chunks offered, in memory; None for the best possible.
        tiers: counts of each tier, memory first.
        matching: ``blocks`` or ``chunks`` if both are compared, and the hit rate counts tokens; otherwise None.
        hit_tokens, used_tokens: tokens found and requested; None if chunks are counted.
    """

    trace: str
    policy: str
    size: float
    disk: float | None
    hit_rate: float
    hit_bytes: int | None = None
    used_bytes: int | None = None
    written_rate: float | None = None
    tiers: tuple[dict[str, Any], ...] = ()
    matching: Literal["blocks", "chunks"] | None = None
    hit_tokens: int | None = None
    used_tokens: int | None = None

    @property
    def label(self) -> str:
        """Label that distinguishes the cell from others of the same trace and size."""
        return f"{self.policy}, whole chunks and tails" if self.matching == "chunks" else self.policy


def load(path: Path, scale: Scale) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: the file cannot be read, or has no requests.
    """
    requests = list(read_trace(path))
    if not requests:
        raise ConfigError(f"{path} has no requests with at least one chunk")
    return Trace(str(path), [request.keys for request in requests], [scale.sizes_of(request) for request in requests])


def replay(trace: Trace, policy: str, size: float, *, disk: float | None, scale: Scale, tick: Tick) -> Cell:
    """Run one policy over a trace."""
    capacities = [scale.capacity(size)] + ([] if disk is None else [scale.capacity(disk)])
    store = SimulatedStore([open_policy(policy, capacity) for capacity in capacities])
    for number, (chain, sizes) in enumerate(zip(trace.chains, trace.sizes, strict=True), start=1):
        store.request(chain, sizes)
        if number % _TICK == 0:
            tick(_TICK)
    tick(len(trace.chains) % _TICK)
    memory = store.tiers[0].counts
    return Cell(
        trace.name,
        policy,
        size,
        disk,
        store.hit_rate,
        None if scale.bytes_per_token is None else sum(tier.counts.hit_bytes for tier in store.tiers),
        None if scale.bytes_per_token is None else store.bytes,
        memory.written_chunks / memory.offered_chunks if memory.offered_chunks else 0.0,
        tuple(_tier_fields(tier.counts, scale) for tier in store.tiers),
    )


def _tier_fields(counts: TierCounts, scale: Scale) -> dict[str, Any]:
    fields = asdict(counts)
    return fields if scale.bytes_per_token is not None else {k: v for k, v in fields.items() if "bytes" not in k}


def best(trace: Trace, size: float, disk: float | None, scale: Scale) -> Cell:
    """Return the best possible hit rate at this size; with a disk, of memory and disk together."""
    hits = best_hits(trace.chains, trace.sizes, scale.capacity(size) + (scale.capacity(disk) if disk else 0))
    return Cell(trace.name, BEST, size, disk, hits / trace.num_chunks)


def default_sizes(total: int, scale: Scale) -> list[float]:
    """Return sizes from a hundredth of ``total``, the distinct size of a trace in chunks or bytes, to all of it."""
    unit = 1 if scale.bytes_per_token is None else GIB
    sizes = (float(f"{share * total / unit:.2g}") if unit == GIB else max(1, round(share * total)) for share in _SHARES)
    return sorted({*sizes})


def parse_policies(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the policies of these names, or all policies if there are no names, and warnings.

    Raises:
        ConfigError: there is no such policy.
    """
    found = [choose_policy(name) for name in names or POLICIES]
    return list(dict.fromkeys(name for name, _ in found)), [warning for _, warning in found if warning]
