"""The wrappers, each around a tier in a dictionary, with real threads where they matter."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.redis_server import wait_for
from support.rig import BLOCKS_PER_CHUNK, FILE_BYTES, NAMESPACE, SLOT_BYTES, FakeTier
from support.schedules import schedules

from kvstore.chunks import ByteArray, ChunkRef, Outcome
from kvstore.errors import ClosedError, InvalidCallError, TierError, TierTimeoutError
from kvstore.testing.faults import Fault, FaultInjector, FaultKind
from kvstore.testing.latency import Latency
from kvstore.tiers.base import Loan, Tier, Transfer
from kvstore.tiers.guards import (
    BreakerState,
    CircuitBreaker,
    Deadline,
    GuardOptions,
    LatencyHistogram,
    Statistics,
    TierWrapper,
    find,
    guarded,
    layers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HANG_GUARD_S = 30.0
BRIEF_S = 0.02
HIT, MISS, STORED, FAILED, FULL, CORRUPT = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.FAILED,
    Outcome.FULL,
    Outcome.CORRUPT,
)


def ref_of(number: int, num_blocks: int = BLOCKS_PER_CHUNK) -> ChunkRef:
    return ChunkRef(number.to_bytes(16, "big"), num_blocks)


def transfer(number: int, fill: int | None = None) -> Transfer:
    return Transfer(ref_of(number), np.full(SLOT_BYTES, number if fill is None else fill, np.uint8))


class Clock:
    """A time that only tests change."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def broken() -> None:
    raise TierError("broken")


def fail(error: Exception) -> NoReturn:
    raise error


def break_down(tier: FakeTier) -> None:
    tier.before_get = tier.before_put = broken


def repair(tier: FakeTier) -> None:
    tier.before_get = tier.before_put = lambda: None


# -- the base ----------------------------------------------------------------------------------------------------------


def test_a_wrapper_forwards_all_of_the_contract() -> None:
    of_tier = {name for name, value in vars(Tier).items() if not name.startswith("_") and value is not None}
    assert of_tier <= vars(TierWrapper).keys(), "a wrapper would answer these in the tier's place"


def test_layers_are_found_from_outside_in() -> None:
    tier = FakeTier()
    with_deadline = Deadline(tier, 1.0, threads=1)
    outer = Statistics(with_deadline)
    assert list(layers(outer)) == [outer, with_deadline, tier]
    assert find(outer, Deadline) is with_deadline
    assert find(outer, FakeTier) is tier
    assert find(outer, CircuitBreaker) is None
    assert (outer.name, outer.capacity_bytes, outer.counters) == (tier.name, tier.capacity_bytes, tier.counters)
    assert repr(outer).startswith("Statistics(Deadline(<")
    outer.close()
    assert tier.is_closed


# -- Deadline ----------------------------------------------------------------------------------------------------------


class Hanging:
    """A deadline over a tier whose gets and puts hang until ``gate`` is set."""

    def __init__(self, threads: int = 2, timeout_s: float = BRIEF_S, **options: Any) -> None:
        self.tier = FakeTier()
        self.tier.put([transfer(n) for n in range(8)])
        self.gate = threading.Event()
        self.tier.before_get = self.tier.before_put = lambda: self.gate.wait(HANG_GUARD_S)
        self.deadline = Deadline(self.tier, timeout_s, threads, **options)

    def time_out(self, item: Transfer) -> Future[Any]:
        with pytest.raises(TierTimeoutError, match="get of the fake tier took longer than") as caught:
            self.deadline.get([item])
        return caught.value.pending


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hanging(stack: ExitStack) -> Callable[..., Hanging]:
    def make(**options: Any) -> Hanging:
        made = Hanging(**options)
        stack.callback(made.deadline.close)
        stack.callback(made.gate.set)
        return made

    return make


def test_a_deadline_passes_results_and_exceptions_on() -> None:
    tier = FakeTier()
    deadline = Deadline(tier, HANG_GUARD_S, threads=2)
    try:
        assert deadline.put([transfer(1)]) == [STORED]
        item = transfer(1, fill=0)
        assert deadline.get([item, transfer(2)]) == [HIT, MISS]
        assert (item.buffer == 1).all()
        assert deadline.contains([ref_of(1), ref_of(2)]) == [True, False]
        assert deadline.scan() == [(ref_of(1), FILE_BYTES)]
        assert deadline.used_bytes == FILE_BYTES
        deadline.remove(ref for ref in [ref_of(1)])
        assert not tier.chunks
        deadline.put([transfer(3)])
        deadline.clear()
        assert not tier.chunks
        break_down(tier)
        with pytest.raises(TierError, match="broken"):
            deadline.get([item])
        assert deadline.timeouts == 0
    finally:
        deadline.close()


def test_a_timeout_of_the_tiers_own_is_not_the_deadlines() -> None:
    def refuse() -> None:
        raise TimeoutError("from inside")

    tier = FakeTier()
    tier.before_get = refuse
    deadline = Deadline(tier, HANG_GUARD_S, threads=1)
    with pytest.raises(TimeoutError, match="from inside"):
        deadline.get([transfer(1)])
    assert deadline.timeouts == 0
    deadline.close()


