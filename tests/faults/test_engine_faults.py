"""Tests of faults below the engine: each is a miss above it, and leaves no slot, use or file behind."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.checks import check_idle
from support.diskwork import flip
from support.gate import HANG_GUARD_S, Gate, until
from support.rig import CHUNK, FILE_BYTES, FakeTier, Rig, install, tokens_of
from support.uses import uses_of

from kvstore.engine.requests import hash_tokens
from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import NO_EXTRAS
from kvstore.tiers.guards import CircuitBreaker, find
from kvstore.transfer.lane import Flushed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.engine.engine import CacheEngine
    from kvstore.paged.base import ChunkBlocks

TIMEOUT_S = 0.2
TOKENS = tokens_of(1, 40)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> FakeTier:
    """Replace the disk of every engine that the test opens."""
    fake = FakeTier()
    install(monkeypatch, fake)
    return fake


def breaker_of(engine: CacheEngine) -> CircuitBreaker:
    assert engine._tiers.disk is not None
    breaker = find(engine._tiers.disk, CircuitBreaker)
    assert breaker is not None
    return breaker


def broken() -> None:
    raise TierError("broken on purpose")


# The four disk faults


def cut(path: Path) -> None:
    os.truncate(path, 5000)


def flip_payload(path: Path) -> None:
    flip(path, 4096 + 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("fault", [cut, flip_payload, empty, Path.unlink])
@pytest.mark.parametrize("when", ["running", "stopped"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_damaged_chunk_file_is_a_miss(
    rig: Rig, tmp_path: Path, fault: Callable[[Path], None], when: str, victim: int
) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
        engine.flush()
        refs = engine._planner.index.lookup(hash_tokens(engine.layout, TOKENS, NO_EXTRAS)).refs
    key = refs[victim].prefix_key.hex()
    if when == "stopped":
        fault(next(tmp_path.glob(f"*/*/{key}-*.safetensors")))
    with rig.open(local_disk=tmp_path) as engine:
        if when == "running":
            fault(next(tmp_path.glob(f"*/*/{key}-*.safetensors")))
        assert rig.retrieve(engine, TOKENS) == victim * CHUNK
        assert engine.lookup(TOKENS) == rig.retrieve(engine, TOKENS) == victim * CHUNK
        check_idle(engine)
        assert not list(tmp_path.glob(f"*/*/{key}-*"))
        assert rig.store(engine, TOKENS) == (8 if victim == 2 else CHUNK)  # only the missing tokens
        assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, TOKENS) == 40


def test_the_folder_vanishes(rig: Rig, tmp_path: Path) -> None:
    with rig.open(slots=3, local_disk=tmp_path / "cache") as engine:
        rig.store(engine, TOKENS)
        engine.flush()
        rig.store(engine, tokens_of(2, 40))  # displaces the first in memory
        engine.flush()
        shutil.rmtree(tmp_path / "cache")
        assert rig.retrieve(engine, TOKENS) == 0
        assert rig.store(engine, tokens_of(3, 40)) == 40
        assert engine.flush()
        assert rig.retrieve(engine, tokens_of(3, 40)) == 40


# A tier that raises


def test_a_tier_that_cannot_be_read(rig: Rig, tier: FakeTier, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    with rig.open(local_disk=tmp_path) as engine, caplog.at_level(logging.WARNING):
        assert engine.lookup(TOKENS) == 40
        tier.before_get = broken
        assert rig.retrieve(engine, TOKENS) == 0
        assert caplog.text.count("cannot read from the fake tier: broken on purpose") == 1  # not once a chunk
        check_idle(engine)
        assert engine.stats().slots_in_use == 0
        # Three failures opened the breaker, so chunks that are only on disk are not promised, but not forgotten either.
        assert engine.lookup(TOKENS) == 0
        assert engine.stats().index.lost_chunks == 0
        tier.before_get = lambda: None
        assert rig.store(engine, tokens_of(2, 16)) == 16
        assert engine.flush() == Flushed(failed=1)
        assert engine.stats().index.writes_failed == 1  # too early for a probe
        breaker_of(engine)._probe_interval_s = 0
        assert rig.store(engine, tokens_of(3, 16)) == 16  # its write is the probe
        assert engine.flush()
        assert breaker_of(engine).answers
        assert engine.lookup(TOKENS) == rig.retrieve(engine, TOKENS) == 40
        assert rig.store(engine, tokens_of(2, 16)) == 0  # known, and written at last
        check_idle(engine)
        assert engine.stats().index.writes_retried == 1
        assert caplog.text.count("is left out") == 1


@pytest.mark.parametrize("outcome", [TierError, Outcome.FULL, Outcome.FAILED])
def test_a_tier_that_cannot_be_written(rig: Rig, tier: FakeTier, tmp_path: Path, outcome: object) -> None:
    if isinstance(outcome, Outcome):
        tier.put_outcome = outcome
    else:
        tier.before_put = broken
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.store(engine, TOKENS) == 40
        check_idle(engine)
        assert rig.retrieve(engine, TOKENS) == 40  # memory still has it
        assert engine.stats().disk_used_bytes == 0
        assert engine.stats().index.writes_failed == 3
    with rig.open(local_disk=tmp_path, local_cpu=False) as engine:
        rig.store(engine, TOKENS)
        check_idle(engine)
        assert rig.retrieve(engine, TOKENS) == 0
        assert engine.stats().slots_in_use == 0


def test_a_fault_nobody_foresaw_in_a_write(
    rig: Rig, tier: FakeTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier.before_put = lambda: 1 / 0
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.store(engine, TOKENS) == 40
        check_idle(engine)
        assert "ZeroDivisionError" in caplog.text
        assert rig.retrieve(engine, TOKENS) == 40


def test_a_fault_nobody_foresaw_in_a_read(rig: Rig, tier: FakeTier, tmp_path: Path) -> None:
    """An unexpected error in a read is a failed read, and leaks nothing."""
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    with rig.open(local_disk=tmp_path) as engine:
        tier.before_get = lambda: 1 / 0
        assert rig.retrieve(engine, TOKENS) == 0
        check_idle(engine)
        tier.before_get = lambda: None
        rig.store(engine, TOKENS)
        assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)


# A fault in the middle of a move


@pytest.mark.parametrize("good", [0, 1, 2])
def test_gather_raises(
    rig: Rig, tier: FakeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, good: int
) -> None:
    tier.before_put = gate
    calls = []
    real: Callable[..., Iterator[object]] = rig.paged._pages_of  # type: ignore[attr-defined]

    def pages_of(chunk: ChunkBlocks, *, alone: bool) -> Iterator[object]:
        calls.append(chunk)
        if len(calls) > good:
            raise RuntimeError("no more")
        return real(chunk, alone=alone)

    with rig.open(local_disk=tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._mover.paged, "_pages_of", pages_of)
            with pytest.raises(RuntimeError, match="no more"):
                rig.store(engine, TOKENS)
        assert engine.lookup(TOKENS) == 0
        gate.open()
        check_idle(engine)
        assert (engine.stats().slots_in_use, engine.stats().disk_used_bytes, tier.chunks) == (0, 0, {})
        assert rig.store(engine, TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)


@pytest.mark.parametrize("from_disk", [False, True])
def test_scatter_raises(
    rig: Rig, tier: FakeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_disk: bool
) -> None:
    def scatter(*_arguments: object) -> None:
        raise RuntimeError("no")

    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    with rig.open(local_disk=tmp_path) as engine:
        if not from_disk:
            rig.retrieve(engine, TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(engine._mover.paged, "scatter_chunks", scatter)
            with pytest.raises(RuntimeError, match="no"):
                rig.retrieve(engine, TOKENS)
        check_idle(engine)
        assert rig.retrieve(engine, TOKENS) == 40  # the chunks in the tiers are sound
        check_idle(engine)


def test_a_read_left_behind_by_a_fault_keeps_its_slot(
    rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk's scatter raises while the second is being read, whose slot must not be reused."""
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    turns = iter(range(100))
    tier.before_get = lambda: gate() if next(turns) else None
    with rig.open(slots=3, local_disk=tmp_path, io_timeout_s=0.2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._mover.paged, "_pages_of", lambda *_, **__: gate.reached.wait(HANG_GUARD_S) and 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rig.retrieve(engine, TOKENS)
        other = tokens_of(2, 40)
        rig.store(engine, other)
        known = engine.lookup(other)
        gate.open()
        assert until(lambda: not any(map(engine._mover.is_stuck, list(engine._mover._stuck))))
        assert rig.retrieve(engine, other) == known < 40
        check_idle(engine)


# A tier that hangs


def test_a_read_that_hangs(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    tier.before_get = gate
    with rig.open(slots=3, local_disk=tmp_path, io_timeout_s=TIMEOUT_S) as engine:
        begin_s = time.monotonic()
        assert rig.retrieve(engine, TOKENS) == 0
        assert time.monotonic() - begin_s < HANG_GUARD_S / 2
        assert engine.stats().mover.read_timeouts == 3
        check_idle(engine)
        assert engine.stats().slots_in_use == 0
        # Reads may still write to every slot, so none can be used, and a store fails without wrong bytes.
        other = tokens_of(2, 40)
        assert rig.store(engine, other) == engine.lookup(other) == 0
        check_idle(engine)
        gate.open()
        assert until(lambda: not any(map(engine._mover.is_stuck, list(engine._mover._stuck))))
        assert rig.store(engine, other) == 40
        assert rig.retrieve(engine, other) == 40
        check_idle(engine)


def test_what_arrived_before_the_hang_counts(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    turns = iter(range(100))
    tier.before_get = lambda: gate() if next(turns) else None
    with rig.open(local_disk=tmp_path, io_timeout_s=TIMEOUT_S, disk_io_threads=1) as engine:
        assert rig.retrieve(engine, TOKENS) == CHUNK
        check_idle(engine)
        assert engine.lookup(TOKENS) == CHUNK
        gate.open()


@pytest.mark.parametrize("what", ["read", "write"])
def test_close_is_bounded(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate, what: str) -> None:
    engine = rig.open(local_disk=tmp_path, io_timeout_s=TIMEOUT_S)
    if what == "write":
        tier.before_put = gate
        rig.store(engine, TOKENS)
        assert gate.reached.wait(HANG_GUARD_S)
        assert rig.retrieve(engine, TOKENS) == 40  # a load does not wait for writes
        assert not engine.flush(TIMEOUT_S)
    else:
        rig.store(engine, TOKENS)
        engine.flush()
        engine.close()
        engine = rig.open(local_disk=tmp_path, io_timeout_s=TIMEOUT_S)
        tier.before_get = gate
        assert rig.retrieve(engine, TOKENS) == 0
    begin_s = time.monotonic()
    assert engine.close(TIMEOUT_S) == (what == "read")
    assert time.monotonic() - begin_s < HANG_GUARD_S / 2
    assert tier.is_closed
    gate.open()
    assert until(lambda: uses_of(engine._planner.index) == 0)  # late ends are still accounted for


def test_a_write_that_was_dropped_is_made_good_for(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate) -> None:
    tier.before_put = gate
    with rig.open(local_disk=tmp_path, max_write_queue=1) as engine:
        assert rig.store(engine, TOKENS) == 40
        gate.open()
        check_idle(engine)
        assert (len(tier.chunks), engine.stats().index.writes_dropped) == (1, 2)
        while len(tier.chunks) < 3:
            written = len(tier.chunks)
            assert rig.store(engine, TOKENS) == 0
            check_idle(engine)
            assert len(tier.chunks) == written + 1
        assert engine.stats().index.writes_retried == 2
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, TOKENS) == 40


def test_a_tail_stays_on_disk_until_its_chunk_is_there(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate) -> None:
    """Otherwise a crash in between would lose both."""
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens_of(1, 24))
        check_idle(engine)
        tier.before_put = gate
        rig.store(engine, tokens_of(1, 32))
        assert gate.reached.wait(HANG_GUARD_S)
        assert sorted(ref.num_blocks for ref in tier.chunks) == [2, 4]
        gate.open()
        check_idle(engine)
        assert [ref.num_blocks for ref in tier.chunks] == [4, 4]


def test_a_tail_stays_on_disk_if_its_chunk_is_not_written(rig: Rig, tier: FakeTier, tmp_path: Path) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens_of(1, 24))
        check_idle(engine)
        tier.put_outcome = Outcome.FULL
        rig.store(engine, tokens_of(1, 32))
        check_idle(engine)
        assert sorted(ref.num_blocks for ref in tier.chunks) == [2, 4]
        tier.put_outcome = Outcome.STORED
        rig.store(engine, tokens_of(1, 32))
        check_idle(engine)
        assert [ref.num_blocks for ref in tier.chunks] == [4, 4]


