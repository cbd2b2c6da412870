"""Replay of a trace by runs of chunks instead of chunk by chunk: the same counts, many times faster.

A conversation asks with a hundred thousand tokens for the hundredth time, and little of its chain is new. Keys name
prefixes, so the chunks of a trace form a forest. In one tier a chunk is never without its prefix: eviction takes the
deepest first, and nothing is held but the running request. So what is in the tier of a request's chain is its front,
and chunks that one request used last are a run of its chain. Evictions cut runs at their deep end, requests at their
front; numpy moves the rest.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvstore.policies import LRU, Adaptive
from kvstore.policies.base import GHOSTS_PER_CHUNK, MIN_GHOSTS
from kvstore.policies.ranking import Ranking, Unit
from kvstore.policies.simulation import TierCounts
from kvstore.policies.survival import NUM_USES

if TYPE_CHECKING:
    import numpy.typing as npt

    Chunks = npt.NDArray[np.int32]
    """Numbers of chunks, the head of the chain first."""

_NONE: Final = -1


class _Numbers(dict[bytes, int]):
    """Numbers of keys in the order of their first use."""

    def __missing__(self, key: bytes) -> int:
        number = self[key] = len(self)
        return number


class Forest(NamedTuple):
    """Chunks of a trace by number.

    Attributes:
        chains: the chunks of each request.
        parents: the chunk before each; for a head, the number behind the last chunk.
    """

    chains: list[Chunks]
    parents: Chunks

    @classmethod
    def of(cls, chains: Sequence[Sequence[bytes]]) -> Forest | None:
        """Number the chunks of a trace; None if its keys do not name prefixes."""
        numbers = _Numbers()
        numbered = [np.fromiter(map(numbers.__getitem__, chain), np.int32, len(chain)) for chain in chains]
        parents = np.full(len(numbers) + 1, _NONE, np.int32)
        for chain in numbered:
            before = np.concatenate(([len(numbers)], chain[:-1]))
            known = parents[chain]
            parents[chain] = before
            if ((known != _NONE) & (known != before)).any() or (parents[chain] != before).any():
                return None
        return cls(numbered, parents)


class RunTier(ABC):
    """Tier of so many chunks, to which requests come in order.

    Attributes:
        counts: as ``SimulatedTier`` counts them.
    """

    def __init__(self, forest: Forest, capacity: int) -> None:
        self.counts = TierCounts()
        self._forest = forest
        self._free = capacity
        self._here = np.zeros(len(forest.parents), bool)

    def request(self, number: int, answer_tokens: int | None) -> None:
        """Look up a request's chain, and offer what is missing."""
        chain = self._forest.chains[number]
        here = self._here[chain]
        found = len(chain) if here.all() else int(here.argmin())
        self.counts.hit_chunks += found
        self.counts.offered_chunks += len(chain) - found
        self._use(number, chain, found, answer_tokens)

    @abstractmethod
    def _use(self, number: int, chain: Chunks, found: int, answer_tokens: int | None) -> None:
        """Take a request's chain, of which the first ``found`` chunks are in the tier."""

    def _add(self, chunks: Chunks) -> None:
        self._here[chunks] = True
        self._free -= len(chunks)
        self.counts.written_chunks += len(chunks)

    def _evict(self, chunks: Chunks) -> None:
        self._here[chunks] = False
        self._free += len(chunks)
        self.counts.evicted_chunks += len(chunks)


