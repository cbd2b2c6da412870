"""Bench of a mover over numbered chunks."""

from __future__ import annotations

from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.tiers.guards import Guard
from kvstore.transfer.lane import Lane
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, StoreJob, as_block_ids
from support.rig import BLOCKS_PER_CHUNK, SLOT_BYTES, FakeTier, Rig

HANG_GUARD_S = 30.0


class Bench:
    """A mover over a cache whose block ``b`` is filled with ``b``, with its reports of writes."""

    def __init__(self, tier: FakeTier | None, timeout_s: float = HANG_GUARD_S) -> None:
        self.rig = Rig()
        for cache in self.rig.caches.values():
            for block in range(self.rig.num_blocks):
                cache[block] = block
        self.cpu = LabelledPool(SlabPool(8, SLOT_BYTES))
        self.written: list[tuple[ChunkRef, bool]] = []
        self.tier = tier
        disk = None if tier is None else Guard(tier, timeout_s, slow_timeout_s=timeout_s)
        lanes = (
            {}
            if disk is None
            else {
                Place.DISK: Lane(
                    self.cpu, disk, lambda ref, outcome: self.written.append((ref, outcome is Outcome.STORED))
                )
            }
        )
        self.mover = Mover(self.rig.paged, self.cpu, lanes)
        self.targets = tuple(lanes)

    def store(self, *numbers: int, write: bool = True) -> set[bytes]:
        """Store chunk n, of the blocks 4n ..., in slot n. Returns the keys of those that failed."""
        return self.mover.store([self.store_job(number, write=write) for number in numbers])

    def store_job(self, number: int, *, write: bool = True) -> StoreJob:
        return StoreJob(
            StoreStep(ref_of(number), number, self.targets if write else ()),
            as_block_ids(range(4 * number, 4 * number + 4)),
        )

    def load(self, *numbers: int, from_disk: bool = False, first_block: int = 0) -> set[bytes]:
        """Load chunk n through slot n to the blocks 60, 59, ... Returns the keys of those that failed."""
        return self.results(*numbers, from_disk=from_disk, first_block=first_block).failed

    def results(self, *numbers: int, from_disk: bool = True, first_block: int = 0) -> LoadResult:
        ids = as_block_ids(range(60, 60 - BLOCKS_PER_CHUNK + first_block, -1))
        source = Place.DISK if from_disk else Place.MEMORY
        return self.mover.load([LoadJob(LoadStep(ref_of(n), n, source), ids, first_block) for n in numbers])

    def held(self) -> list[int]:
        """Return the values that fill the blocks 60, 59, 58, 57."""
        return [int(self.rig.held(block)[0]) for block in range(60, 56, -1)]


def ref_of(number: int) -> ChunkRef:
    return ChunkRef(bytes([number]) * 16, BLOCKS_PER_CHUNK)


def key_of(number: int) -> bytes:
    return ref_of(number).prefix_key
