"""What a policy costs: time for each chunk touched, and memory for each chunk it orders."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import NamedTuple

from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.policies import open_policy
from kvstore.policies.simulation import SimulatedStore

CHAIN_CHUNKS = 16


class PolicyCost(NamedTuple):
    """Measured in a tier that is full.

    Attributes:
        touch_s: processor time of each request, per chunk: lookup, noting the use, making room, adding what is new.
        chunk_bytes: of Python's memory for a chunk that is here, its key included and no ghosts.
        ghost_bytes: for a key remembered.
    """

    touch_s: list[float]
    chunk_bytes: float
    ghost_bytes: float


def measure_policy(name: str, *, resident_chunks: int = 100_000, requests: int = 2_000) -> PolicyCost:
    """Fill a tier with chains of 16 chunks, then let half of the requests be new, and half come back."""
    chunk_bytes, ghost_bytes = _memory(name, resident_chunks)
    store, chooser = SimulatedStore([open_policy(name, resident_chunks)]), random.Random(1)  # noqa: S311 - not a secret
    chains = resident_chunks // CHAIN_CHUNKS + 1
    for number in range(chains):
        store.request(_chain(number), [1] * CHAIN_CHUNKS)
    touch_s = []
    for number in range(chains, chains + requests):
        chain = _chain(number if chooser.random() < 0.5 else chooser.randrange(number - chains, number))
        begin_s = time.thread_time()
        store.request(chain, [1] * CHAIN_CHUNKS)
        touch_s.append((time.thread_time() - begin_s) / CHAIN_CHUNKS)
    return PolicyCost(touch_s, chunk_bytes, ghost_bytes)


def _memory(name: str, resident_chunks: int) -> tuple[float, float]:
    """Bytes a chunk, and bytes a ghost; 0 where nothing is remembered."""
    tracemalloc.start()
    try:
        store = SimulatedStore([open_policy(name, resident_chunks)])
        policy = store.tiers[0].policy
        for number in range(resident_chunks // CHAIN_CHUNKS):
            store.request(_chain(number), [1] * CHAIN_CHUNKS)
        full_bytes = tracemalloc.get_traced_memory()[0]
        for number in range(resident_chunks, resident_chunks + resident_chunks // CHAIN_CHUNKS):
            store.request(_chain(number), [1] * CHAIN_CHUNKS)
        more_bytes = tracemalloc.get_traced_memory()[0] - full_bytes
    finally:
        tracemalloc.stop()
    remembers = policy.num_ghosts > resident_chunks // 2
    return full_bytes / len(policy), more_bytes / policy.num_ghosts if remembers else 0.0


def _chain(number: int) -> list[PrefixKey]:
    return [(number * CHAIN_CHUNKS + place).to_bytes(PREFIX_KEY_BYTES, "little") for place in range(CHAIN_CHUNKS)]
