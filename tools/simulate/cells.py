"""Hit rates of each policy over a trace, in tiers of several sizes, for ``kvstore simulate``.

Runs the index's policies over the requests of a trace, one after the other. ``kvstore/policies/simulation.py`` lists
the simplifications, and ``docs/policies.md`` explains the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from kvstore.model.errors import ConfigError
from kvstore.policies import POLICIES, choose_policy, open_policy
from kvstore.policies.simulation import SimulatedStore, TierCounts, best_hits
from kvstore.policies.traces import Request, read_trace
from kvstore.tools.simulate.beside import Tick
from kvstore.tools.simulate.runs import BY_RUNS, BestRuns, Forest, RunTier

BEST = "best possible"
GIB = 1 << 30
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)  # default sizes, as fractions of a trace's distinct chunks
_TICK = 500  # requests between two progress reports


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


@dataclass(frozen=True)
class Trace:
    """Trace in memory, with the size of every chunk, and the answers' tokens as far as they are known."""

    name: str
    chains: list[tuple[bytes, ...]]
    sizes: list[list[int]]
    answers: list[int | None]

    def without_answers(self) -> Self:
        """Return the same requests, whose answers are not known."""
        return replace(self, answers=[None] * len(self.answers))

    @cached_property
    def forest(self) -> Forest | None:
        """The chunks by number; None if the keys do not name prefixes."""
        return Forest.of(self.chains)

    @cached_property
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
    sizes = [scale.sizes_of(request) for request in requests]
    answers = [request.answer_tokens for request in requests]
    return Trace(str(path), [request.keys for request in requests], sizes, answers)


def replay(trace: Trace, policy: str, size: float, *, disk: float | None, scale: Scale, tick: Tick) -> Cell:
    """Run one policy over a trace: by runs if it can, else chunk by chunk."""
    capacities = [scale.capacity(size)] + ([] if disk is None else [scale.capacity(disk)])
    if disk is None and scale.bytes_per_token is None and policy in BY_RUNS and trace.forest is not None:
        counts = _by_runs(trace, BY_RUNS[policy](trace.forest, capacities[0]), tick)
        return _cell(trace, policy, size, disk, scale=scale, tiers=[counts])
    store = SimulatedStore([open_policy(policy, capacity) for capacity in capacities])
    requests = zip(trace.chains, trace.sizes, trace.answers, strict=True)
    for number, (chain, sizes, answer_tokens) in enumerate(requests, start=1):
        store.request(chain, sizes, answer_tokens)
        if number % _TICK == 0:
            tick(_TICK)
    tick(len(trace.chains) % _TICK)
    return _cell(trace, policy, size, disk, scale=scale, tiers=[tier.counts for tier in store.tiers])


def _by_runs(trace: Trace, tier: RunTier, tick: Tick) -> TierCounts:
    for number, answer_tokens in enumerate(trace.answers):
        tier.request(number, answer_tokens)
        if (number + 1) % _TICK == 0:
            tick(_TICK)
    tick(len(trace.answers) % _TICK)
    return tier.counts


def _cell(
    trace: Trace, policy: str, size: float, disk: float | None, *, scale: Scale, tiers: Sequence[TierCounts]
) -> Cell:
    memory = tiers[0]
    return Cell(
        trace.name,
        policy,
        size,
        disk,
        sum(counts.hit_chunks for counts in tiers) / trace.num_chunks,
        None if scale.bytes_per_token is None else sum(counts.hit_bytes for counts in tiers),
        None if scale.bytes_per_token is None else sum(map(sum, trace.sizes)),
        memory.written_chunks / memory.offered_chunks if memory.offered_chunks else 0.0,
        tuple(_tier_fields(counts, scale) for counts in tiers),
    )


def _tier_fields(counts: TierCounts, scale: Scale) -> dict[str, Any]:
    fields = asdict(counts)
    return fields if scale.bytes_per_token is not None else {k: v for k, v in fields.items() if "bytes" not in k}


def best(trace: Trace, size: float, *, disk: float | None, scale: Scale, tick: Tick) -> Cell:
    """Return the best possible hit rate at this size; with a disk, of memory and disk together."""
    capacity = scale.capacity(size) + (scale.capacity(disk) if disk else 0)
    if scale.bytes_per_token is None and trace.forest is not None:
        hits = _by_runs(trace, BestRuns(trace.forest, capacity), tick).hit_chunks
    else:
        hits = best_hits(trace.chains, trace.sizes, capacity)
        tick(len(trace.chains))
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
