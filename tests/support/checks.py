"""Invariants of the index and the engine, recomputed from their insides."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.catalog.leases import HOLDS_PER_SLOT
from kvstore.catalog.plans import Place
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import layers

if TYPE_CHECKING:
    from kvstore.catalog.index import ChunkIndex
    from kvstore.engine import CacheEngine


def check_index(index: ChunkIndex) -> None:
    """Every counter and every list must agree with the chunks themselves."""
    chunks = index._chunks
    owned = [chunk.slot for chunk in chunks.values() if chunk.slot is not None]
    assert sorted(owned + list(index._free_slots)) == list(range(index._num_slots)), "a slot is lost or owned twice"
    assert index.slots_in_use == len(owned)
    assert index._idle_slots == sum(chunk.in_memory and chunk.uses == 0 for chunk in chunks.values())
    assert set(index._memory) == {key for key, chunk in chunks.items() if chunk.slot is not None}
    assert index._writes == sum(chunk.writing for chunk in chunks.values())
    assert index._writes <= index._max_writes
    assert index._sends == sum(chunk.sending for chunk in chunks.values()) <= index._max_sends
    assert index.uses == sum(chunk.uses for chunk in chunks.values())
    for key, chunk in chunks.items():
        assert chunk.ref.prefix_key == key
        assert chunk.uses >= 0
        assert chunk.slot is not None or chunk.disk_bytes, "a chunk that is nowhere"
        assert chunk.uses or not (chunk.filling or chunk.writing or chunk.forgotten), "unfinished, and nobody at it"
        assert index._keep_in_memory or chunk.uses or chunk.slot is None
    leased = Counter(key for lease in index._leases._leases.values() for key in lease.keys)
    holders = Counter({key: len(names) for key, names in index._leases._holders.items()})
    assert holders == leased, "a lease is lost"
    assert leased.total() == index._leases._num_holds <= max(1, index._num_slots * HOLDS_PER_SLOT)
    assert index._leases._ends._at_s == {name: lease.expires_s for name, lease in index._leases._leases.items()}
    assert len(leased) <= max(1, index._num_slots // 2)
    for key, leases in leased.items():
        assert not chunks[key].forgotten
        assert chunks[key].uses >= leases
    expiries = {
        key: chunk.expires_s for key, chunk in chunks.items() if chunk.expires_s is not None and not chunk.forgotten
    }
    assert index._expiries._at_s == expiries, "a time to live that nobody ends, or one too many"
    if index._disk is None:
        assert index.disk_used_bytes == 0
    else:
        assert index.disk_used_bytes == sum(chunk.disk_bytes for chunk in chunks.values())
        assert index.disk_used_bytes <= index._disk.capacity_bytes
        assert set(index._disk.order) == {key for key, chunk in chunks.items() if chunk.disk_bytes}


def check_idle(engine: CacheEngine) -> None:
    """Nothing is in flight, nothing was leaked, and the tiers hold what the index says."""
    assert not engine.flush(30.0).pending
    index, mover = engine._planner.index, engine._mover
    with engine._planner.lock:
        check_index(index)
        assert index.uses == index._leases._num_holds
        mover.remove(Place.DISK, index.take_removals())  # the next call would carry them out
    for lane in mover._lanes.values():
        assert not lane._writing
        assert lane.settle(30.0)
    for chunk in index._chunks.values():
        if chunk.slot is not None:
            assert engine._tiers.cpu.read(chunk.slot, chunk.ref) is not None, "a slot that holds something else"
    disk = engine._tiers.disk
    if disk is not None and isinstance([*layers(disk)][-1], DiskTier):
        held = dict(disk.scan())
        assert held == {chunk.ref: chunk.disk_bytes for chunk in index._chunks.values() if chunk.disk_bytes}
        assert disk.used_bytes <= disk.capacity_bytes
