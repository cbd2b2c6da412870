"""Retention of chunks in the engine by leases, pins and times to live, and prefetching."""

from __future__ import annotations

import time
from threading import Event
from types import EllipsisType
from typing import TYPE_CHECKING

import pytest
from support.checks import check_idle
from support.rig import POISON, Rig, tokens_of

from kvstore.engine.requests import hash_tokens
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import NO_EXTRAS
from kvstore.tiers.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.model.chunks import Outcome
    from kvstore.tiers.base import Transfer


@pytest.fixture
def rig() -> Rig:
    return Rig()


def chunk_files(folder: Path) -> list[Path]:
    return list(folder.glob("*/??/*.safetensors"))


def let_pass(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock on the wall ahead, as after a restart that took long."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


def test_a_lease_keeps_its_chunks_from_eviction(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("kvstore.engine.planner.time.monotonic", lambda: now_s[0])
    tokens = tokens_of(1, 32)
    with rig.open(slots=4, lease_timeout_s=10.0) as engine:
        rig.store(engine, tokens)
        assert engine.lookup(tokens, lease_id="one") == 32
        assert rig.store(engine, tokens_of(2, 64)) == 32
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == 32
        now_s[0] += 9
        assert engine.lookup(tokens, lease_id="one") == 32  # renewed
        now_s[0] += 9
        assert rig.store(engine, tokens_of(3, 64)) == 32
        assert engine.lookup(tokens) == 32
        now_s[0] += 1  # over
        assert rig.store(engine, tokens_of(4, 64)) == 64
        assert engine.lookup(tokens) == 0
        assert engine._planner.index.leases == 0
        check_idle(engine)


def test_a_lease_ends_when_it_is_released(rig: Rig) -> None:
    tokens = tokens_of(1, 32)
    with rig.open(slots=4) as engine:
        rig.store(engine, tokens)
        engine.lookup(tokens, lease_id="one")
        engine.release("one")
        engine.release("unknown")
        assert rig.store(engine, tokens_of(2, 64)) == 64
        assert engine.lookup(tokens) == 0


def test_a_pin_lasts_until_it_is_unpinned(rig: Rig) -> None:
    tokens = tokens_of(1, 48)
    with rig.open(slots=4) as engine:
        assert engine.pin(tokens) == 0
        rig.store(engine, tokens)
        assert engine.pin(tokens) == 32  # half of the pool
        assert rig.store(engine, tokens_of(2, 64)) == 32
        assert engine.lookup(tokens) == 32
        engine.unpin(tokens[:32])  # another sequence
        assert rig.store(engine, tokens_of(3, 64)) == 32
        engine.unpin(tokens)
        engine.unpin(tokens)
        assert rig.store(engine, tokens_of(4, 64)) == 64
        check_idle(engine)


def test_clear_takes_what_is_pinned(rig: Rig) -> None:
    tokens = tokens_of(1, 32)
    with rig.open(slots=4) as engine:
        rig.store(engine, tokens)
        assert engine.pin(tokens) == 32
        assert engine.clear() == 2
        assert (engine.stats().slots_in_use, engine._planner.index.leases) == (0, 0)
        assert rig.store(engine, tokens) == 32


def test_a_time_to_live(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("kvstore.engine.planner.time.monotonic", lambda: now_s[0])
    tokens = tokens_of(1, 32)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.store(engine, tokens, ttl_s=5) == 32
        assert engine.flush(30.0)
        assert len(chunk_files(tmp_path)) == 2
        now_s[0] += 4.9
        assert rig.retrieve(engine, tokens) == 32
        now_s[0] += 0.1
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == 0
        assert (engine.stats().index.expired, engine.stats().slots_in_use) == (2, 0)
        assert engine.flush(30.0)
        assert chunk_files(tmp_path) == []
        for ttl_s in (0, -1.0, float("nan")):
            with pytest.raises(InvalidCallError, match="ttl_s must be positive"):
                rig.store(engine, tokens, ttl_s=ttl_s)
        assert rig.store(engine, tokens) == 32
        now_s[0] += 1e9
        assert engine.lookup(tokens) == 32


@pytest.mark.parametrize(("again_s", "left"), [(..., 0), (3.0, 0), (1000.0, 32), (None, 32)])
def test_a_time_to_live_after_a_restart(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_s: float | EllipsisType | None, left: int
) -> None:
    """The longest of several times counts, also where the chunk was on disk before it was asked for."""
    tokens = tokens_of(1, 32)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.store(engine, tokens, ttl_s=5) == 32
        assert engine.flush(30.0)
        if not isinstance(again_s, EllipsisType):
            assert rig.store(engine, tokens, ttl_s=again_s) == 0
            assert engine.flush(30.0)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, tokens) == 32
    let_pass(60.0, monkeypatch)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, tokens) == left
        assert engine.flush(30.0)
        assert len(chunk_files(tmp_path)) == left // 16


def test_a_time_to_live_that_is_extended_while_it_is_written(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(1, 16)
    writing, may_end = Event(), Event()
    real = DiskTier.put

    def put(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
        writing.set()
        assert may_end.wait(30.0)
        return real(tier, transfers)

    monkeypatch.setattr(DiskTier, "put", put)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.store(engine, tokens, ttl_s=5) == 16
        assert writing.wait(30.0)
        assert rig.store(engine, tokens) == 0
        may_end.set()
        assert engine.flush(30.0)
    let_pass(60.0, monkeypatch)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, tokens) == 16


def test_prefetch(rig: Rig, tmp_path: Path) -> None:
    tokens = tokens_of(1, 40)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens)
    with rig.open(local_disk=tmp_path) as engine:
        rig.poison()
        assert engine.prefetch(tokens) == 40
        assert engine.stats().slots_in_use == 3
        assert all((rig.held(block) == POISON).all() for block in range(rig.num_blocks))
        assert engine.prefetch(tokens) == 40
        assert engine.stats().mover.chunks_loaded_from_disk == 3
        assert rig.retrieve(engine, tokens) == 40
        assert engine.stats().mover.chunks_loaded_from_disk == 3
        assert engine.prefetch(tokens_of(2, 40)) == 0
        with pytest.raises(InvalidCallError, match="gpu"):
            engine.prefetch(tokens, "gpu")
        check_idle(engine)


def test_prefetch_counts_the_prefix_that_is_in_memory(rig: Rig, tmp_path: Path) -> None:
    """A chunk behind a lost one does not count, although it was loaded."""
    tokens = tokens_of(1, 40)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens)
        second = engine._planner.index.lookup(hash_tokens(engine.layout, tokens, NO_EXTRAS)).refs[1].prefix_key.hex()
    with rig.open(local_disk=tmp_path) as engine:
        next(tmp_path.glob(f"*/*/{second}-*.safetensors")).unlink()
        assert engine.lookup(tokens) == 40
        assert engine.prefetch(tokens) == engine.lookup(tokens) == 16
        assert engine.stats().slots_in_use == 2
        assert engine.stats().mover.chunks_loaded_from_disk == 2
        check_idle(engine)


def test_prefetch_into_a_mere_passage(rig: Rig, tmp_path: Path) -> None:
    """No chunk could stay there, so nothing is read."""
    tokens = tokens_of(1, 40)
    with rig.open(local_disk=tmp_path, local_cpu=False) as engine:
        rig.store(engine, tokens)
        assert engine.flush()
        assert engine.prefetch(tokens) == 0
        assert engine.stats().mover.chunks_loaded_from_disk == 0
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == 40
        check_idle(engine)
