"""Helpers of the tests of the index: an index, and the steps of a store or a load carried out at once."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, chunk_refs
from kvstore.index.retained import NO_RETENTION, Limits
from kvstore.index.trails import keys_of
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixHasher, PrefixKey
from kvstore.policies import Adaptive
from support.invariants import check_invariants

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index.plans import LoadStep, StoreStep

BLOCK, CHUNK = 4, 16
FULL_BYTES = 100


def stored_bytes(num_blocks: int) -> int:
    return 25 * num_blocks


def hasher_of(num_tokens: int, seed: int = 0) -> PrefixHasher:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(range(seed * 1000, seed * 1000 + num_tokens))
    return hasher


def refs_of(num_tokens: int, seed: int = 0) -> list[ChunkRef]:
    return chunk_refs(hasher_of(num_tokens, seed), with_tail=True)


def trails_of(hasher: PrefixHasher, refs: Iterable[ChunkRef]) -> dict[PrefixKey, bytes]:
    return hasher.trails(ref.prefix_key for ref in refs)


def keys(items: Iterable[ChunkRef | StoreStep | LoadStep]) -> set[bytes]:
    return {item.prefix_key if isinstance(item, ChunkRef) else item.ref.prefix_key for item in items}


def shared_blocks(one: bytes, other: bytes) -> int:
    """Count the blocks that two trails share, one by one."""
    pairs = zip(keys_of(one), keys_of(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def make(
    num_slots: int = 4,
    *,
    disk_chunks: int = 0,
    keep: bool = True,
    max_writes: int | None = 8,
    retention: Limits = NO_RETENTION,
    cache_policy: str = Adaptive.name,
) -> ChunkIndex:
    return ChunkIndex(
        num_slots,
        keep_in_memory=keep,
        disk_capacity_bytes=disk_chunks * FULL_BYTES,
        stored_bytes=stored_bytes if disk_chunks else None,
        max_writes=max_writes,
        retention=retention,
        cache_policy=cache_policy,
    )


def store(index: ChunkIndex, num_tokens: int, seed: int = 0, *, write: bool = True) -> list[StoreStep]:
    """Store a sequence with success, its writes included."""
    steps = index.prepare_store(refs_of(num_tokens, seed), hasher=hasher_of(num_tokens, seed))
    index.complete_store(steps, set())
    for step in steps:
        if bool(step.targets) and write:
            index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)
    return steps


def known_tokens(index: ChunkIndex, num_tokens: int, seed: int = 0) -> int:
    check_invariants(index)
    return index.lookup(hasher_of(num_tokens, seed)).num_tokens


def load(index: ChunkIndex, num_tokens: int, seed: int = 0) -> list[LoadStep]:
    steps = index.prepare_load(index.lookup(hasher_of(num_tokens, seed)).refs)
    index.complete_load(steps, set(), set())
    check_invariants(index)
    return steps