def test_pending_says_when_a_late_read_has_ended(hanging: Callable[..., Hanging]) -> None:
    bench = hanging()
    item = transfer(5, fill=0)
    pending = bench.time_out(item)
    assert not pending.done()
    assert bench.deadline.stuck_calls == 1
    bench.gate.set()
    assert pending.result(HANG_GUARD_S) == [HIT]
    assert (item.buffer == 5).all(), "the late read has written after the time-out: why buffers must be kept aside"
    assert bench.deadline.stuck_calls == 0
    assert bench.deadline.timeouts == 1
    assert bench.deadline.get([item]) == [HIT]


def test_a_reset_happens_though_all_threads_are_stuck(hanging: Callable[..., Hanging]) -> None:
    bench = hanging(threads=1)
    bench.time_out(transfer(5))
    bench.deadline.reset(NAMESPACE)
    assert bench.tier.namespaces == [NAMESPACE]


def test_a_reset_that_hangs_holds_back_what_comes_after_it(stack: ExitStack) -> None:
    tier, gate = FakeTier(), threading.Event()
    faulty = FaultInjector(tier, [Fault(FaultKind.HANG, "reset")])
    deadline = Deadline(faulty, BRIEF_S, threads=2, slow_timeout_s=BRIEF_S)
    stack.callback(deadline.close)
    deadline.put([transfer(1)])
    with pytest.raises(TierTimeoutError, match="reset of the fake tier took longer") as caught:
        deadline.reset(NAMESPACE)
    with pytest.raises(TierError, match="an earlier reset has not ended"):
        deadline.get([transfer(1)])
    with pytest.raises(TierError, match="an earlier reset has not ended"):
        deadline.put([transfer(2)])
    caught.value.pending.add_done_callback(lambda _: gate.set())
    faulty.heal()
    assert gate.wait(HANG_GUARD_S)
    assert deadline.get([transfer(1)]) == [MISS]
    assert deadline.put([transfer(2)]) == [STORED]


def test_of_two_resets_that_hang_the_later_one_holds(stack: ExitStack) -> None:
    """Or the tier would end in an epoch that is over."""
    tier, later = FakeTier(), NAMESPACE.at_epoch("later")
    faulty = FaultInjector(tier, [Fault(FaultKind.HANG, "reset", calls=range(1))])
    deadline = Deadline(faulty, BRIEF_S, threads=2, slow_timeout_s=BRIEF_S)
    stack.callback(deadline.close)
    with pytest.raises(TierTimeoutError):
        deadline.reset(NAMESPACE)
    with pytest.raises(TierTimeoutError) as caught:
        deadline.reset(later)
    faulty.heal()
    caught.value.pending.result(HANG_GUARD_S)
    assert tier.namespaces == [NAMESPACE, later]


def test_pending_of_a_late_write_tells_its_outcome(hanging: Callable[..., Hanging]) -> None:
    bench = hanging()
    with pytest.raises(TierTimeoutError) as caught:
        bench.deadline.put([transfer(9)])
    bench.gate.set()
    assert caught.value.pending.result(HANG_GUARD_S) == [STORED]
    assert bench.deadline.contains([ref_of(9)]) == [True]


def test_a_call_that_has_not_begun_is_withdrawn(hanging: Callable[..., Hanging]) -> None:
    bench = hanging(threads=1)
    began = threading.Event()

    def scan() -> list[tuple[ChunkRef, int]]:
        began.set()
        assert bench.gate.wait(HANG_GUARD_S)
        return []

    bench.tier.scan = scan  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bench.deadline.scan)
        assert began.wait(HANG_GUARD_S)
        item = transfer(2, fill=0)
        pending = bench.time_out(item)
        assert pending.cancelled()
        assert pending.done()
        assert bench.deadline.stuck_calls == 0
        bench.gate.set()
        assert first.result(HANG_GUARD_S) == []
    assert bench.deadline.contains([ref_of(2)]) == [True]
    assert (item.buffer == 0).all(), "a call that was withdrawn was carried out"


def test_with_all_threads_stuck_calls_fail_at_once_until_one_returns(hanging: Callable[..., Hanging]) -> None:
    bench = hanging(threads=2)
    pendings = [bench.time_out(transfer(n, fill=0)) for n in range(2)]
    for call in (lambda: bench.deadline.contains([ref_of(1)]), bench.deadline.scan, bench.deadline.clear):
        with pytest.raises(TierError, match="all 2 threads hang in earlier calls") as caught:
            call()
        assert not isinstance(caught.value, TierTimeoutError), "its buffers are free"
    bench.gate.set()
    for pending in pendings:
        pending.result(HANG_GUARD_S)
    assert bench.deadline.get([transfer(1)]) == [HIT]


def test_few_calls_may_wait_for_a_thread(hanging: Callable[..., Hanging]) -> None:
    bench = hanging(threads=1, timeout_s=HANG_GUARD_S, max_waiting=1)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(bench.deadline.get, [transfer(0)])]
        while bench.deadline._crew.count_waiting() or not running[0].running():
            time.sleep(0.001)
        running.append(pool.submit(bench.deadline.get, [transfer(1)]))
        while not bench.deadline._crew.count_waiting():
            time.sleep(0.001)
        with pytest.raises(TierError, match="1 calls wait already"):
            bench.deadline.get([transfer(2)])
        bench.gate.set()
        assert [future.result(HANG_GUARD_S) for future in running] == [[HIT], [HIT]]


