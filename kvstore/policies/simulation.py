"""Simulated tiers without bytes: the effect of a policy on a sequence of requests.

The simulator calls the policies exactly as the index does, so its results hold for the index. Every request is looked
up, loads the chunks found, and stores the rest before the next one; transfers take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from kvstore.model.keys import PrefixKey
from kvstore.policies import Policy

_MOST_TOGETHER: Final = 8  # chunks of which a writer asks a cache server at once, and their bytes (batches.py)
_TOGETHER_BYTES: Final = 12 << 20


@dataclass
class TierCounts:
    """Counters of one tier.

    Attributes:
        hit_chunks, hit_bytes: found in this tier, and in none above.
        offered_chunks: used by a request, and not in this tier when it ended.
        written_chunks, written_bytes: the admitted ones of those; chunks promoted from the tier below are not counted.
        evicted_chunks: evicted to make room.
    """

    hit_chunks: int = 0
    hit_bytes: int = 0
    offered_chunks: int = 0
    written_chunks: int = 0
    written_bytes: int = 0
    evicted_chunks: int = 0


class SimulatedTier:
    """One policy over a capacity. Sizes may have any unit if the capacity has the same one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.counts = TierCounts()

    def bring_up(self, key: PrefixKey, size_bytes: int, held: AbstractSet[PrefixKey]) -> None:
        """Admit a chunk found in a tier below regardless of its value, because a load needs a place for it."""
        if self._make_room(size_bytes, held, None):
            self.policy.add(key, size_bytes)

    def offer(self, keys: Sequence[PrefixKey], sizes_bytes: Sequence[int], held: AbstractSet[PrefixKey]) -> None:
        """Admit the chunks of a chain that are missing here and worth their room; those in ``held`` stay."""
        new = [(key, size) for key, size in zip(keys, sizes_bytes, strict=True) if key not in self.policy]
        self.counts.offered_chunks += len(new)
        for key, size_bytes in new:
            if not self._make_room(size_bytes, held, key):
                return  # chunks after a missing one would not be found
            self._write(key, size_bytes)

    def send(self, keys: Sequence[PrefixKey], sizes_bytes: Sequence[int]) -> list[PrefixKey]:
        """Take chunks as a cache server does, and return those that it refuses.

        Their writer asks first which of some are there, which counts as a use of each, and sends the others one by one.
        """
        refused: list[PrefixKey] = []
        together = min(_MOST_TOGETHER, max(1, _TOGETHER_BYTES // max(1, *sizes_bytes, 1)))
        for begin in range(0, len(keys), together):
            batch = keys[begin : begin + together]
            self.policy.touch_chain(batch)
            for key, size_bytes in zip(batch, sizes_bytes[begin:], strict=False):
                if key in self.policy:
                    continue
                self.counts.offered_chunks += 1
                if self._make_room(size_bytes, frozenset(), key):
                    self._write(key, size_bytes)
                else:
                    refused.append(key)
        return refused

    def _write(self, key: PrefixKey, size_bytes: int) -> None:
        self.policy.add(key, size_bytes)
        self.counts.written_chunks += 1
        self.counts.written_bytes += size_bytes

    def _make_room(self, size_bytes: int, held: AbstractSet[PrefixKey], newcomer: PrefixKey | None) -> bool:
        missing_bytes = self.policy.used_bytes + size_bytes - self.policy.capacity_bytes
        victims = self.policy.make_room(missing_bytes, lambda key: key not in held, newcomer)
        for victim in victims or ():
            self.policy.evict(victim)
            self.counts.evicted_chunks += 1
        return victims is not None


class SimulatedStore:
    """Several tiers, fastest first; each is offered every chunk that it does not hold.

    Args:
        policies: of the store's own tiers.
        shared: a tier below them that several stores share, as a cache server: it is asked only for chunks behind
            those found above, and hears of no answers. What it refuses is sent again when it is used again.
        num_staging: first tiers that a chunk found below them is brought to.
    """

    def __init__(
        self, policies: Sequence[Policy], shared: SimulatedTier | None = None, *, num_staging: int = 1
    ) -> None:
        self._own = [SimulatedTier(policy) for policy in policies]
        self._shared = shared
        self._refused: dict[PrefixKey, None] = {}  # by the shared tier, of chunks here
        self._staging = self._own[:num_staging]
        self.tiers = self._own if shared is None else [*self._own, shared]
        self.chunks = 0
        self.bytes = 0

    @property
    def hit_chunks(self) -> int:
        """Chunks found in any tier."""
        return sum(tier.counts.hit_chunks for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        """Chunks found, as a fraction of the chunks used."""
        return self.hit_chunks / self.chunks if self.chunks else 0.0

    def request(
        self,
        keys: Sequence[PrefixKey],
        sizes_bytes: Sequence[int],
        answer_tokens: int | None = None,
        leased: Collection[PrefixKey] = (),
    ) -> int:
        """``load`` a chain, and ``store`` the rest at once. Returns how many were found."""
        found = self.load(keys, sizes_bytes, leased)
        self.store(keys, sizes_bytes, found, answer_tokens, leased)
        return found

    def load(self, keys: Sequence[PrefixKey], sizes_bytes: Sequence[int], leased: Collection[PrefixKey] = ()) -> int:
        """Look up a chain, and load its leading chunks that are stored. Returns how many there are.

        Chunks in ``leased`` are not evicted either.
        """
        found = self._find(keys, sizes_bytes)
        held = {*keys, *leased}
        for tier in self._own:
            tier.policy.touch_chain(keys)
        if self._shared is not None:
            self._ask(self._shared.policy, keys, found)
        for key, size_bytes in zip(keys[:found], sizes_bytes, strict=False):
            for tier in self._staging:
                if key in tier.policy:
                    break
                tier.bring_up(key, size_bytes, held)
        return found

    def store(
        self,
        keys: Sequence[PrefixKey],
        sizes_bytes: Sequence[int],
        found: int,
        answer_tokens: int | None = None,
        leased: Collection[PrefixKey] = (),
    ) -> None:
        """Store the chunks of a chain that ``load`` has not found, once they are computed.

        It ends with an answer of ``answer_tokens``, if that is known.
        """
        held = {*keys, *leased}
        for tier in self._own:
            tier.offer(keys[found:], sizes_bytes[found:], held)
            tier.policy.refresh_chain(keys)
            if answer_tokens is not None:
                tier.policy.end_chain(keys, answer_tokens)
        if self._shared is not None:
            self._send(self._shared, keys, sizes_bytes, found)

    def _send(self, shared: SimulatedTier, keys: Sequence[PrefixKey], sizes_bytes: Sequence[int], found: int) -> None:
        """Send new chunks to the shared tier, and those in memory that it has refused before."""
        sent = [
            (key, size_bytes)
            for place, (key, size_bytes) in enumerate(zip(keys, sizes_bytes, strict=True))
            if place >= found or (key in self._refused and key in self._staging[-1].policy)
        ]
        if sent:
            refused = shared.send([key for key, _ in sent], [size_bytes for _, size_bytes in sent])
            self._note_refused((key for key, _ in sent), refused)

    def _note_refused(self, sent: Iterable[PrefixKey], refused: Iterable[PrefixKey]) -> None:
        for key in sent:
            self._refused.pop(key, None)
        self._refused.update(dict.fromkeys(refused))
        if len(self._refused) > 2 * sum(len(tier.policy) for tier in self._own):
            self._refused = {key: None for key in self._refused if any(key in tier.policy for tier in self._own)}

    def _ask(self, shared: Policy, keys: Sequence[PrefixKey], found: int) -> None:
        """Do what a cache server does when it is asked for chunks, and then for the bytes of those that were found."""
        asked = {key: None for key in keys if not any(key in tier.policy for tier in self._own)}
        if asked:
            shared.touch_chain(asked)
        for key in keys[:found]:
            if key in asked:
                shared.refresh_chain([key])

    def _find(self, keys: Sequence[PrefixKey], sizes_bytes: Sequence[int]) -> int:
        self.chunks += len(keys)
        self.bytes += sum(sizes_bytes)
        for found, (key, size_bytes) in enumerate(zip(keys, sizes_bytes, strict=True)):
            tier = next((tier for tier in self.tiers if key in tier.policy), None)
            if tier is None:
                return found
            tier.counts.hit_chunks += 1
            tier.counts.hit_bytes += size_bytes
        return len(keys)


def best_hits(chains: Sequence[Sequence[PrefixKey]], sizes: Sequence[Sequence[int]], capacity: int) -> int:
    """Return the hits of a policy that evicts the chunk with the latest next use first (Belady, 1966).

    Of chunks with the same next use the deepest is evicted first, so a chunk is evicted before its prefix; a new chunk
    of least value is not stored. No policy can do better with chunks of one size, and hardly any with several sizes.
    """
    next_uses = _next_uses(chains)
    here: dict[PrefixKey, tuple[int, int]] = {}  # next use, size
    order: list[tuple[int, int, PrefixKey]] = []  # a heap with stale entries
    used = hits = 0
    for chain, chain_sizes, uses in zip(chains, sizes, next_uses, strict=True):
        for key in chain:
            if key not in here:
                break
            hits += 1
        for depth, (key, size, next_use) in enumerate(zip(chain, chain_sizes, uses, strict=True)):
            used -= here.pop(key, (0, 0))[1]
            if next_use < len(chains):
                here[key] = next_use, size
                used += size
                heapq.heappush(order, (-next_use, -depth, key))
        while used > capacity:
            next_use, _, key = heapq.heappop(order)
            if key in here and here[key][0] == -next_use:
                used -= here.pop(key)[1]
    return hits


def _next_uses(chains: Sequence[Sequence[PrefixKey]]) -> list[list[int]]:
    """Return the number of the next request using each chunk of each request; ``len(chains)`` for none."""
    last: dict[PrefixKey, int] = {}
    found = []
    for number in range(len(chains) - 1, -1, -1):
        found.append([last.get(key, len(chains)) for key in chains[number]])
        last.update(dict.fromkeys(chains[number], number))
    return found[::-1]
