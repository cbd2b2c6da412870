"""Tests of the circuit breaker around an in-memory tier that breaks."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rig import NAMESPACE, FakeTier
from support.schedules import schedules
from support.wrapped import (
    FAILED,
    FULL,
    HANG_GUARD_S,
    HIT,
    MISS,
    STORED,
    Bench,
    Clock,
    Lender,
    break_down,
    broken,
    ref_of,
    repair,
    transfer,
)

from kvstore.model.errors import ClosedError, InvalidCallError, TierError, TierTimeoutError
from kvstore.tiers.guards import BreakerState, CircuitBreaker

OTHER = NAMESPACE.at_epoch("other")


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
    assert bench.breaker.answers
    bench.fail(1)
    assert not bench.breaker.answers


def test_an_open_breaker_answers_without_the_tier() -> None:
    bench = Bench()
    bench.open()
    bench.tier.before_get = bench.tier.before_put = forbid
    assert bench.breaker.get([transfer(0), transfer(1)]) == [FAILED, FAILED]
    assert bench.breaker.put([transfer(0)]) == [FAILED]
    assert bench.breaker.contains([ref_of(0), ref_of(9)]) == [False, False]
    bench.breaker.remove([ref_of(0)])
    assert (bench.state(), bench.breaker.pending_removals) == (BreakerState.OPEN, 1)
    assert ref_of(0) in bench.tier.chunks


def test_batches_that_fail_as_a_whole_open_it_too() -> None:
    bench = Bench()
    bench.tier.put_outcome = FAILED
    for _ in range(3):
        assert bench.breaker.put([transfer(7), transfer(8)]) == [FAILED, FAILED]
    assert not bench.breaker.answers


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
    assert not bench.breaker.answers


def test_a_lookup_that_memory_answers_is_no_probe() -> None:
    bench = Bench()
    bench.open()
    repair(bench.tier)
    bench.clock.now_s += 10
    assert bench.breaker.contains([ref_of(0)]) == [False]
    assert bench.state() is BreakerState.OPEN
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
    assert bench.state() is BreakerState.CLOSED


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


def test_puts_of_an_epoch_that_is_over_prove_nothing() -> None:
    """Writes that wait at a change of the weights all fail, but the tier is sound."""
    bench = Bench()
    old = transfer(0)._replace(namespace_id=b"old")
    bench.breaker.reset(NAMESPACE)
    for _ in range(5):
        assert bench.breaker.put([old, old]) == [FAILED, FAILED]
    assert bench.breaker.answers
    assert bench.breaker.put([old, transfer(1)._replace(namespace_id=NAMESPACE.id)]) == [FAILED, STORED]


def test_puts_that_a_clear_overtakes_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such puts fail on a sound tier, both if they began before the clear and during it."""
    bench = Bench()
    bench.tier.put_outcome = FAILED
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "before_put", bench.breaker.clear)
        assert [bench.breaker.put([transfer(0)]) for _ in range(5)] == [[FAILED]] * 5
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "clear", lambda: bench.breaker.put([transfer(0)]))
        for _ in range(5):
            bench.breaker.clear()
    assert bench.breaker.answers
    for _ in range(3):
        bench.breaker.put([transfer(0)])
    assert not bench.breaker.answers


def test_clear_goes_through_an_open_breaker() -> None:
    bench = Bench()
    bench.open()
    bench.breaker.remove([ref_of(0)])
    bench.breaker.clear()
    assert not bench.tier.chunks
    assert bench.breaker.pending_removals == 0
    assert bench.state() is BreakerState.OPEN


def test_what_is_owed_is_removed_from_the_epoch_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines may still be in it."""
    tier = FakeTier()
    breaker = CircuitBreaker(tier, failures=5)
    breaker.put([transfer(1)])
    removed: list[bytes | None] = []
    with monkeypatch.context() as patch:
        patch.setattr(tier, "remove", Mock(side_effect=TierError("no")))
        with pytest.raises(TierError):
            breaker.remove([ref_of(1)])
    monkeypatch.setattr(tier, "remove", lambda _refs: removed.append(tier.namespace_id))
    breaker.reset(OTHER)
    assert removed == [None]
    assert tier.namespace_id == OTHER.id
    assert breaker.pending_removals == 0


def test_a_removal_that_hangs_over_a_reset_takes_no_later_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal may take effect in the new epoch, so its chunk is stored there only after the removal has ended."""
    tier = FakeTier()
    breaker = CircuitBreaker(tier, failures=5)
    breaker.put([transfer(1)])
    hung: Future[None] = Future()
    for error in (TierError("no"), TierTimeoutError("late", hung)):
        monkeypatch.setattr(tier, "remove", Mock(side_effect=error))
        if isinstance(error, TierTimeoutError):
            breaker.reset(OTHER)
        else:
            with pytest.raises(TierError):
                breaker.remove([ref_of(1)])
    assert breaker.put([transfer(1)]) == [FAILED]
    hung.set_result(None)
    assert breaker.put([transfer(1)]) == [STORED]


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


def count_calls(tier: FakeTier) -> Counter[str]:
    """Count the calls about chunks that reach a tier, from now on."""
    asked: Counter[str] = Counter()

    def counted(operation: str) -> Callable[[Any], Any]:
        forward = getattr(tier, operation)

        def call(batch: Any) -> Any:
            asked[operation] += 1
            return forward(batch)

        return call

    for operation in ("contains", "get", "put"):
        setattr(tier, operation, counted(operation))
    return asked


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
    asked = count_calls(bench.tier)
    known = set(range(4))  # chunks that the tier must have; a short-cut may hide them but never falsify them
    for event, number in events:
        before = asked.total()
        try:
            if event == "get":
                item = transfer(number, fill=0xEE)
                (outcome,) = bench.breaker.get([item])
                assert outcome is (FAILED if asked.total() == before else HIT if number in known else MISS)
                assert outcome is not HIT or (item.buffer == number).all()
            elif event == "put":
                (outcome,) = bench.breaker.put([transfer(number)])
                assert outcome is (FAILED if asked.total() == before else STORED)
                if outcome is STORED:
                    known.add(number)
            elif event == "contains":
                (answer,) = bench.breaker.contains([ref_of(number)])
                assert answer == (number in known and asked.total() != before)
            elif event == "remove":
                bench.breaker.remove([ref_of(number)])
                known.discard(number)
            elif event == "wait":
                bench.clock.now_s += number
            else:
                (break_down if event == "break" else repair)(bench.tier)
        except TierError:
            assert bench.tier.before_get is broken, "the breaker made up a failure"
        known -= {number for number in range(6) if ref_of(number) in bench.breaker._removals.refs()}
    repair(bench.tier)
    bench.clock.now_s += 1
    bench.breaker.get([transfer(0)])  # detects a clock that has jumped back
    bench.clock.now_s += 10
    assert bench.breaker.put([transfer(5)]) == [STORED]
    assert bench.state() is BreakerState.CLOSED
    assert set(bench.tier.chunks) == {ref_of(number) for number in known | {5}}


def test_what_was_cleared_while_it_was_put_opens_no_breaker() -> None:
    tier = FakeTier()
    breaker = CircuitBreaker(tier, failures=1)
    tier.put_outcome = FAILED
    for forget in (breaker.clear, lambda: breaker.reset(NAMESPACE)):
        tier.before_put = forget
        assert breaker.put([transfer(1)]) == [FAILED]
        assert breaker.answers
    tier.before_put = lambda: None
    breaker.put([transfer(1)])
    assert not breaker.answers


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
    assert tier_around.answers
    assert tier.lent == 0