def test_closing_a_hung_tier_gives_up_and_says_so(
    hanging: Callable[..., Hanging], caplog: pytest.LogCaptureFixture
) -> None:
    bench = hanging(slow_timeout_s=BRIEF_S)
    bench.time_out(transfer(1))
    bench.tier.close = lambda: bench.gate.wait(HANG_GUARD_S)  # type: ignore[method-assign,assignment]
    bench.deadline.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not close within" in caplog.text
    bench.deadline.close()
    for call in (bench.deadline.scan, bench.deadline.clear, lambda: bench.deadline.get([transfer(1)])):
        with pytest.raises(ClosedError):
            call()


def test_a_stuck_call_does_not_keep_the_process() -> None:
    code = (
        "import threading\n"
        "from support.rig import FakeTier\n"
        "from kvstore.errors import TierTimeoutError\n"
        "from kvstore.tiers.guards import Deadline\n"
        "tier = FakeTier()\n"
        "tier.before_get = lambda: threading.Event().wait()\n"
        "try:\n"
        "    Deadline(tier, 0.01).get([])\n"
        "except TierTimeoutError as error:\n"
        "    print('timed out', error.pending.done())\n"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * HANG_GUARD_S,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "timed out False\n"), result.stderr


@pytest.mark.parametrize("bad", [{"timeout_s": 0.0}, {"threads": 0}, {"slow_timeout_s": -1.0}, {"max_waiting": 0}])
def test_a_deadline_without_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidCallError, match="positive"):
        Deadline(FakeTier(), **{"timeout_s": 1.0, **bad})


# -- CircuitBreaker ----------------------------------------------------------------------------------------------------


class Bench:
    """A breaker that opens after three failures, over a tier with the chunks 0 to 3."""

    def __init__(self) -> None:
        self.tier = FakeTier()
        self.tier.put([transfer(n) for n in range(4)])
        self.clock = Clock()
        self.breaker = CircuitBreaker(self.tier, failures=3, probe_interval_s=10.0, clock=self.clock)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            with pytest.raises(TierError):
                self.breaker.get([transfer(0)])

    def open(self) -> None:
        break_down(self.tier)
        self.fail(3)
        assert self.state() is BreakerState.OPEN

    def state(self) -> BreakerState:
        return self.breaker.stats().state


def forbid() -> None:
    pytest.fail("the tier was asked")


def test_the_breaker_opens_after_failures_in_a_row() -> None:
    bench = Bench()
    break_down(bench.tier)
    bench.fail(2)
    repair(bench.tier)
    assert bench.breaker.get([transfer(0)]) == [HIT]
    break_down(bench.tier)
    bench.fail(2)
    assert not bench.breaker.is_open
    bench.fail(1)
    assert bench.breaker.is_open


def test_an_open_breaker_answers_without_the_tier() -> None:
    bench = Bench()
    bench.open()
    bench.tier.before_get = bench.tier.before_put = forbid
    assert bench.breaker.get([transfer(0), transfer(1)]) == [FAILED, FAILED]
    assert bench.breaker.put([transfer(0)]) == [FAILED]
    assert bench.breaker.contains([ref_of(0), ref_of(9)]) == [False, False]
    bench.breaker.remove([ref_of(0)])
    stats = bench.breaker.stats()
    assert (stats.openings, stats.short_cut_calls, stats.probes, stats.owed_removals) == (1, 4, 0, 1)
    assert ref_of(0) in bench.tier.chunks


def test_batches_that_fail_as_a_whole_open_it_too() -> None:
    bench = Bench()
    bench.tier.put_outcome = FAILED
    for _ in range(3):
        assert bench.breaker.put([transfer(7), transfer(8)]) == [FAILED, FAILED]
    assert bench.breaker.is_open


def test_what_memory_may_have_answered_proves_nothing() -> None:
    bench = Bench()
    break_down(bench.tier)
    bench.fail(2)
    repair(bench.tier)
    assert bench.breaker.contains([ref_of(0)]) == [True]
    assert bench.breaker.get([transfer(99)]) == [MISS]
    assert bench.breaker.get([]) == []
    bench.tier.put_outcome = FULL
    assert bench.breaker.put([transfer(5)]) == [FULL]
    break_down(bench.tier)
    bench.fail(1)
    assert bench.breaker.is_open


def test_a_lookup_that_memory_answers_is_no_probe() -> None:
    bench = Bench()
    bench.open()
    repair(bench.tier)
    bench.clock.now_s += 10
    assert bench.breaker.contains([ref_of(0)]) == [False]
    assert (bench.breaker.is_open, bench.breaker.stats().probes) == (True, 0)
    assert bench.breaker.get([transfer(0)]) == [HIT]
    assert bench.breaker.contains([ref_of(0)]) == [True]


def test_a_probe_that_fails_begins_the_interval_anew() -> None:
    bench = Bench()
    bench.open()
    bench.clock.now_s += 10
    bench.fail(1)
    bench.clock.now_s += 9.9
    assert bench.breaker.get([transfer(0)]) == [FAILED]
    bench.clock.now_s += 0.1
    repair(bench.tier)
    assert bench.breaker.get([transfer(0)]) == [HIT]
    stats = bench.breaker.stats()
    assert (stats.state, stats.openings, stats.recoveries, stats.probes) == (BreakerState.CLOSED, 1, 1, 2)


