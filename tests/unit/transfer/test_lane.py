"""The lane between slots and one tier: order and epochs, with the tier held up wherever possible."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate
from support.lane_bench import NEW, NEWER, Bench, ref_of
from support.rig import BLOCKS_PER_CHUNK, FILE_BYTES, SLOT_BYTES, FakeTier, Rig, install, tokens_of

from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.base import Transfer
from kvstore.transfer.lane import WRITE_THREADS, Flushed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# -- the epoch of a write ----------------------------------------------------------------------------------------------


def test_a_write_overtaken_by_reset_stores_nothing(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """Between the check of its slot and the tier is a question to others, which takes time."""
    bench = Bench(asks=True)
    puts: list[None] = []
    bench.tier.before_put = lambda: puts.append(None)
    monkeypatch.setattr(bench.tier, "contains", gate.before(bench.tier.contains))
    bench.write(1)
    assert gate.reached.wait(HANG_GUARD_S)
    bench.lane.reset(NEW)
    assert bench.lane.settle(HANG_GUARD_S)
    assert bench.tier.namespace_id == NEW.id
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert puts == [], "nor is the tier asked to: it might be one that does not look at the epoch"
    assert bench.held() == set()
    assert bench.written == [(ref_of(1), False)]
    bench.lane.close()


def test_a_put_overtaken_by_reset_stores_nothing(bench: Bench, gate: Gate) -> None:
    """It is held up later, between the lane and the tier's own lock, and no removal could repair it."""
    bench.tier.before_put = gate
    bench.write(1)
    assert gate.reached.wait(HANG_GUARD_S)
    bench.lane.reset(NEW)
    assert bench.lane.settle(HANG_GUARD_S)
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.held() == set()
    assert bench.written == [(ref_of(1), False)]
    assert bench.forgotten == [NEW], "there was nothing to remove"


def test_a_write_of_the_new_epoch_names_it(bench: Bench) -> None:
    bench.lane.reset(NEW)
    bench.write(1)
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.held() == {ref_of(1)}
    assert bench.written == [(ref_of(1), True)]


@pytest.mark.parametrize("sweep", ["clear", "reset"])
def test_writes_that_wait_for_a_thread_end_with_their_epoch(bench: Bench, gate: Gate, sweep: str) -> None:
    bench.tier.before_put = gate
    bench.write(*range(1, WRITE_THREADS + 1))
    bench.write(10, 11)
    assert gate.reached.wait(HANG_GUARD_S)
    bench.lane.clear() if sweep == "clear" else bench.lane.reset(NEW)
    assert bench.lane.settle(HANG_GUARD_S)
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.held() == set()
    assert sorted(bench.written) == [(ref_of(n), False) for n in (*range(1, WRITE_THREADS + 1), 10, 11)]


def test_a_write_reads_only_a_slot_that_still_has_its_chunk(bench: Bench, gate: Gate) -> None:
    """The index keeps slots from others until their writes have ended. If it does not, the answer is no write."""
    bench.tier.before_put = gate
    bench.write(*range(1, WRITE_THREADS + 1), 10)
    bench.cpu.claim(10)[:] = 77
    bench.cpu.publish(10, ref_of(11))
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S) == Flushed(failed=1)
    assert bench.held() == {ref_of(n) for n in range(1, WRITE_THREADS + 1)}
    assert (ref_of(10), False) in bench.written


# -- reads and resets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sweep", ["clear", "reset"])
def test_a_read_begun_before_brings_nothing(bench: Bench, gate: Gate, sweep: str) -> None:
    bench.store(1)
    hit, get = gate, bench.tier.get

    def late(transfers: Sequence[Transfer]) -> list[Outcome]:
        outcomes = get(transfers)
        hit()
        return outcomes

    bench.tier.get = late  # type: ignore[method-assign]
    reading = bench.lane.read(ref_of(1), 15)
    assert gate.reached.wait(HANG_GUARD_S)
    bench.lane.clear() if sweep == "clear" else bench.lane.reset(NEW)
    gate.open()
    assert reading.result(HANG_GUARD_S).outcome is Outcome.FAILED


