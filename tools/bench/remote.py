"""Chunks moved through a remote tier without an engine, for the lines of the Redis and the server tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvstore.chunks import ChunkRef, Outcome
from kvstore.keys import PREFIX_KEY_BYTES
from kvstore.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.samples import LOOKUP_CHUNKS, LOOKUP_ROUNDS, NAMESPACE, Limit, Pair, paired, require, timed

LOOKUP_ROUND_TRIPS = 3
_TIMEOUT_S = 60.0


class RemoteChunks:
    """Chunks in prefaulted slots, and as many slots to load them into.

    Attributes:
        refs: references of the chunks.
        stored: uint8 ``[num_chunks, slot_bytes]``, the stored bytes.
    """

    def __init__(self, layout: KVLayout, num_chunks: int) -> None:
        self._layout = layout
        slots = prefaulted(2 * num_chunks * layout.slot_bytes).reshape(2, num_chunks, layout.slot_bytes)
        self.stored, self._loaded = slots
        random = np.random.default_rng(0)
        self.stored[:] = random.integers(256, size=self.stored.shape, dtype=np.uint8)
        self.refs = [ChunkRef(number.to_bytes(16, "little"), layout.blocks_per_chunk) for number in range(num_chunks)]
        self._puts, self._gets = ([Transfer(*pair) for pair in zip(self.refs, half, strict=True)] for half in slots)
        before_bytes = PREFIX_KEY_BYTES * (layout.blocks_per_chunk - 1)
        self._puts = [put._replace(trail=random.bytes(before_bytes) + put.ref.prefix_key) for put in self._puts]

    def tier(self, name: str, url: str) -> Tier:
        """Open a tier for these chunks.

        Raises:
            ConfigError: the tier's packages are not installed.
        """
        options = {"url": url, "timeout_s": _TIMEOUT_S}
        return open_tier(name, TierSetup(NAMESPACE, self._layout, UNBOUNDED_BYTES, options))

    def move(self, tier: Tier, put_limit: Limit, get_limit: Limit, *, limit_first: bool) -> tuple[Pair, ...]:
        """Store all chunks with new bytes, load them, and remove them; return the times of the store and the load.

        Each call moves one chunk, as on an engine's thread, and calls do not overlap.

        Raises:
            BenchError: the tier lost or changed a byte.
        """
        self.stored += 1
        self._loaded[:] = 0
        stored, outcomes = paired(put_limit, lambda: _one_by_one(tier.put, self._puts), limit_first=limit_first)
        require(set(outcomes) == {Outcome.STORED}, f"the {tier.name} tier did not store everything")
        loaded, outcomes = paired(get_limit, lambda: _one_by_one(tier.get, self._gets), limit_first=limit_first)
        require(set(outcomes) == {Outcome.HIT}, f"the {tier.name} tier did not find everything")
        require(bool((self.stored == self._loaded).all()), f"the {tier.name} tier changed a byte")
        tier.remove(self.refs)  # otherwise the next round would replace chunks
        return stored, loaded

    def quarter(self, tier: Tier, *, limit_first: bool) -> Pair:
        """Store all chunks, and time loads of whole chunks with loads of their leading quarters as the limit."""
        front_blocks = max(1, self._layout.blocks_per_chunk // 4)
        fronts = [get._replace(front_blocks=front_blocks) for get in self._gets]
        tier.put(self._puts)
        part = partial(_one_by_one, tier.get, fronts)
        pair, outcomes = paired(part, lambda: _one_by_one(tier.get, self._gets), limit_first=limit_first)
        require(set(outcomes) == {Outcome.HIT}, f"the {tier.name} tier did not find everything")
        tier.remove(self.refs)
        return pair

    def look_up(self, tier: Tier, ping: Limit, *, slack_s: float = 0.0) -> list[Pair]:
        """Store all chunks and look them up; the limit is three round trips plus ``slack_s``.

        Raises:
            BenchError: a chunk was not found.
        """
        tier.put(self._puts)
        asked = (self.refs * -(-LOOKUP_CHUNKS // len(self.refs)))[:LOOKUP_CHUNKS]
        pairs = []
        for _ in range(LOOKUP_ROUNDS):
            ping_s, _ = timed(ping)
            path_s, found = timed(lambda: tier.contains(asked))
            require(all(found), f"the {tier.name} tier did not find everything")
            pairs.append(Pair(LOOKUP_ROUND_TRIPS * ping_s + slack_s, path_s))
        return pairs


def _one_by_one(call: Callable[[Sequence[Transfer]], Sequence[Outcome]], transfers: list[Transfer]) -> list[Outcome]:
    return [call([transfer])[0] for transfer in transfers]