def test_a_probe_that_proves_nothing_leaves_it_to_the_next_call() -> None:
    bench = Bench()
    bench.open()
    repair(bench.tier)
    bench.clock.now_s += 10
    assert bench.breaker.get([transfer(99)]) == [MISS]
    assert bench.state() is BreakerState.OPEN
    assert bench.breaker.put([transfer(0)]) == [STORED]
    assert bench.state() is BreakerState.CLOSED


def test_a_probe_with_a_callers_mistake_does_not_stay_one() -> None:
    def refuse() -> None:
        raise InvalidCallError("a bad buffer")

    bench = Bench()
    bench.open()
    bench.clock.now_s += 10
    bench.tier.before_get = refuse
    with pytest.raises(InvalidCallError):
        bench.breaker.get([transfer(0)])
    repair(bench.tier)
    assert bench.breaker.get([transfer(0)]) == [HIT]


def test_one_probe_at_a_time() -> None:
    bench = Bench()
    bench.open()
    bench.clock.now_s += 10
    arrived, gate = threading.Event(), threading.Event()

    def wait() -> None:
        arrived.set()
        assert gate.wait(HANG_GUARD_S)

    bench.tier.before_get = wait
    with ThreadPoolExecutor(1) as pool:
        probe = pool.submit(bench.breaker.get, [transfer(0)])
        assert arrived.wait(HANG_GUARD_S)
        bench.tier.before_get = forbid
        bench.clock.now_s += 1000
        assert bench.state() is BreakerState.PROBING
        assert bench.breaker.get([transfer(0)]) == [FAILED]
        gate.set()
        assert probe.result(HANG_GUARD_S) == [HIT]
    assert bench.state() is BreakerState.CLOSED


def test_one_line_per_change_of_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    for _ in range(2):
        bench.open()
        for _ in range(100):
            bench.breaker.get([transfer(0)])
        bench.clock.now_s += 10
        bench.fail(1)
        repair(bench.tier)
        bench.clock.now_s += 10
        for _ in range(100):
            assert bench.breaker.get([transfer(0)]) == [HIT]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2
    assert caplog.messages[0] == (
        "the fake tier failed 3 times in a row and is left out; it is tried again every 10 s (broken)"
    )
    assert caplog.messages[1] == "the fake tier works again"


def test_many_threads_that_fail_together_open_it_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    together = threading.Barrier(8)

    def fail() -> None:
        together.wait(HANG_GUARD_S)
        broken()

    def get(_: int) -> bool:
        try:
            bench.breaker.get([transfer(0)])
        except TierError:
            return True
        return False

    bench.tier.before_get = fail
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(get, range(8)))
    assert bench.breaker.stats().openings == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps_does_not_break_it(jump_s: float) -> None:
    bench = Bench()
    bench.open()
    bench.clock.now_s += jump_s
    repair(bench.tier)
    answers = []
    for _ in range(12):
        answers += bench.breaker.get([transfer(0)])
        bench.clock.now_s += 1
    assert answers[-1] is HIT
    assert bench.state() is BreakerState.CLOSED


def test_what_was_removed_meanwhile_does_not_come_back() -> None:
    bench = Bench()
    bench.open()
    bench.breaker.remove([ref_of(0), ref_of(1)])
    repair(bench.tier)
    bench.clock.now_s += 10
    assert bench.breaker.put([transfer(1)]) == [STORED], "wanted again"
    assert bench.breaker.contains([ref_of(n) for n in range(4)]) == [False, True, True, True]
    assert bench.breaker.stats().owed_removals == 0


def test_a_removal_that_failed_is_repeated_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: broken())
        with pytest.raises(TierError):
            bench.breaker.remove([ref_of(0)])
    assert bench.breaker.stats().owed_removals == 1
    bench.breaker.remove([ref_of(1)])
    assert set(bench.tier.chunks) == {ref_of(2), ref_of(3)}
    assert bench.breaker.stats().owed_removals == 0


@pytest.mark.parametrize("how", ["fails", "raises", "hangs"])
def test_a_put_that_failed_ends_no_owed_removal(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """What the tier has is still the old chunk, whose bytes may be wrong."""
    bench = Bench()
    late: Future[list[Outcome]] = Future()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: broken())
        with pytest.raises(TierError):
            bench.breaker.remove([ref_of(0)])
        if how == "fails":
            patch.setattr(bench.tier, "put", lambda _: [FAILED])
            assert bench.breaker.put([transfer(0)]) == [FAILED]
        else:
            error = TierError("broken") if how == "raises" else TierTimeoutError("slow", late)
            patch.setattr(bench.tier, "put", lambda _: fail(error))
            with pytest.raises(TierError):
                bench.breaker.put([transfer(0)])
    assert bench.breaker.stats().owed_removals == 1
    if how == "hangs":  # it may store the chunk yet, and then nothing is owed; until then nobody may remove it
        bench.breaker.remove([ref_of(1)])
        assert ref_of(0) in bench.tier.chunks
        late.set_result([STORED])
        assert bench.breaker.stats().owed_removals == 0
        assert bench.breaker.get([transfer(0)]) == [HIT]
        return
    bench.breaker.remove([ref_of(1)])
    assert set(bench.tier.chunks) == {ref_of(2), ref_of(3)}


