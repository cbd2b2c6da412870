"""Invariants of the engine, recomputed from its internal state, and the return of a tier that was missing."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvstore.index.entries import NO_SLOT
from kvstore.index.plans import Place
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import layers
from kvstore.transfer.lane import Flushed
from support.invariants import check_invariants
from support.rig import Rig, tokens_of
from support.uses import uses_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from kvstore.engine.engine import CacheEngine
    from kvstore.engine.options import RemoteOptions
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


TOKENS = tokens_of(1, 40)
WAIT_S = 30.0


def check_return(
    rig: Rig, caplog: pytest.LogCaptureFixture, remote: RemoteOptions, start: Callable[[], object]
) -> None:
    """Check that there is one warning, and that the cache works without the tier and then with it."""
    with caplog.at_level(logging.INFO), rig.open(remote=remote) as engine:
        assert "the remote tier cannot be used now" in caplog.text
        assert rig.store(engine, TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.flush(WAIT_S) == Flushed(failed=3)
        start()
        deadline_s = time.monotonic() + WAIT_S
        while not engine.stats().index.sends_done and time.monotonic() < deadline_s:
            rig.store(engine, tokens_of(2, 16))  # known by now, but not sent
            engine.flush(WAIT_S)
            time.sleep(0.1)
        assert engine.stats().index.sends_done
        check_idle(engine)
