"""The mover alone: its reports of each plan, and that every write is reported exactly once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.few_threads import refuse_threads
from support.gate import Gate
from support.mover_bench import HANG_GUARD_S, Bench, key_of, ref_of
from support.rig import BLOCKS_PER_CHUNK, FakeTier

from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.tiers.guards import Guard
from kvstore.transfer import mover
from kvstore.transfer.lane import WRITE_THREADS, Arrival, Flushed
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, StoreJob, as_block_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.paged.base import ChunkBlocks
    from kvstore.paged.streams import DeviceEvent


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def bench(tier: FakeTier) -> Iterator[Bench]:
    bench = Bench(tier)
    yield bench
    bench.mover.close(HANG_GUARD_S)


def test_there_and_back(bench: Bench) -> None:
    assert bench.store(1, 2, 3) == set()
    assert bench.load(2) == set()
    assert bench.held() == [8, 9, 10, 11]
    assert bench.load(3, first_block=1) == set()
    assert bench.held() == [13, 14, 15, 11]
    assert bench.mover.flush(HANG_GUARD_S)
    assert sorted(bench.written) == [(ref_of(n), True) for n in (1, 2, 3)]
    counters = bench.mover.counters
    assert (counters.chunks_stored, counters.chunks_loaded, counters.chunks_loaded_from_disk) == (3, 2, 0)
    block_bytes = bench.rig.layout.block_bytes
    assert (counters.bytes_gathered, counters.bytes_scattered) == (12 * block_bytes, 7 * block_bytes)


def test_from_disk(bench: Bench) -> None:
    bench.store(1, 2)
    bench.mover.flush(HANG_GUARD_S)
    bench.cpu.clear()
    assert bench.results(1, from_disk=False) == ({key_of(1)}, set())  # not in memory
    assert bench.results(1, 5, 2) == ({key_of(5)}, {key_of(5)})
    assert bench.held() == [8, 9, 10, 11]
    assert bench.load(2) == set()
    assert bench.mover.counters.mislabelled_slots == 1
    assert bench.mover.counters.chunks_loaded_from_disk == 2


def test_without_a_disk() -> None:
    bench = Bench(None)
    assert bench.store(1, write=False) == set()
    assert bench.load(1) == set()
    assert bench.load(2, from_disk=True) == {key_of(2)}
    bench.mover.remove(Place.DISK, [ref_of(1)])
    bench.mover.clear()
    assert bench.load(1) == {key_of(1)}
    assert bench.mover.close(HANG_GUARD_S)
    assert bench.written == []


def test_refused_stores_are_reported_like_others(bench: Bench) -> None:
    jobs = [bench.store_job(1), bench.store_job(2, write=False)]
    assert bench.mover.refuse(jobs) == {key_of(1), key_of(2)}
    assert bench.written == [(ref_of(1), False)]


@pytest.mark.parametrize("together", [1, 2, 4])
def test_every_write_is_reported_once_when_gather_raises(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(mover, "GATHER_BYTES", together * bench.mover.cpu.slot_bytes)
    bad = StoreJob(StoreStep(ref_of(2), 2, (Place.DISK,)), as_block_ids([999]))
    with pytest.raises(ValueError, match="999"):
        bench.mover.store([bench.store_job(1), bad, bench.store_job(3), bench.store_job(4, write=False)])
    is_first_written = together == 1  # a chunk gathered together with one that fails is not written
    assert bench.mover.flush(HANG_GUARD_S) == Flushed(failed=2 if is_first_written else 3)
    assert sorted(bench.written) == [(ref_of(1), is_first_written), (ref_of(2), False), (ref_of(3), False)]


@pytest.mark.parametrize("together", [1, 2, 3])
def test_the_first_chunks_are_written_before_the_last_are_gathered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(mover, "GATHER_BYTES", together * bench.mover.cpu.slot_bytes)
    gathered: list[tuple[int, int]] = []  # chunks of a call, and those known to be complete before it
    gather = bench.mover.paged.gather_chunks

    def noting(chunks: Sequence[ChunkBlocks]) -> Sequence[DeviceEvent]:
        gathered.append((len(chunks), bench.mover.counters.chunks_stored))
        return gather(chunks)

    monkeypatch.setattr(bench.mover.paged, "gather_chunks", noting)
    assert bench.mover.store([bench.store_job(chunk) for chunk in range(1, 4)]) == set()
    expected = {1: [(1, 0), (1, 1), (1, 2)], 2: [(2, 0), (1, 2)], 3: [(3, 0)]}
    assert gathered == expected[together]
    assert bench.mover.flush(HANG_GUARD_S)


@pytest.mark.parametrize(("write", "expected"), [(True, [1, 2, 3]), (False, [4, 2])])
def test_where_a_slower_tier_waits_few_chunks_are_gathered_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, write: bool, expected: list[int]
) -> None:
    slot_bytes = bench.mover.cpu.slot_bytes
    monkeypatch.setattr(mover, "FIRST_BYTES", slot_bytes)
    monkeypatch.setattr(mover, "GATHER_BYTES", 4 * slot_bytes)
    gathered: list[int] = []
    gather = bench.mover.paged.gather_chunks

    def noting(chunks: Sequence[ChunkBlocks]) -> Sequence[DeviceEvent]:
        gathered.append(len(chunks))
        return gather(chunks)

    monkeypatch.setattr(bench.mover.paged, "gather_chunks", noting)
    assert bench.store(1, 2, 3, 4, 5, 6, write=write) == set()
    assert gathered == expected
    assert bench.mover.flush(HANG_GUARD_S)


@pytest.mark.parametrize(
    ("together", "parts", "expected"),
    [(1, 1, [1, 1, 1, 1]), (2, 1, [2, 2]), (9, 1, [4]), (9, 2, [2, 2]), (9, 4, [1, 1, 1, 1]), (0, 1, [1, 1, 1, 1])],
)
def test_what_arrives_is_scattered_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, together: int, parts: int, expected: list[int]
) -> None:
    """Chunks wait for others while more is in transit, and the last ones for nothing."""
    assert bench.store(1, 2, 3, 4) == set()
    assert bench.mover.flush(HANG_GUARD_S)
    monkeypatch.setattr(mover, "SCATTER_BYTES", together * bench.mover.cpu.slot_bytes)
    monkeypatch.setattr(mover, "SCATTER_PARTS", parts)
    start_read = bench.mover.start_read

    class Transit(Future[Arrival]):
        """Is in transit until somebody waits for it."""

        def done(self) -> bool:
            return False

    def read(step: LoadStep, layers: range | None = None) -> Future[Arrival]:
        moving: Transit = Transit()
        moving.set_result(start_read(step, layers).result())
        return moving

    scattered: list[int] = []
    scatter = bench.mover.paged.scatter_chunks

    def noting(chunks: Sequence[ChunkBlocks]) -> Sequence[DeviceEvent]:
        scattered.append(len(chunks))
        return scatter(chunks)

    monkeypatch.setattr(bench.mover, "start_read", read)
    monkeypatch.setattr(bench.mover.paged, "scatter_chunks", noting)
    jobs = [
        LoadJob(LoadStep(ref_of(number), number, Place.DISK), as_block_ids(range(4 * number, 4 * number + 4)), 0)
        for number in (1, 2, 3, 4)
    ]
    assert bench.mover.load(jobs) == LoadResult(set(), set())
    assert scattered == expected


def test_a_slot_whose_gather_fails_midway_holds_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hold the former content either, as some of that has been overwritten."""
    bench.store(1, write=False)

    def broken(chunks: Sequence[ChunkBlocks]) -> None:
        chunks[0].payload[:100] = 0xEE
        raise ZeroDivisionError

    job = StoreJob(StoreStep(ref_of(2), 1, ()), as_block_ids(range(8, 12)))
    assert bench.load(1) == set()
    with monkeypatch.context() as patch:
        patch.setattr(bench.mover.paged, "gather_chunks", broken)
        with pytest.raises(ZeroDivisionError):
            bench.mover.store([job])
    assert bench.load(1) == {key_of(1)}
    assert bench.mover.store([job]) == set()
    assert bench.load(1) == {key_of(1)}