@pytest.mark.parametrize("sweep", ["clear", "reset"])
def test_nothing_is_read_while_everything_goes(bench: Bench, gate: Gate, sweep: str) -> None:
    """Neither the caller of the reset nor a reader waits."""
    bench.store(1)
    bench.before_forgetting = gate
    bench.lane.clear() if sweep == "clear" else bench.lane.reset(NEW)
    assert bench.read(1) is Outcome.MISS, "it is still there, and waits or goes"
    assert gate.reached.wait(HANG_GUARD_S)
    assert bench.read(1) is Outcome.MISS
    assert bench.lane.borrow([ref_of(1)]).result(HANG_GUARD_S).outcomes == [Outcome.FAILED]
    bench.write(2)
    assert not bench.lane.settle(0)
    assert bench.written == [], "it waits behind"
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.held() == {ref_of(2)}
    assert bench.read(2) is Outcome.HIT


def test_a_slot_emptied_since_it_was_claimed_holds_nothing() -> None:
    """A read that was begun before a reset may be declared whole after it."""
    cpu = LabelledPool(SlabPool(2, SLOT_BYTES))
    cpu.claim(1)
    cpu.clear()
    cpu.publish(1, ref_of(1))
    assert cpu.read(1, ref_of(1)) is None
    cpu.claim(1)
    cpu.publish(1, ref_of(1))
    assert cpu.read(1, ref_of(1)) is not None
    cpu.publish(0, ref_of(2))
    assert cpu.read(0, ref_of(2)) is None, "nobody has claimed it"
    cpu.close()


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_write_is_not_undone_by_a_removal_before_it(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store(1)
    bench.before_forgetting = gate
    removals = bench.lane._removals
    waits, wait = threading.Event(), removals.wait

    def waiting(number: int, timeout_s: float | None = None) -> bool:
        waits.set()
        return wait(number, timeout_s)

    monkeypatch.setattr(removals, "wait", waiting)
    bench.lane.remove([ref_of(1)])
    assert gate.reached.wait(HANG_GUARD_S)
    assert bench.read(1) is Outcome.MISS, "though it is still there"
    assert bench.lane.borrow([ref_of(2), ref_of(1)]).result(HANG_GUARD_S).outcomes == [Outcome.FAILED] * 2
    bench.write(1)
    assert waits.wait(HANG_GUARD_S), "it goes to the tier beside the removal"
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.forgotten == [[ref_of(1)]]
    assert bench.held() == {ref_of(1)}
    assert bench.written == [(ref_of(1), True)]
    assert bench.read(1) is Outcome.HIT


def test_removals_that_wait_are_carried_out_together(bench: Bench, gate: Gate) -> None:
    bench.store(1, 2, 3, 4)
    bench.before_forgetting = gate
    bench.lane.remove([ref_of(1)])
    assert gate.reached.wait(HANG_GUARD_S)
    for number in (2, 3, 2):
        bench.lane.remove([ref_of(number)])
    assert bench.lane.flush(0) == Flushed(pending=3)
    gate.open()
    assert bench.lane.settle(HANG_GUARD_S)
    assert bench.forgotten == [[ref_of(1)], [ref_of(2), ref_of(3)]]
    assert bench.held() == {ref_of(4)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_clear_that_fails_removes_what_is_known_one_by_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Otherwise forgotten chunks would keep their room."""
    bench.store(1, 2, 3)
    if fails:
        monkeypatch.setattr(bench.tier, "clear", Mock(side_effect=TierError("no")))
    bench.lane.clear([ref_of(1), ref_of(3)])
    assert bench.lane.settle(HANG_GUARD_S)
    assert bench.held() == ({ref_of(2)} if fails else set())
    assert ([ref_of(1), ref_of(3)] in bench.forgotten) == fails


def test_removals_that_wait_are_carried_out_though_the_clear_behind_them_fails(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if two of them fail: chunks that were found to be wrong must not be found again."""
    bench.store(1, 2, 3)
    bench.before_forgetting = gate
    bench.lane.remove([ref_of(4)])
    assert gate.reached.wait(HANG_GUARD_S)
    monkeypatch.setattr(bench.tier, "clear", Mock(side_effect=TierError("no")))
    bench.lane.remove([ref_of(1)])
    bench.lane.clear()
    bench.lane.remove([ref_of(2)])
    bench.lane.clear()
    assert bench.lane.flush(0).pending
    gate.open()
    assert bench.lane.settle(HANG_GUARD_S)
    assert bench.held() == {ref_of(3)}
    assert bench.read(1) is Outcome.MISS


def test_many_removals_are_carried_out_in_parts(bench: Bench, gate: Gate) -> None:
    """A call to the tier has a deadline; a write waits for the last part."""
    refs = [ChunkRef(number.to_bytes(16, "big"), BLOCKS_PER_CHUNK) for number in range(2500)]
    bench.before_forgetting = gate
    bench.lane.remove(refs)
    bench.write(1)
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert [len(part) for part in bench.forgotten if isinstance(part, list)] == [1024, 1024, 452]
    assert {ref for part in bench.forgotten if isinstance(part, list) for ref in part} == set(refs)
    assert bench.held() == {ref_of(1)}


def test_a_reset_takes_the_place_of_what_waits(bench: Bench, gate: Gate) -> None:
    """It also replaces an earlier reset, but no removals, which come first: others may still be in the epoch that ends.

    A clear after it has nothing to do. Later calls are carried out later.
    """
    bench.before_forgetting = gate
    bench.lane.remove([ref_of(1)])
    assert gate.reached.wait(HANG_GUARD_S)
    bench.lane.remove([ref_of(2)])
    bench.lane.clear()
    bench.lane.reset(NEW)
    bench.lane.reset(NEWER)
    bench.lane.clear()
    bench.lane.remove([ref_of(3)])
    bench.write(4)
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.forgotten == [[ref_of(1)], [ref_of(2)], NEWER, [ref_of(3)]]
    assert bench.tier.namespace_id == NEWER.id
    assert bench.held() == {ref_of(4)}


def test_a_chunk_removed_while_it_waits_is_not_written(bench: Bench, gate: Gate) -> None:
    bench.tier.before_put = gate
    bench.write(*range(1, WRITE_THREADS + 1), 10)
    bench.lane.remove([ref_of(10)])
    assert bench.lane.settle(HANG_GUARD_S)
    assert bench.forgotten == []
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert ref_of(10) not in bench.held()
    assert bench.forgotten == [[ref_of(10)]], "an older one of it may be there"
    assert (ref_of(10), False) in bench.written


def test_a_removal_that_fails_holds_up_nobody(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """This holds for an error of the tier and for a defect, which must be reported."""

    def fail(error: Exception) -> None:
        raise error

    bench.store(1, 2)
    bench.before_forgetting = lambda: fail(TierError("broken"))
    bench.lane.remove([ref_of(1)])
    assert bench.lane.settle(HANG_GUARD_S)
    bench.before_forgetting = lambda: fail(ZeroDivisionError())
    bench.lane.remove([ref_of(2)])
    bench.write(3)
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.written == [(ref_of(3), True)]
    bench.lane.close()  # or the last one might not have reported it yet
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]


def test_a_report_that_fails_keeps_no_other_from_being_made(bench: Bench, gate: Gate) -> None:
    """Two chunks were removed while they were written: both are reported by the removal."""

    def report(ref: ChunkRef, outcome: Outcome) -> None:
        bench.written.append((ref, outcome is Outcome.STORED))
        raise ZeroDivisionError

    bench.lane._on_written = report
    bench.tier.before_put = gate
    bench.write(1, 2, 3)
    bench.lane.remove([ref_of(1), ref_of(2), ref_of(3)])
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert sorted(bench.written) == [(ref_of(number), False) for number in (1, 2, 3)]


def test_close_gives_up_what_waits(bench: Bench, gate: Gate) -> None:
    """This includes a write that waits behind it: its chunk is reported, and no thread is left."""
    bench.store(1, 2)
    bench.before_forgetting = gate
    bench.lane.remove([ref_of(1)])
    assert gate.reached.wait(HANG_GUARD_S)
    bench.lane.remove([ref_of(2)])
    bench.write(3)
    closing = threading.Thread(target=bench.lane.close)
    closing.start()
    while not bench.written:  # the write has ended, the removal goes on
        closing.join(0.01)
    assert closing.is_alive()
    assert bench.written == [(ref_of(3), False)]
    gate.open()
    closing.join(HANG_GUARD_S)
    assert not closing.is_alive()
    assert bench.forgotten == [[ref_of(1)]]
    assert bench.tier.is_closed
    bench.lane.remove([ref_of(2)])
    bench.lane.clear()
    bench.lane.reset(NEW)
    assert bench.forgotten == [[ref_of(1)]]


def test_a_write_for_which_no_thread_can_be_started_has_failed(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is reported, or its slot would stay in use."""
    bench.tier.before_put = gate
    refuse_threads(monkeypatch, "kvstore-write-fake_1")
    bench.write(1, 2)
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S) == Flushed(failed=1)
    assert sorted(bench.written) == [(ref_of(1), True), (ref_of(2), False)]


def test_a_removal_needs_no_further_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, "kvstore-order")
    bench.lane.remove([ref_of(1)])
    assert bench.lane.settle(HANG_GUARD_S)


# -- what a flush tells ------------------------------------------------------------------------------------------------


def test_a_flush_tells_what_was_not_written(bench: Bench) -> None:
    bench.tier.put_outcome = Outcome.FULL
    bench.write(1, 2)
    assert bench.lane.flush(HANG_GUARD_S) == Flushed(full=2)
    bench.tier.put_outcome = Outcome.FAILED
    bench.write(3)
    bench.lane.refuse(ref_of(4))
    assert bench.lane.flush(HANG_GUARD_S) == Flushed(failed=2)
    bench.tier.put_outcome = Outcome.STORED
    bench.write(5)
    assert bench.lane.flush(HANG_GUARD_S) == Flushed()


def test_a_flush_does_not_tell_of_what_nobody_wants(bench: Bench, gate: Gate) -> None:
    bench.tier.put_outcome = Outcome.FAILED
    bench.tier.before_put = gate
    bench.write(1, 2)
    bench.lane.remove([ref_of(1)])
    bench.lane.clear()
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S) == Flushed()


def test_an_engine_on_a_full_disk_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tier = FakeTier()
    tier.put_outcome = Outcome.FULL
    install(monkeypatch, tier)
    rig = Rig()
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens_of(1, 32))
        flushed = engine.flush()
        assert not flushed
        assert flushed == Flushed(full=2)
        assert engine.flush(), "there is nothing new to tell"
        tier.put_outcome = Outcome.STORED
        rig.store(engine, tokens_of(1, 32))
        assert engine.flush()
        assert len(tier.chunks) == 2


def test_an_engine_tells_what_was_never_queued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gate: Gate) -> None:
    tier = FakeTier()
    tier.before_put = gate
    install(monkeypatch, tier)
    rig = Rig()
    with rig.open(local_disk=tmp_path, max_write_queue=1) as engine:
        rig.store(engine, tokens_of(1, 48))
        assert engine.flush(0) == Flushed(full=2, pending=1)
        gate.open()
        assert engine.flush() == Flushed()


# -- the model's thread ------------------------------------------------------------------------------------------------


def test_storing_waits_for_no_removal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gate: Gate) -> None:
    """Although the disk hangs in each removal, room is made for stores, which do not wait for it."""
    tier = FakeTier(capacity_bytes=2 * FILE_BYTES)
    install(monkeypatch, tier)
    rig = Rig()
    with rig.open(local_disk=tmp_path, max_local_disk_bytes=2 * FILE_BYTES, cache_policy="LRU") as engine:
        for seed in (1, 2):
            rig.store(engine, tokens_of(seed, 16))
            assert engine.flush()
        monkeypatch.setattr(tier, "remove", gate.before(tier.remove))
        for seed in (3, 4):
            assert rig.store(engine, tokens_of(seed, 16)) == 16
        assert gate.reached.wait(HANG_GUARD_S)
        assert rig.retrieve(engine, tokens_of(4, 16)) == 16
        gate.open()
        assert engine.flush()
        assert len(tier.chunks) == 2


def test_a_buffer_is_read_before_its_slot_is_given_back(bench: Bench, gate: Gate) -> None:
    """A slot that waits behind a removal is in use: it is reported once it has been written, and not before."""
    seen: list[ByteArray] = []
    put = bench.tier.put

    def note(transfers: Sequence[Transfer]) -> list[Outcome]:
        seen.extend(transfer.buffer.copy() for transfer in transfers)
        return put(transfers)

    bench.tier.put = note  # type: ignore[method-assign]
    bench.before_forgetting = gate
    bench.lane.remove([ref_of(9)])
    bench.write(3)
    assert bench.written == []
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert (seen[0] == 3).all()
