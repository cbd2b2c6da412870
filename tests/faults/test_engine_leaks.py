"""A day of an engine, compressed: stores with a time to live leave it as it was."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from support.rig import CHUNK, Rig

from kvstore.policies import base as policies

_WARM = 2_000
_KEPT_NAMES = 1_000  # of chunks that went, instead of as many as a day of a large pool brings


class Taken(NamedTuple):
    """What this process has."""

    threads: int
    descriptors: int
    objects: int  # blocks of memory that Python has given away

    @classmethod
    def now(cls) -> Taken:
        gc.collect()
        return cls(threading.active_count(), psutil.Process().num_fds(), sys.getallocatedblocks())


@pytest.mark.parametrize("num_stores", [3_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_stores_with_a_time_to_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stores: int) -> None:
    """Each ends long after its chunk has made room for others."""
    monkeypatch.setattr(policies, "MIN_GHOSTS", _KEPT_NAMES)
    rig = Rig()
    mapping = rig.slot_mapping(rig.blocks(CHUNK), CHUNK)
    with rig.open(slots=16, local_disk=tmp_path) as engine:
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
        assert after.objects < before.objects + num_stores // 4