def _runs(values: Chunks) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and value of each run of equal values."""
    if len(values):
        ends = [*(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
        begin = 0
        for end in ends:
            yield begin, end, int(values[begin])
            begin = end


@dataclass
class _Run:
    """Chunks of a chain from ``start`` to ``stop``."""

    chain: Chunks
    start: int
    stop: int


class LruRuns(RunTier):
    """``LRU`` by runs. The oldest request's run goes first."""

    def __init__(self, forest: Forest, capacity: int) -> None:
        super().__init__(forest, capacity)
        self._runs: OrderedDict[int, _Run] = OrderedDict()  # by request, the oldest first
        self._users = np.full(len(forest.parents), _NONE, np.int32)  # the request that used a chunk last

    def _use(self, number: int, chain: Chunks, found: int, answer_tokens: int | None) -> None:  # noqa: ARG002 - unused
        for _, end, user in _runs(self._users[chain[:found]]):
            run = self._runs[user]
            run.start = end
            if run.start == run.stop:
                del self._runs[user]
        missing = len(chain) - found
        while self._free < missing and self._runs:
            user, run = next(iter(self._runs.items()))
            cut = max(run.start, run.stop - (missing - self._free))
            self._evict(run.chain[cut : run.stop])
            run.stop = cut
            if run.start == run.stop:
                del self._runs[user]
        stop = found + min(missing, self._free)
        self._add(chain[found:stop])
        if stop:
            self._runs[number] = _Run(chain, 0, stop)
            self._users[chain[:stop]] = number


class _RunUnit(Unit):
    """Unit of a run. What is in the tier of it ends at ``here``."""

    __slots__ = ("chain", "here", "number", "request", "start", "stop")

    def __init__(self, request: int, number: int, chain: Chunks, start: int) -> None:
        super().__init__()
        self.request = request
        self.number = number
        self.chain = chain
        self.start = self.here = self.stop = start


class AdaptiveRuns(RunTier):
    """``ADAPTIVE`` by runs. Uses never increase along a chain, so a unit is a run."""

    def __init__(self, forest: Forest, capacity: int) -> None:
        super().__init__(forest, capacity)
        self._ranking = Ranking[_RunUnit]()
        self._units: dict[int, _RunUnit] = {}
        self._unit_of = np.full(len(forest.parents), _NONE, np.int32)
        self._children = np.zeros(len(forest.parents), np.int32)  # in the tier
        self._num_units = 0
        self._num_known = 0  # chunks in the tier, and remembered ones
        self._num_here = 0

    def _use(self, number: int, chain: Chunks, found: int, answer_tokens: int | None) -> None:
        fresh = self._touch(number, chain)
        self._tidy(len(chain))
        place = found
        for unit in fresh:
            while place < unit.stop:
                count = min(self._free, unit.stop - place) or self._make_room(unit, unit.stop - place)
                if not count:
                    break
                self._enter(unit, place, count)
                place += count
            if place < unit.stop:
                break
        self._ranking.touch(0)
        self._tidy(0)
        if answer_tokens is not None:
            for unit in fresh:
                if self._children[unit.chain[unit.stop - 1]] <= 1:
                    self._ranking.end(unit, answer_tokens)

    def _touch(self, number: int, chain: Chunks) -> list[_RunUnit]:
        """Move a chain's chunks to new units, and return these in order."""
        ranking = self._ranking
        fresh: list[_RunUnit] = []
        now = ranking.touch(len(chain))
        by_uses: list[_RunUnit | None] = [None] * NUM_USES
        for begin, end, unit_number in _runs(self._unit_of[chain]):
            unit = self._units.get(unit_number)
            uses = 0 if unit is None else ranking.hit(unit, now, end - begin)
            target = by_uses[uses]
            if target is None:
                target = by_uses[uses] = ranking.begin(_RunUnit(number, self._num_units, chain, begin), uses)
                self._units[self._num_units] = target
                self._num_units += 1
                fresh.append(target)
            if unit is None:
                self._num_known += end - begin
            else:
                here = min(unit.here, end)
                self._take_front(unit, end)
                if here > begin:
                    target.here = here
                    ranking.enqueue(target)
            target.stop = end
            target.num_keys += end - begin
        ranking.remember(fresh)
        for unit in fresh:
            self._unit_of[chain[unit.start : unit.stop]] = unit.number
        return fresh

    def _take_front(self, unit: _RunUnit, end: int) -> None:
        count, had_some = end - unit.start, unit.here > unit.start
        unit.start, unit.here = end, max(unit.here, end)
        if had_some and unit.here == end:
            self._ranking.dequeue(unit)
        self._drop(unit, count)

    def _drop(self, unit: _RunUnit, count: int) -> None:
        self._ranking.drop(unit, count)
        if not unit.num_keys:
            del self._units[unit.number]

    def _enter(self, unit: _RunUnit, place: int, count: int) -> None:
        chunks = unit.chain[place : place + count]
        self._add(chunks)
        self._children[self._forest.parents[chunks]] += 1
        self._num_here += count
        unit.here = place + count
        self._ranking.enqueue(unit)

    def _make_room(self, own: _RunUnit, wanted: int) -> int:
        """Evict chunks worth no more than those of a new unit, and return how many; 0 if there is none."""
        if own.here == own.start:
            wanted = 1  # the unit itself is compared from then on
        limit = self._ranking.value(own)
        for value, unit in self._ranking.by_value():
            if unit is own or value > limit:
                return 0
            if unit.request != own.request and (count := self._num_evictable(unit, wanted)):
                self._evict_from(unit, count)
                return count
        return 0

    def _num_evictable(self, unit: _RunUnit, wanted: int) -> int:
        """Return how many of a unit's chunks, from its deep end, no other chunk in the tier depends on."""
        children = self._children[unit.chain[max(unit.start, unit.here - wanted) : unit.here]].copy()
        children[:-1] -= 1  # which goes before
        needed = np.flatnonzero(children)
        return len(children) - (int(needed[-1]) + 1 if len(needed) else 0)

    def _evict_from(self, unit: _RunUnit, count: int) -> None:
        unit.here -= count
        chunks = unit.chain[unit.here : unit.here + count]
        self._evict(chunks)
        self._children[self._forest.parents[chunks]] -= 1
        self._num_here -= count
        if unit.here == unit.start:
            self._ranking.dequeue(unit)
        if unit in self._ranking.stripped:
            self._forget(unit, count)

    def _forget(self, unit: _RunUnit, count: int) -> None:
        """Forget chunks behind those of a unit that are in the tier."""
        self._ranking.lose(unit, count)
        self._unit_of[unit.chain[unit.here : unit.here + count]] = _NONE
        unit.stop = unit.here
        self._num_known -= count
        self._drop(unit, count)

    def _tidy(self, num_touched: int) -> None:
        self._ranking.survey(num_touched)
        if self._num_known - self._num_here <= MIN_GHOSTS:
            return
        limit = max(MIN_GHOSTS, GHOSTS_PER_CHUNK * self._num_here)
        while self._num_known - self._num_here > limit and (unit := self._ranking.pop_oldest()) is not None:
            ghosts = unit.stop - unit.here if unit.num_keys else 0
            if unit.here > unit.start:
                self._ranking.stripped[unit] = None
            if ghosts:
                self._forget(unit, ghosts)