def test_what_is_owed_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk was removed, be it that its bytes are wrong, and the tier could not: nobody gets it from there."""
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: broken())
        with pytest.raises(TierError):
            bench.breaker.remove([ref_of(0)])
    assert ref_of(0) in bench.tier.chunks
    item, other = transfer(0, fill=0xEE), transfer(1, fill=0xEE)
    assert bench.breaker.get([item, other]) == [MISS, HIT]
    assert bench.breaker.get_layers([other, item], range(1)) == [HIT, MISS]
    assert (item.buffer == 0xEE).all()
    assert bench.breaker.contains([ref_of(1), ref_of(0)]) == [True, False]
    lent: list[ByteArray | None] = [np.zeros(1, np.uint8)]
    monkeypatch.setattr(bench.tier, "borrow", lambda refs: Loan([HIT] * len(refs), lent * len(refs)), raising=False)
    with bench.breaker.borrow([ref_of(0), ref_of(1)]) as loan:
        assert loan.outcomes == [MISS, HIT]
        assert loan.payloads == [None, *lent]
    assert bench.breaker.put([transfer(0)]) == [STORED]
    assert bench.breaker.get([item]) == [HIT]


def test_a_removal_that_hangs_undoes_no_later_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may yet take effect: until it has ended its chunks cannot be put, and are not there."""
    bench = Bench()
    late: Future[None] = Future()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: fail(TierTimeoutError("slow", late)))
        with pytest.raises(TierTimeoutError):
            bench.breaker.remove([ref_of(0)])
    bench.breaker.reset(NAMESPACE)
    assert bench.breaker.put([transfer(0), transfer(1)]) == [FAILED, STORED]
    assert bench.breaker.get([transfer(0), transfer(1)]) == [MISS, HIT]
    bench.tier.remove([ref_of(0)])
    late.set_result(None)
    assert bench.breaker.put([transfer(0)]) == [STORED]
    assert bench.breaker.get([transfer(0)]) == [HIT]
    assert not bench.breaker._owed._leaving
    assert not bench.breaker._owed._putting


def test_puts_of_an_epoch_that_is_over_prove_nothing() -> None:
    """Writes that wait when the weights change all fail, and the tier is as sound as before."""
    bench = Bench()
    old = transfer(0)._replace(namespace_id=b"old")
    bench.breaker.reset(NAMESPACE)
    for _ in range(5):
        assert bench.breaker.put([old, old]) == [FAILED, FAILED]
    assert not bench.breaker.is_open
    assert bench.breaker.put([old, transfer(1)._replace(namespace_id=NAMESPACE.id)]) == [FAILED, STORED]


@pytest.mark.parametrize("how", ["full", "broken", "overtaken"])
def test_a_put_that_stores_nothing_does_not_settle_a_removal(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk of before is still there, and was to be forgotten."""
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: broken())
        with pytest.raises(TierError):
            bench.breaker.remove([ref_of(0), ref_of(1)])
        bench.tier.put_outcome = FULL
        if how == "broken":
            patch.setattr(bench.tier, "put", lambda transfers: broken())
            with pytest.raises(TierError):
                bench.breaker.put([transfer(0)])
        elif how == "full":
            assert bench.breaker.put([transfer(0)]) == [FULL]
        else:  # what is asked for meanwhile does not settle it either
            patch.setattr(bench.tier, "before_put", lambda: bench.breaker.get([transfer(2)]))
            assert bench.breaker.put([transfer(0)]) == [FULL]
    assert bench.breaker.stats().owed_removals == 2
    bench.breaker.remove([ref_of(3)])
    assert set(bench.tier.chunks) == {ref_of(2)}
    assert bench.breaker.stats().owed_removals == 0


def test_it_stays_open_while_removals_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.open()
    bench.breaker.remove([ref_of(0)])
    repair(bench.tier)
    bench.clock.now_s += 10
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: broken())
        assert bench.breaker.get([transfer(1)]) == [HIT], "the probe's own result stands"
    assert bench.state() is BreakerState.OPEN
    bench.clock.now_s += 10
    assert bench.breaker.get([transfer(1)]) == [HIT]
    assert bench.state() is BreakerState.CLOSED
    assert ref_of(0) not in bench.tier.chunks


def test_puts_that_a_clear_overtakes_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fail on a sound tier, whether they began before the clear or while it was under way."""
    bench = Bench()
    bench.tier.put_outcome = FAILED
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "before_put", bench.breaker.clear)
        assert [bench.breaker.put([transfer(0)]) for _ in range(5)] == [[FAILED]] * 5
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "clear", lambda: bench.breaker.put([transfer(0)]))
        for _ in range(5):
            bench.breaker.clear()
    assert not bench.breaker.is_open
    for _ in range(3):
        bench.breaker.put([transfer(0)])
    assert bench.breaker.is_open


def test_clear_goes_through_an_open_breaker() -> None:
    bench = Bench()
    bench.open()
    bench.breaker.remove([ref_of(0)])
    bench.breaker.clear()
    assert not bench.tier.chunks
    assert bench.breaker.stats().owed_removals == 0
    assert bench.state() is BreakerState.OPEN


def test_a_closed_tier_says_so_through_an_open_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed() -> None:
        raise ClosedError("closed")

    bench = Bench()
    bench.open()
    bench.breaker.close()
    bench.tier.before_get = closed
    with pytest.raises(ClosedError):
        bench.breaker.get([transfer(0)])


