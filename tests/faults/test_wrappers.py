"""Tests of the other wrappers, each around an in-memory tier, and of all of them together."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.faults import Fault, FaultInjector, FaultKind
from support.rig import BLOCKS_PER_CHUNK, NAMESPACE, FakeTier
from support.wrapped import (
    BRIEF_S,
    CORRUPT,
    FAILED,
    FULL,
    HANG_GUARD_S,
    HIT,
    MISS,
    STORED,
    Lender,
    break_down,
    broken,
    injector,
    ref_of,
    transfer,
)

from kvstore.model.chunks import Outcome
from kvstore.model.errors import InvalidCallError, TierError, TierTimeoutError
from kvstore.testing.harness import EVEN, MINE
from kvstore.tiers.base import UNBOUNDED_BYTES, BoundedTier, Tier
from kvstore.tiers.guards import (
    BreakerState,
    CircuitBreaker,
    Guard,
    GuardOptions,
    Statistics,
    TierWrapper,
    find,
    guard,
    guarded,
    layers,
)
from kvstore.tiers.peers import PeersTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_wrapper_forwards_all_of_the_contract() -> None:
    contract = vars(Tier) | vars(BoundedTier)
    of_tier = {name for name, value in contract.items() if not name.startswith("_") and value is not None}
    assert of_tier <= vars(TierWrapper).keys(), "a wrapper would answer these in the tier's place"


@pytest.mark.parametrize("options", [GuardOptions(threads=0), GuardOptions(timeout_s=0.0), GuardOptions(failures=0)])
def test_a_tier_that_cannot_be_guarded_is_closed(options: GuardOptions) -> None:
    tier = FakeTier()
    with pytest.raises(InvalidCallError):
        guarded(tier, options)
    assert tier.is_closed


def test_around_a_tier_without_a_bound_there_is_none() -> None:
    wrapper = TierWrapper(PeersTier(FakeTier(), [], lambda url, namespace: FakeTier(), MINE, EVEN))
    assert wrapper.capacity_bytes == UNBOUNDED_BYTES
    calls: tuple[Callable[[], object], ...] = (
        wrapper.scan,
        lambda: wrapper.used_bytes,
        lambda: wrapper.usable_bytes,
        lambda: wrapper.stored_bytes(1),
        lambda: wrapper.size_of(ref_of(1)),
        lambda: wrapper.drop_spares(1),
    )
    for call in calls:
        with pytest.raises(InvalidCallError, match="the peers tier has no bound"):
            call()
    wrapper.close()


def test_layers_are_found_from_outside_in() -> None:
    tier = FakeTier()
    with_deadline = Guard(tier, 1.0, threads=1)
    outer = CircuitBreaker(with_deadline)
    assert list(layers(outer)) == [outer, with_deadline, tier]
    assert find(outer, Guard) is with_deadline
    assert find(outer, FakeTier) is tier
    assert find(outer, PeersTier) is None
    assert (outer.name, outer.capacity_bytes, outer.counters) == (tier.name, tier.capacity_bytes, tier.counters)
    assert repr(outer).startswith("CircuitBreaker(Guard(<")
    outer.close()
    assert tier.is_closed


def test_statistics_time_reads_and_writes() -> None:
    statistics = Statistics(Lender())
    begin_s = time.perf_counter()
    statistics.put([transfer(1), transfer(2)])
    statistics.get([transfer(1), transfer(9)])
    statistics.get([transfer(2)])
    statistics.borrow([ref_of(1), ref_of(9)]).end()
    statistics.contains([ref_of(1), ref_of(8), ref_of(9)])
    statistics.scan()
    statistics.remove(ref for ref in [ref_of(1)])
    statistics.clear()
    took_s = time.perf_counter() - begin_s
    reads_s, writes_s = statistics.take_times_s("get"), statistics.take_times_s("put")
    assert (len(reads_s), len(writes_s)) == (3, 1), "a loan is a read"
    assert min(reads_s + writes_s) > 0
    assert sum(reads_s + writes_s) < took_s
    assert statistics.take_times_s("get") == statistics.take_times_s("put") == [], "each time is told once"
    assert (statistics.errors, statistics.timeouts) == (0, 0)


def test_statistics_count_errors_and_timeouts(stack: ExitStack) -> None:
    tier, gate = FakeTier(), threading.Event()
    tier.before_get = lambda: gate.wait(HANG_GUARD_S)
    statistics = Guard(tier, BRIEF_S, threads=2)
    stack.callback(statistics.close)
    stack.callback(gate.set)
    with pytest.raises(TierTimeoutError):
        statistics.get([transfer(1)])
    gate.set()
    break_down(tier)
    for read in (statistics.get, lambda some: statistics.get_layers(some, range(1))):
        with pytest.raises(TierError):
            read([transfer(1)])
    assert (statistics.errors, statistics.timeouts) == (3, 1)
    times_s = statistics.take_times_s("get")
    assert len(times_s) == 2, "calls that failed took their time, too"
    assert max(times_s) >= BRIEF_S


@pytest.mark.parametrize("wrap", [Statistics, lambda tier: Guard(tier, HANG_GUARD_S, threads=1)])
@pytest.mark.parametrize("operation", ["contains", "get", "get_layers", "borrow", "put", "remove", "clear", "reset"])
def test_statistics_count_every_operation_that_fails(
    operation: str, wrap: Callable[[Tier], Statistics], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FakeTier()
    monkeypatch.setattr(tier, operation, lambda *_: broken())
    statistics = wrap(tier)
    others: dict[str, tuple[object, ...]] = {"get_layers": ([], range(1)), "clear": (), "reset": (NAMESPACE,)}
    with pytest.raises(TierError):
        getattr(statistics, operation)(*others.get(operation, ([],)))
    assert (statistics.errors, statistics.timeouts) == (1, 0)
    statistics.close()


def test_statistics_lose_no_call_of_many_threads() -> None:
    statistics = Statistics(FakeTier())
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: statistics.get([transfer(1)]) and statistics.take_times_s("get"), range(400)))
    assert sum(len(times_s) for times_s in taken) + len(statistics.take_times_s("get")) == 400


def test_statistics_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_TIMES", 3)
    statistics = Statistics(FakeTier())
    for _ in range(5):
        statistics.get([])
    assert len(statistics.take_times_s("get")) == 3


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


def test_a_guarded_tier_survives_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tier, faulty = injector(Fault(FaultKind.HANG, "get"))
    disk = guarded(faulty, GuardOptions(timeout_s=BRIEF_S, threads=4, failures=2, probe_interval_s=0.0))
    statistics = find(disk, Guard)
    assert statistics is not None
    assert [type(layer) for layer in layers(disk)] == [CircuitBreaker, Guard, FaultInjector, FakeTier]
    pendings = []
    for _ in range(2):
        with pytest.raises(TierTimeoutError) as caught:
            disk.get([transfer(1)])
        pendings.append(caught.value.pending)
    assert not disk.answers
    disk.remove([ref_of(0)])
    faulty.heal()
    for pending in pendings:
        assert pending.result(HANG_GUARD_S) == [HIT]
    assert disk.get([transfer(1)]) == [HIT]
    assert disk.state is BreakerState.CLOSED
    assert disk.contains([ref_of(0), ref_of(1)]) == [False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "took longer than" in caplog.messages[0]
    assert (len(statistics.take_times_s("get")), statistics.errors, statistics.timeouts) == (3, 2, 2)
    disk.close()
    assert tier.is_closed