def test_a_chunk_is_named_only_when_its_copy_is_there(
    bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device a gather is only launched, and its bytes are there once it was waited for."""
    gather_chunks, paged = bench.mover.paged.gather_chunks, bench.mover.paged
    launched: list[ChunkBlocks] = []

    def launch(chunks: Sequence[ChunkBlocks]) -> list[ChunkBlocks]:
        for chunk in chunks:
            chunk.payload[:] = 0xEE
        launched.extend(chunks)
        return list(chunks)

    def reach(event: ChunkBlocks) -> None:
        number = int(event.block_ids[0]) // BLOCKS_PER_CHUNK
        assert bench.cpu.read(number, ref_of(number)) is None, "may be read before it is there"
        assert ref_of(number) not in tier.chunks
        assert number not in {write.slot for write in bench.mover._lanes[Place.DISK]._writing}
        gather_chunks([event])

    with monkeypatch.context() as patch:
        patch.setattr(paged, "gather_chunks", launch)
        patch.setattr(paged.streams, "reach", reach)
        assert bench.store(1, 2, 3) == set()
    assert len(launched) == 3
    for number in (1, 2, 3):
        assert bench.load(number) == set()
        assert bench.held() == list(range(4 * number, 4 * number + 4))


def test_removed_while_being_written(bench: Bench, tier: FakeTier) -> None:
    gate = threading.Event()
    tier.before_put = lambda: gate.wait(HANG_GUARD_S)
    bench.store(1, 2)
    bench.mover.remove(Place.DISK, [ref_of(1), ref_of(7)])
    gate.set()
    assert bench.mover.flush(HANG_GUARD_S)
    assert sorted(bench.written) == [(ref_of(1), False), (ref_of(2), True)]
    assert list(tier.chunks) == [ref_of(2)]
    bench.mover.remove(Place.DISK, [ref_of(2)])
    assert bench.mover.settle(HANG_GUARD_S)
    assert tier.chunks == {}


def test_cleared_while_being_written(bench: Bench, tier: FakeTier) -> None:
    gate = threading.Event()
    tier.before_put = lambda: gate.wait(HANG_GUARD_S)
    bench.store(1, 2, 3, 4)
    bench.mover.clear()
    assert bench.load(1) == {key_of(1)}
    gate.set()
    assert bench.mover.flush(HANG_GUARD_S)
    assert sorted(bench.written) == [(ref_of(n), False) for n in (1, 2, 3, 4)]
    assert tier.chunks == {}


def test_a_tier_that_cannot_remove_or_clear(bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise TierError("broken")

    bench.store(1)
    bench.mover.flush(HANG_GUARD_S)
    monkeypatch.setattr(tier, "remove", broken)
    monkeypatch.setattr(tier, "clear", broken)
    bench.mover.remove(Place.DISK, [ref_of(1)])
    bench.mover.clear()
    assert bench.load(1) == {key_of(1)}


def test_writes_given_up_by_close_are_reported(tier: FakeTier) -> None:
    bench = Bench(tier, timeout_s=0.5)
    gate = threading.Event()
    tier.before_put = lambda: gate.wait(HANG_GUARD_S)
    try:
        bench.store(1, 2, 3, 4, 5, 6)
        assert not bench.mover.close(0.05)
        given_up = 6 - WRITE_THREADS
        assert [stored for _, stored in bench.written] == [False] * given_up
    finally:
        gate.set()
    assert bench.mover.flush(HANG_GUARD_S) == Flushed(failed=given_up)
    assert sorted(ref for ref, _ in bench.written) == [ref_of(n) for n in range(1, 7)]


def test_flush_ends_even_if_a_report_fails(tier: FakeTier) -> None:
    bench = Bench(tier)
    bench.mover._lanes[Place.DISK]._on_written = lambda *_: 1 / 0  # type: ignore[assignment]
    bench.store(1)
    assert bench.mover.flush(HANG_GUARD_S)
    assert bench.mover.close(HANG_GUARD_S)


def test_a_slot_of_a_hanging_read_is_not_used(tier: FakeTier) -> None:
    bench = Bench(tier, timeout_s=0.05)
    gate = threading.Event()
    bench.store(1)
    bench.mover.flush(HANG_GUARD_S)
    tier.before_get = lambda: gate.wait(HANG_GUARD_S)
    try:
        assert bench.results(1) == ({key_of(1)}, set())  # not lost: the disk did not answer
        before = np.array(bench.cpu._pool.slot(1))
        assert bench.store(1, 2) == {key_of(1)}
        assert bench.load(1, from_disk=True) == {key_of(1)}  # at once: no second read into that slot
        assert np.array_equal(before, bench.cpu._pool.slot(1))
        assert (ref_of(1), False) in bench.written
        (read,) = bench.mover._stuck[1]
    finally:
        gate.set()
    assert read.result(HANG_GUARD_S) == [Outcome.HIT]
    assert bench.load(1) == {key_of(1)}  # a late read is not readable
    assert bench.store(1) == set()
    assert bench.load(1) == set()
    assert bench.mover.close(HANG_GUARD_S)


def test_a_read_for_which_there_is_no_thread_never_begins(
    bench: Bench, tier: FakeTier, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads another chunk would read it later, into a slot that has yet another one by then."""
    bench.store(1, 2)
    bench.mover.flush(HANG_GUARD_S)
    bench.cpu.clear()
    tier.before_get = gate
    refuse_threads(monkeypatch, "kvstore-read-fake_1")
    threading.Timer(0.05, gate.open).start()
    assert bench.results(1, 2) == ({key_of(2)}, set())
    assert bench.mover.store([StoreJob(StoreStep(ref_of(5), 2, ()), as_block_ids(range(20, 24)))]) == set()
    assert bench.results(1) == (set(), set())  # after all that waits for the thread
    slot = bench.cpu.read(2, ref_of(5))
    assert slot is not None
    assert slot[0] == 20


def test_a_load_without_blocks_only_fills_the_slot(bench: Bench) -> None:
    bench.store(1)
    bench.mover.flush(HANG_GUARD_S)
    bench.cpu.clear()
    before = bench.held()
    assert bench.mover.load([LoadJob(LoadStep(ref_of(1), 3, Place.DISK), as_block_ids([]), 0)]) == (set(), set())
    assert bench.held() == before
    assert bench.cpu.read(3, ref_of(1)) is not None


def test_a_write_without_a_gather_writes_what_the_slot_holds(bench: Bench, tier: FakeTier) -> None:
    bench.store(1, write=False)
    step = StoreStep(ref_of(1), 1, (Place.DISK,), gather=False)
    assert bench.mover.store([StoreJob(step, as_block_ids([0, 0, 0, 0]))]) == set()
    assert bench.mover.flush(HANG_GUARD_S)
    assert bench.written == [(ref_of(1), True)]
    assert bench.load(1, from_disk=True) == set()
    assert bench.held() == [4, 5, 6, 7]
    assert bench.mover.counters.chunks_stored == 1


def test_a_slot_to_which_nothing_came_has_not_what_was_there_before(
    bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store(1)
    assert bench.mover.flush(HANG_GUARD_S)
    gate = Gate()
    monkeypatch.setattr(tier, "remove", lambda _refs: gate())
    bench.mover.remove(Place.DISK, [ref_of(1)])  # from now on it is not read; its slot still has it
    ids = as_block_ids(range(60, 60 - BLOCKS_PER_CHUNK, -1))
    jobs = [LoadJob(LoadStep(ref_of(1), 1, source), ids, 0) for source in (Place.DISK, Place.MEMORY)]
    failed = bench.mover.load(jobs[:1]).failed, bench.mover.load(jobs[1:]).failed
    gate.open()
    assert failed == ({key_of(1)}, {key_of(1)})


@pytest.mark.parametrize("forgets", [Mover.clear, lambda mover: mover.reset(Namespace({"model": "another"}))])
def test_what_is_read_while_all_is_forgotten_is_in_no_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, forgets: Callable[[Mover], None]
) -> None:
    bench.store(1)
    assert bench.mover.flush(HANG_GUARD_S)
    other, clear = bench.mover.for_thread(), bench.cpu.clear

    def clear_then_load() -> None:
        clear()
        other.load([LoadJob(LoadStep(ref_of(1), 3, Place.DISK), as_block_ids([]), 0)])

    monkeypatch.setattr(bench.cpu, "clear", clear_then_load)
    forgets(bench.mover)
    assert bench.cpu.read(3, ref_of(1)) is None


@pytest.mark.parametrize("outcome", [Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED])
def test_only_what_is_missing_or_damaged_is_lost(
    bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    monkeypatch.setattr(tier, "get", lambda transfers: [outcome])
    lost = set() if outcome is Outcome.FAILED else {key_of(1)}
    assert bench.results(1) == ({key_of(1)}, lost)


def test_all_reads_are_over_when_several_raise(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one of them would write to a slot that was given back."""
    lock, begun, ended = threading.Lock(), [0], [0]

    def fail(*_: object) -> None:
        with lock:
            begun[0] += 1
            number = begun[0]
        time.sleep(0.05 * number)
        with lock:
            ended[0] += 1
        raise ZeroDivisionError

    monkeypatch.setattr(Guard, "get", fail)  # a defect above the tier, whose own would be a failure of the tier
    with pytest.raises(ZeroDivisionError):
        bench.results(1, 2, 3, 4)
    assert ended == begun


def test_a_chunk_of_a_hanging_write_is_in_use_until_it_ends(tier: FakeTier) -> None:
    bench = Bench(tier, timeout_s=0.05)
    gate = threading.Event()
    tier.before_put = lambda: gate.wait(HANG_GUARD_S)
    try:
        bench.store(1)
        assert not bench.mover.flush(0.3)
        assert not bench.mover.close(0.05)
        assert bench.written == []  # the disk may still read the slot
    finally:
        gate.set()
    assert bench.mover.flush(HANG_GUARD_S)
    assert bench.written == [(ref_of(1), True)]


def test_a_removal_that_comes_after_close_is_dropped(tier: FakeTier) -> None:
    bench, gate = Bench(tier, timeout_s=0.05), Gate()
    tier.before_put = gate
    try:
        bench.store(1)
        assert gate.reached.wait(HANG_GUARD_S)
        bench.mover.remove(Place.DISK, [ref_of(1)])
        assert not bench.mover.close(0.05)
    finally:
        gate.open()
    assert bench.mover.flush(HANG_GUARD_S)
    assert bench.written == [(ref_of(1), False)]


def test_block_ids() -> None:
    assert as_block_ids([3, 1]).dtype == np.int64
    assert as_block_ids([]).shape == (0,)