@pytest.mark.parametrize("bad", [{"failures": 0}, {"probe_interval_s": -1.0}, {"probe_interval_s": float("nan")}])
def test_a_breaker_without_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidCallError, match="breaker"):
        CircuitBreaker(FakeTier(), **bad)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["get", "put", "remove", "contains"]), st.integers(0, 5)),
        st.tuples(st.sampled_from(["break", "repair"]), st.just(0)),
        st.tuples(st.just("wait"), st.integers(-20, 20)),
    ),
    max_size=60,
)


@schedules(100)
@given(EVENTS)
def test_random_failures_lose_no_result_and_it_always_recovers(events: list[tuple[str, int]]) -> None:
    bench = Bench()
    known = set(range(4))  # what must be there if the tier is asked; a short-cut may hide it, never falsify it
    for event, number in events:
        before = bench.breaker.stats().short_cut_calls
        try:
            if event == "get":
                item = transfer(number, fill=0xEE)
                (outcome,) = bench.breaker.get([item])
                passed = bench.breaker.stats().short_cut_calls == before
                assert outcome is (FAILED if not passed else HIT if number in known else MISS)
                assert outcome is not HIT or (item.buffer == number).all()
            elif event == "put":
                (outcome,) = bench.breaker.put([transfer(number)])
                assert outcome is (STORED if bench.breaker.stats().short_cut_calls == before else FAILED)
                if outcome is STORED:
                    known.add(number)
            elif event == "contains":
                (answer,) = bench.breaker.contains([ref_of(number)])
                assert answer == (number in known and bench.breaker.stats().short_cut_calls == before)
            elif event == "remove":
                bench.breaker.remove([ref_of(number)])
                known.discard(number)
            elif event == "wait":
                bench.clock.now_s += number
            else:
                (break_down if event == "break" else repair)(bench.tier)
        except TierError:
            assert bench.tier.before_get is broken, "the breaker made up a failure"
        stats = bench.breaker.stats()
        assert stats.openings - stats.recoveries == (stats.state is not BreakerState.CLOSED)
        known -= {number for number in range(6) if ref_of(number) in bench.breaker._owed}
    repair(bench.tier)
    bench.clock.now_s += 1
    bench.breaker.get([transfer(0)])  # sees that the clock has jumped back, if it has
    bench.clock.now_s += 10
    assert bench.breaker.put([transfer(5)]) == [STORED]
    assert bench.state() is BreakerState.CLOSED
    assert set(bench.tier.chunks) == {ref_of(number) for number in known | {5}}


# -- Statistics --------------------------------------------------------------------------------------------------------


def test_statistics_count_calls_chunks_bytes_and_outcomes() -> None:
    tier = FakeTier()
    statistics = Statistics(tier)
    statistics.put([transfer(1), transfer(2)])
    statistics.get([transfer(1), transfer(9)])
    statistics.contains([ref_of(1), ref_of(8), ref_of(9)])
    statistics.scan()
    statistics.remove(ref for ref in [ref_of(1)])
    statistics.clear()
    seen = statistics.snapshot()
    assert (seen.put.calls, seen.put.chunks, seen.put.moved_bytes) == (1, 2, 2 * FILE_BYTES)
    assert seen.put.outcomes == {STORED: 2}
    assert (seen.get.calls, seen.get.chunks, seen.get.moved_bytes) == (1, 2, FILE_BYTES)
    assert seen.get.outcomes == {HIT: 1, MISS: 1}
    assert seen.contains.outcomes == {HIT: 1, MISS: 2}
    assert (seen.scan.chunks, seen.remove.chunks, seen.clear.calls) == (2, 1, 1)
    assert seen.get.latency.count == 1


def test_statistics_count_errors_and_timeouts(hanging: Callable[..., Hanging]) -> None:
    bench = hanging()
    statistics = Statistics(bench.deadline)
    with pytest.raises(TierTimeoutError):
        statistics.get([transfer(1)])
    bench.gate.set()
    break_down(bench.tier)
    with pytest.raises(TierError):
        statistics.get([transfer(1)])
    seen = statistics.snapshot().get
    assert (seen.calls, seen.errors, seen.timeouts, seen.moved_bytes) == (2, 2, 1, 0)
    assert seen.latency.max_s >= BRIEF_S


def test_statistics_lose_no_call_of_many_threads() -> None:
    statistics = Statistics(FakeTier())
    statistics.put([transfer(1)])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: statistics.get([transfer(1), transfer(2)]), range(400)))
    seen = statistics.snapshot().get
    assert (seen.calls, seen.chunks, seen.latency.count) == (400, 800, 400)
    assert seen.outcomes == {HIT: 400, MISS: 400}


