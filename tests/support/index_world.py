"""Simulated surroundings of an index: a few sequences, a pool, a disk and a remote tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from kvstore.index.plans import LoadStep, Place, StoreStep, chunk_refs
from kvstore.model.keys import PrefixHasher
from kvstore.tiers.base import MAX_NEAREST
from support.index import shared_blocks, trails_of

if TYPE_CHECKING:
    from kvstore.model.chunks import Answer, Asked, ChunkRef

BLOCK, CHUNK = 2, 6
COMMON = list(range(100, 118))
FAMILIES = [  # they part at the end of a chunk, inside one, at the end of a block and inside one
    COMMON + list(range(10, 30)),
    COMMON[:6] + list(range(30, 60)),
    list(range(60, 90)),
    COMMON[:10] + list(range(120, 146)),
    COMMON[:15] + list(range(150, 171)),
]


def stored_bytes(num_blocks: int) -> int:
    return 10 + 30 * num_blocks


@cache  # every schedule asks for the same few again
def hasher_of(family: int, length: int) -> PrefixHasher:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(FAMILIES[family][:length])
    return hasher


@cache
def all_trails() -> dict[ChunkRef, bytes]:
    """Return the trails of every chunk of any sequence."""
    found: dict[ChunkRef, bytes] = {}
    for family, tokens in enumerate(FAMILIES):
        for length in range(BLOCK, len(tokens) + 1, BLOCK):
            hasher = hasher_of(family, length)
            refs = chunk_refs(hasher, with_tail=True)
            made = trails_of(hasher, refs)
            found.update((ref, made[ref.prefix_key]) for ref in refs)
    return found


@dataclass
class World:
    """Contents of a mover and its tiers."""

    slots: dict[int, ChunkRef] = field(default_factory=dict)
    disk: set[ChunkRef] = field(default_factory=set)
    sizes: dict[ChunkRef, int] = field(default_factory=dict)  # on disk, of those that a codec made smaller
    remote: set[ChunkRef] = field(default_factory=set)  # other engines store there too, and it evicts
    told: set[ChunkRef] = field(default_factory=set)  # those whose trails the remote tier has, or had
    stores: list[list[StoreStep]] = field(default_factory=list)
    loads: list[list[LoadStep]] = field(default_factory=list)
    writes: dict[tuple[Place, ChunkRef], int] = field(default_factory=dict)  # started, from which slot
    doomed: set[tuple[Place, ChunkRef]] = field(default_factory=set)
    stale: set[LoadStep] = field(default_factory=set)  # planned behind a read that failed: find nothing in their slot

    def say(self, item: Asked) -> Answer:
        """Return the answer of the remote tier."""
        if not isinstance(item, bytes):
            return item in self.remote
        shared = {ref: shared_blocks(item, all_trails()[ref]) for ref in sorted(self.remote & self.told)}
        nearest = sorted(filter(shared.__getitem__, shared), key=lambda ref: -shared[ref])
        return tuple(all_trails()[ref] for ref in nearest[:MAX_NEAREST])

    def written_to_disk(self) -> set[ChunkRef]:
        return {ref for place, ref in self.writes if place is Place.DISK}

    def busy_slots(self) -> set[int]:
        steps = [step for store in self.stores for step in store]
        reads = [step for load in self.loads for step in load if step not in self.stale]
        return {step.slot for step in steps} | {step.slot for step in reads} | set(self.writes.values())