class BestRuns(RunTier):
    """``best_hits`` by runs: what is used last, and of that the deepest, goes first."""

    def __init__(self, forest: Forest, capacity: int) -> None:
        super().__init__(forest, capacity)
        self._next_uses = _next_uses(forest)
        self._latest: list[tuple[int, int, int, _Run]] = []  # a heap

    def _use(self, number: int, chain: Chunks, found: int, answer_tokens: int | None) -> None:  # noqa: ARG002 - unused
        self._here[chain[:found]] = False
        self._free += found
        for begin, end, next_use in self._next_uses[number]:
            if next_use < len(self._forest.chains):
                self._here[chain[begin:end]] = True
                self._free -= end - begin
                heapq.heappush(self._latest, (-next_use, -end, number, _Run(chain, begin, end)))
        while self._free < 0:
            next_use, _, user, run = heapq.heappop(self._latest)
            cut = max(run.start, run.stop + self._free)
            self._evict(run.chain[cut : run.stop])
            run.stop = cut
            if run.start < cut:
                heapq.heappush(self._latest, (next_use, -cut, user, run))


def _next_uses(forest: Forest) -> list[list[tuple[int, int, int]]]:
    """Return for each request the runs of its chain by the next request that uses them."""
    after = np.full(len(forest.parents), len(forest.chains), np.int32)
    found = []
    for number in range(len(forest.chains) - 1, -1, -1):
        chain = forest.chains[number]
        found.append(list(_runs(after[chain])))
        after[chain] = number
    return found[::-1]


BY_RUNS: Final[dict[str, type[RunTier]]] = {LRU.name: LruRuns, Adaptive.name: AdaptiveRuns}