@given(st.lists(st.floats(1e-6, 500.0), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_quantiles_are_bounds_that_are_nearly_reached(times_s: list[float], share: float) -> None:
    from kvstore.tiers.guards import stats

    recorder = stats._Recorder()
    for time_s in times_s:
        recorder._add(stats._Tally(), time_s)
    latency = recorder.snapshot().latency
    rank = max(1, int(np.ceil(share * len(times_s))))
    exact_s = sorted(times_s)[rank - 1]
    estimate_s = latency.quantile_s(share)
    assert estimate_s >= exact_s * (1 - 1e-9)
    if stats.LATENCY_BOUNDS_S[0] < exact_s < stats.LATENCY_BOUNDS_S[-1]:
        assert estimate_s <= exact_s * 1.4143


def test_a_histogram_without_calls_has_quantiles_of_zero() -> None:
    empty = LatencyHistogram((0, 0), 0.0, 0.0)
    assert (empty.p50_s, empty.p99_s) == (0.0, 0.0)


# -- Latency -----------------------------------------------------------------------------------------------------------


def test_latency_delays_calls_and_shares_the_link() -> None:
    slept_s: list[float] = []
    slow = Latency(FakeTier(), 0.5, FILE_BYTES / 2.0, sleep=slept_s.append, clock=Clock())
    assert slow.put([transfer(1)]) == [STORED]
    assert slept_s == [0.5, 2.0]
    assert slow.get([transfer(1), transfer(9)]) == [HIT, MISS]
    assert slept_s[2:] == [0.5, 4.0], "the link is still busy with the put"
    assert slow.contains([ref_of(9)]) == [False]
    slow.remove([ref_of(9)])
    assert slow.get([transfer(9)]) == [MISS]
    assert slept_s[4:] == [0.5, 0.5, 0.5], "a miss transmits nothing"


@pytest.mark.parametrize("bad", [(-1.0, None), (0.0, 0.0), (float("nan"), None)])
def test_a_latency_without_sense_is_refused(bad: tuple[float, float | None]) -> None:
    with pytest.raises(InvalidCallError, match="no tier has"):
        Latency(FakeTier(), *bad)


# -- FaultInjector -----------------------------------------------------------------------------------------------------


def injector(*faults: Fault, seed: int = 0) -> tuple[FakeTier, FaultInjector]:
    tier = FakeTier()
    tier.put([transfer(n) for n in range(4)])
    return tier, FaultInjector(tier, faults, seed)


def test_errors_come_in_the_calls_planned() -> None:
    _, wrapped = injector(Fault(FaultKind.ERROR, "get", calls=range(1, 3)))
    assert wrapped.get([transfer(1)]) == [HIT]
    for number in (1, 2):
        with pytest.raises(TierError, match=f"get number {number} of the fake tier") as caught:
            wrapped.get([transfer(1)])
        assert isinstance(caught.value.__cause__, OSError)
    assert wrapped.get([transfer(1)]) == [HIT]
    assert wrapped.put([transfer(1)]) == [STORED]
    assert wrapped.injected == {FaultKind.ERROR: 2}


@pytest.mark.parametrize("operation", ["scan", "contains", "get", "put", "remove", "clear", "reset"])
def test_every_operation_can_break(operation: str) -> None:
    _, wrapped = injector(Fault(FaultKind.ERROR, operation))
    calls: dict[str, Callable[[], object]] = {
        "scan": wrapped.scan,
        "contains": lambda: wrapped.contains([ref_of(1)]),
        "get": lambda: wrapped.get([transfer(1)]),
        "put": lambda: wrapped.put([transfer(1)]),
        "remove": lambda: wrapped.remove([]),
        "clear": wrapped.clear,
        "reset": lambda: wrapped.reset(NAMESPACE),
    }
    for name, call in calls.items():
        if name == operation:
            with pytest.raises(TierError, match="injected"):
                call()
        else:
            call()


def test_what_was_cleared_while_it_was_put_opens_no_breaker() -> None:
    tier = FakeTier()
    breaker = CircuitBreaker(tier, failures=1)
    tier.put_outcome = FAILED
    for forget in (breaker.clear, lambda: breaker.reset(NAMESPACE)):
        tier.before_put = forget
        assert breaker.put([transfer(1)]) == [FAILED]
        assert not breaker.is_open
    tier.before_put = lambda: None
    breaker.put([transfer(1)])
    assert breaker.is_open


def test_outcomes_strike_single_chunks() -> None:
    def number(n: int) -> dict[str, Any]:
        return {"when": lambda call: call.refs == (ref_of(n),)}

    tier, wrapped = injector(
        Fault(FaultKind.FAILED, **number(0)), Fault(FaultKind.MISS, **number(1)), Fault(FaultKind.CORRUPT, **number(2))
    )
    assert wrapped.get([transfer(n) for n in range(4)]) == [FAILED, MISS, CORRUPT, HIT]
    assert set(tier.chunks) == {ref_of(0), ref_of(1), ref_of(3)}, "what is corrupt is removed"
    assert wrapped.put([transfer(0), transfer(1)]) == [FAILED, STORED]
    wrapped.inject(Fault(FaultKind.FULL, **number(5)))
    assert wrapped.put([transfer(5), transfer(6)]) == [FULL, STORED]
    assert ref_of(5) not in tier.chunks


def test_a_flipped_byte_lies_in_the_payload() -> None:
    _, wrapped = injector(Fault(FaultKind.FLIP))
    item, absent = transfer(1, fill=0), transfer(9, fill=0)
    assert wrapped.get([item, absent]) == [HIT, MISS]
    assert np.flatnonzero(item.buffer != 1).tolist() == [BLOCKS_PER_CHUNK // 2]
    assert not absent.buffer.any()
    wrapped.heal()
    assert wrapped.get([item]) == [HIT]
    assert (item.buffer == 1).all()


def test_calls_hang_until_released() -> None:
    _, wrapped = injector(Fault(FaultKind.HANG, "get"))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(wrapped.get, [transfer(n)]) for n in range(2)]
        assert wrapped.wait_until_hanging(2)
        assert not any(call.done() for call in calls)
        wrapped.release()
        assert [call.result(HANG_GUARD_S) for call in calls] == [[HIT], [HIT]]
        again = pool.submit(wrapped.get, [transfer(9)])
        assert wrapped.wait_until_hanging()
        wrapped.heal()
        assert again.result(HANG_GUARD_S) == [MISS]
    assert wrapped.get([transfer(1)]) == [HIT]
    assert not wrapped.wait_until_hanging(timeout_s=0)


def outcomes_of(seed: int) -> list[Outcome]:
    _, wrapped = injector(Fault(FaultKind.MISS, share=0.3), seed=seed)
    return [outcome for _ in range(50) for outcome in wrapped.get([transfer(n) for n in range(4)])]


def test_a_seed_decides_which_calls_fail() -> None:
    assert outcomes_of(1) == outcomes_of(1)
    assert outcomes_of(1) != outcomes_of(2)
    assert 30 <= outcomes_of(1).count(MISS) <= 90


def test_a_fault_that_cannot_happen_is_refused() -> None:
    with pytest.raises(InvalidCallError, match=r"FULL cannot happen in 'get', only in \['put'\]"):
        Fault(FaultKind.FULL, "get")


# -- guarded -----------------------------------------------------------------------------------------------------------


def test_a_guarded_tier_survives_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tier, faulty = injector(Fault(FaultKind.HANG, "get"))
    disk = guarded(faulty, GuardOptions(timeout_s=BRIEF_S, threads=4, failures=2, probe_interval_s=0.0))
    breaker, deadline = find(disk, CircuitBreaker), find(disk, Deadline)
    assert breaker is not None
    assert deadline is not None
    assert [type(layer) for layer in layers(disk)] == [Statistics, CircuitBreaker, Deadline, FaultInjector, FakeTier]
    pendings = []
    for _ in range(2):
        with pytest.raises(TierTimeoutError) as caught:
            disk.get([transfer(1)])
        pendings.append(caught.value.pending)
    assert breaker.is_open
    disk.remove([ref_of(0)])
    faulty.heal()
    for pending in pendings:
        assert pending.result(HANG_GUARD_S) == [HIT]
    assert disk.get([transfer(1)]) == [HIT]
    assert breaker.stats().state is BreakerState.CLOSED
    assert disk.contains([ref_of(0), ref_of(1)]) == [False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "took longer than" in caplog.messages[0]
    seen = disk.snapshot().get
    assert (seen.calls, seen.timeouts, seen.outcomes) == (3, 2, {HIT: 1})
    disk.close()
    assert tier.is_closed


# -- lending -----------------------------------------------------------------------------------------------------------


class Lender(FakeTier):
    """Lends what it holds, and counts what was not given back."""

    lends = True

    def __init__(self) -> None:
        super().__init__()
        self.put([transfer(n) for n in range(4)])
        self.calls = self.lent = 0

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        self.before_get()
        self.calls += 1
        held = [self.chunks.get(ref) for ref in refs]
        self.lent += 1
        return Loan(
            [MISS if payload is None else HIT for payload in held],
            [None if payload is None else np.frombuffer(payload, np.uint8) for payload in held],
            self._take_back,
        )

    def _take_back(self) -> None:
        self.lent -= 1


def test_what_is_lent_too_late_is_given_back() -> None:
    tier, gate = Lender(), threading.Event()
    deadline = Deadline(tier, BRIEF_S, threads=1)
    tier.before_get = lambda: gate.wait(HANG_GUARD_S)
    with pytest.raises(TierTimeoutError) as caught:
        deadline.borrow([ref_of(1)])
    gate.set()
    late = caught.value.pending.result(HANG_GUARD_S)
    wait_for("it is given back", lambda: tier.lent == 0)
    assert (tier.calls, late.outcomes) == (1, [HIT])
    deadline.close()
    assert late.payloads == [None]


def test_an_open_breaker_lends_nothing() -> None:
    tier, clock = Lender(), Clock()
    tier_around = CircuitBreaker(tier, failures=2, probe_interval_s=5.0, clock=clock)
    break_down(tier)
    for _ in range(2):
        with pytest.raises(TierError):
            tier_around.borrow([ref_of(1)])
    repair(tier)
    refused = tier_around.borrow([ref_of(1), ref_of(9)])
    assert (refused.outcomes, refused.payloads, tier.calls) == ([FAILED, FAILED], [None, None], 0)
    clock.now_s += 5.0
    with tier_around.borrow([ref_of(1), ref_of(9)]) as loan:  # a probe, like any call
        assert loan.outcomes == [HIT, MISS]
    assert not tier_around.is_open
    assert tier.lent == 0


def test_loans_are_counted_as_reads() -> None:
    statistics = Statistics(Lender())
    statistics.borrow([ref_of(1), ref_of(9)]).end()
    read = statistics.snapshot().get
    assert (read.calls, read.chunks, read.moved_bytes) == (1, 2, FILE_BYTES)
    assert read.outcomes == {HIT: 1, MISS: 1}
