"""Tests of the deadline around an in-memory tier that hangs, with real threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support.faults import Fault, FaultInjector, FaultKind
from support.redis_server import wait_for
from support.rig import FILE_BYTES, NAMESPACE, FakeTier
from support.wrapped import (
    BRIEF_S,
    HANG_GUARD_S,
    HIT,
    MISS,
    STORED,
    Lender,
    break_down,
    ref_of,
    transfer,
)

from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ClosedError, InvalidCallError, TierError, TierTimeoutError
from kvstore.tiers.abandonable_threads import AbandonableThreads
from kvstore.tiers.base import Transfer
from kvstore.tiers.guards import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Hanging:
    """A deadline over a tier whose gets and puts hang until ``gate`` is set."""

    def __init__(self, threads: int = 2, timeout_s: float = BRIEF_S, **options: Any) -> None:
        self.tier = FakeTier()
        self.tier.put([transfer(n) for n in range(8)])
        self.gate = threading.Event()
        self.tier.before_get = self.tier.before_put = lambda: self.gate.wait(HANG_GUARD_S)
        self.deadline = Guard(self.tier, timeout_s, threads, **options)

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
    deadline = Guard(tier, HANG_GUARD_S, threads=2)
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
        assert deadline.stuck_calls == 0
    finally:
        deadline.close()


def test_a_timeout_of_the_tiers_own_is_not_the_deadlines() -> None:
    def refuse() -> None:
        raise TimeoutError("from inside")

    tier = FakeTier()
    tier.before_get = refuse
    deadline = Guard(tier, HANG_GUARD_S, threads=1)
    with pytest.raises(TierError, match="get of the fake tier raised TimeoutError: from inside") as caught:
        deadline.get([transfer(1)])
    assert not isinstance(caught.value, TierTimeoutError), "its buffers are free"
    assert deadline.stuck_calls == 0
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
    assert bench.deadline.get([item]) == [HIT]


def test_a_reset_happens_though_all_threads_are_stuck(hanging: Callable[..., Hanging]) -> None:
    bench = hanging(threads=1)
    bench.time_out(transfer(5))
    bench.deadline.reset(NAMESPACE)
    assert bench.tier.namespaces == [NAMESPACE]


def test_a_reset_that_hangs_holds_back_what_comes_after_it(stack: ExitStack) -> None:
    tier, gate = FakeTier(), threading.Event()
    faulty = FaultInjector(tier, [Fault(FaultKind.HANG, "reset")])
    deadline = Guard(faulty, BRIEF_S, threads=2, slow_timeout_s=BRIEF_S)
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
    """Otherwise the tier would end in an old epoch."""
    tier, later = FakeTier(), NAMESPACE.at_epoch("later")
    faulty = FaultInjector(tier, [Fault(FaultKind.HANG, "reset", calls=range(1))])
    deadline = Guard(faulty, BRIEF_S, threads=2, slow_timeout_s=BRIEF_S)
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
        with pytest.raises(TierError, match="all 2 threads are stuck in earlier calls") as caught:
            call()
        assert not isinstance(caught.value, TierTimeoutError), "its buffers are free"
    bench.gate.set()
    for pending in pendings:
        pending.result(HANG_GUARD_S)
    assert bench.deadline.get([transfer(1)]) == [HIT]


def test_few_calls_may_wait_for_a_thread(hanging: Callable[..., Hanging]) -> None:
    shared = AbandonableThreads("fake", 1, max_waiting=1)
    bench = hanging(timeout_s=HANG_GUARD_S, shared=shared)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(bench.deadline.get, [transfer(0)])]
        while bench.deadline._threads._work.qsize() or not running[0].running():
            time.sleep(0.001)
        running.append(pool.submit(bench.deadline.get, [transfer(1)]))
        while not bench.deadline._threads._work.qsize():
            time.sleep(0.001)
        with pytest.raises(TierError, match="1 calls are waiting already"):
            bench.deadline.get([transfer(2)])
        bench.gate.set()
        assert [future.result(HANG_GUARD_S) for future in running] == [[HIT], [HIT]]
    shared.close()


def test_closing_a_hung_tier_gives_up_and_says_so(
    hanging: Callable[..., Hanging], caplog: pytest.LogCaptureFixture
) -> None:
    bench = hanging(slow_timeout_s=BRIEF_S)
    bench.time_out(transfer(1))
    bench.tier.close = lambda: bench.gate.wait(HANG_GUARD_S)  # type: ignore[method-assign,assignment]
    bench.deadline.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "did not close within" in caplog.text
    bench.deadline.close()
    for call in (bench.deadline.scan, bench.deadline.clear, lambda: bench.deadline.get([transfer(1)])):
        with pytest.raises(ClosedError):
            call()


def test_a_stuck_call_does_not_keep_the_process() -> None:
    code = (
        "import threading\n"
        "from support.rig import FakeTier\n"
        "from kvstore.model.errors import TierTimeoutError\n"
        "from kvstore.tiers.guards import Guard\n"
        "tier = FakeTier()\n"
        "tier.before_get = lambda: threading.Event().wait()\n"
        "try:\n"
        "    Guard(tier, 0.01).get([])\n"
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


@pytest.mark.parametrize("bad", [{"timeout_s": 0.0}, {"threads": 0}, {"slow_timeout_s": -1.0}])
def test_a_deadline_without_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidCallError, match="positive"):
        Guard(FakeTier(), **{"timeout_s": 1.0, **bad})
    with pytest.raises(InvalidCallError, match="positive"):
        AbandonableThreads("fake", 1, max_waiting=0)


def test_what_is_lent_too_late_is_given_back() -> None:
    tier, gate = Lender(), threading.Event()
    deadline = Guard(tier, BRIEF_S, threads=1)
    tier.before_get = lambda: gate.wait(HANG_GUARD_S)
    with pytest.raises(TierTimeoutError) as caught:
        deadline.borrow([ref_of(1)])
    gate.set()
    late = caught.value.pending.result(HANG_GUARD_S)
    wait_for("it is given back", lambda: tier.lent == 0)
    assert (tier.calls, late.outcomes) == (1, [HIT])
    deadline.close()
    assert late.payloads == [None]
