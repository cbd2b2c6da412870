"""Tests of leaks over a compressed day of an engine: stores with a time to live use no more resources."""

from __future__ import annotations

import gc
import sys
import threading
from typing import NamedTuple

import psutil
import pytest
from support.rig import CHUNK, Rig

from kvstore.policies import adaptive, base

_WARM = 2_000
_KEPT_NAMES = 1_000  # of evicted chunks, instead of as many as in a day of a large pool


class Taken(NamedTuple):
    """Resources of this process."""

    threads: int
    descriptors: int
    objects: int  # blocks of memory that Python has allocated

    @classmethod
    def now(cls) -> Taken:
        gc.collect()
        return cls(threading.active_count(), psutil.Process().num_fds(), sys.getallocatedblocks())


@pytest.mark.parametrize("num_stores", [3_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_stores_with_a_time_to_live(monkeypatch: pytest.MonkeyPatch, num_stores: int) -> None:
    """Each time to live ends long after its chunk was evicted."""
    for module in (base, adaptive):
        monkeypatch.setattr(module, "MIN_GHOSTS", _KEPT_NAMES)
    rig = Rig()
    mapping = rig.slot_mapping(rig.blocks(CHUNK), CHUNK)
    with rig.open(slots=16) as engine:  # without a disk, whose queue would hold the slots
        index = engine._planner.index
        index._chunks.departed._max_keys = _KEPT_NAMES

        def store(first: int, count: int) -> None:
            for number in range(first, first + count):
                tokens = [number, *range(1, CHUNK)]
                assert engine.store(tokens, slot_mapping=mapping, ttl_s=86_400.0 + number) == CHUNK

        store(0, _WARM)
        before = Taken.now()
        store(_WARM, num_stores)
        after = Taken.now()
        assert len(index) == 16
        assert (after.threads, after.descriptors) == (before.threads, before.descriptors)
        assert after.objects < before.objects + num_stores // 2  # the heap of deadlines has slack
