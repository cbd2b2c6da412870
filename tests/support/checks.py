"""Invariants of the engine, recomputed from its internal state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.index.entries import NO_SLOT
from kvstore.index.plans import Place
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import layers
from support.invariants import check_invariants
from support.uses import uses_of

if TYPE_CHECKING:
    from kvstore.engine.engine import CacheEngine
    from kvstore.index.index import ChunkIndex
    from kvstore.model.chunks import ChunkRef


def sizes_on_disk(index: ChunkIndex) -> dict[ChunkRef, int]:
    """Return the sizes that the index accounts to the disk tier."""
    return {index._chunks[key].ref: size_bytes for key, size_bytes in index._disk.order._sizes.items()}


def check_idle(engine: CacheEngine) -> None:
    """Assert that nothing is in flight, nothing leaked, and the tiers hold what the index says."""
    assert not engine.flush(30.0).pending
    index, mover = engine._planner.index, engine._mover
    with engine._planner.lock:
        check_invariants(index)
        assert uses_of(index) == index._leases._num_holds
        mover.remove(Place.DISK, index.take_removals())  # the next call would carry them out
    for lane in mover._lanes.values():
        assert not lane._writing
        assert lane.settle(30.0)
    for chunk in index._chunks.values():
        if chunk.memory is not NO_SLOT:
            assert engine._tiers.cpu.read(chunk.slot, chunk.ref) is not None, "a slot that holds something else"
    disk = engine._tiers.disk
    if disk is not None and isinstance([*layers(disk)][-1], DiskTier):
        assert dict(disk.scan()) == sizes_on_disk(index)
        assert disk.used_bytes <= disk.capacity_bytes