def test_the_write_queue_is_bounded(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate) -> None:
    tier.before_put = gate
    with rig.open(slots=8, local_disk=tmp_path, max_write_queue=2) as engine:
        assert rig.store(engine, tokens_of(1, 64)) == 64
        assert engine.stats().index.writes_dropped == 2
        assert rig.store(engine, tokens_of(2, 128)) == 96  # two slots are held by the queue
        assert engine.stats().disk_used_bytes == 2 * FILE_BYTES
        assert rig.retrieve(engine, tokens_of(2, 128)) == 96
        gate.open()
        check_idle(engine)
        assert len(tier.chunks) == 2
        assert rig.store(engine, tokens_of(3, 16)) == 16
        check_idle(engine)
        assert len(tier.chunks) == 3


# Removal while something is under way


@pytest.mark.parametrize("everything", [False, True])
def test_clear_while_being_written(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate, everything: bool) -> None:
    begun: list[None] = []

    def begin() -> None:
        begun.append(None)
        gate()

    tier.before_put = begin
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
        assert until(lambda: len(begun) == 3)
        assert engine.clear(None if everything else TOKENS) == 3
        assert engine.lookup(TOKENS) == 0
        assert rig.store(engine, TOKENS) == 0  # the old ones are still being removed
        gate.open()
        check_idle(engine)
        assert (tier.chunks, engine.stats().slots_in_use, engine.stats().disk_used_bytes) == ({}, 0, 0)
        assert rig.store(engine, TOKENS) == 40
        check_idle(engine)
        assert len(tier.chunks) == 3


def test_a_tail_superseded_while_being_written(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate) -> None:
    tier.before_put = gate
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens_of(1, 24))
        rig.store(engine, tokens_of(1, 32))
        gate.open()
        check_idle(engine)
        assert {ref.num_blocks for ref in tier.chunks} == {4}
        assert rig.retrieve(engine, tokens_of(1, 32)) == 32


def test_clear_while_being_loaded(rig: Rig, tier: FakeTier, tmp_path: Path, gate: Gate) -> None:
    """A clear waits for the load, which gets right bytes, and then all is gone."""
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
    tier.before_get = gate
    with rig.open(local_disk=tmp_path) as engine:
        loaded: list[int] = []
        loader = threading.Thread(target=lambda: loaded.append(rig.retrieve(engine, TOKENS)))
        loader.start()
        assert gate.reached.wait(HANG_GUARD_S)
        assert engine.lookup(TOKENS) == 40  # decisions do not wait for moves
        clearer = threading.Thread(target=engine.clear)
        clearer.start()
        gate.open()
        loader.join(HANG_GUARD_S)
        clearer.join(HANG_GUARD_S)
        assert (loaded, engine.lookup(TOKENS)) == ([40], 0)
        check_idle(engine)
        assert tier.chunks == {}
