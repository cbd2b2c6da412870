"""Tests of removals that a broken tier owes: their chunks are not served, and no later put is undone."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.rig import NAMESPACE
from support.wrapped import (
    FAILED,
    FULL,
    HIT,
    MISS,
    STORED,
    Bench,
    broken,
    fail,
    ref_of,
    repair,
    transfer,
)

from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import TierError, TierTimeoutError
from kvstore.tiers.guards import (
    BreakerState,
)
from kvstore.tiers.loan import Loan

if TYPE_CHECKING:
    pass


def test_what_was_removed_meanwhile_does_not_come_back() -> None:
    bench = Bench()
    bench.open()
    bench.breaker.remove([ref_of(0), ref_of(1)])
    repair(bench.tier)
    bench.clock.now_s += 10
    assert bench.breaker.put([transfer(1)]) == [STORED], "wanted again"
    assert bench.breaker.contains([ref_of(n) for n in range(4)]) == [False, True, True, True]
    assert bench.breaker.pending_removals == 0


def test_a_removal_that_failed_is_repeated_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: broken())
        with pytest.raises(TierError):
            bench.breaker.remove([ref_of(0)])
    assert bench.breaker.pending_removals == 1
    bench.breaker.remove([ref_of(1)])
    assert set(bench.tier.chunks) == {ref_of(2), ref_of(3)}
    assert bench.breaker.pending_removals == 0


@pytest.mark.parametrize("how", ["fails", "raises", "hangs"])
def test_a_put_that_failed_ends_no_owed_removal(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The tier still has the old chunk, whose bytes may be wrong."""
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
    assert bench.breaker.pending_removals == 1
    if how == "hangs":  # it may still store the chunk, and then nothing is owed; until then it must not be removed
        bench.breaker.remove([ref_of(1)])
        assert ref_of(0) in bench.tier.chunks
        late.set_result([STORED])
        assert bench.breaker.pending_removals == 0
        assert bench.breaker.get([transfer(0)]) == [HIT]
        return
    bench.breaker.remove([ref_of(1)])
    assert set(bench.tier.chunks) == {ref_of(2), ref_of(3)}


def test_what_is_owed_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose removal failed, perhaps because of wrong bytes, is not served from the tier."""
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
    """The removal may still take effect, so until it has ended its chunks cannot be put, and are misses."""
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
    assert not bench.breaker._removals._leaving
    assert not bench.breaker._removals._putting


@pytest.mark.parametrize("how", ["full", "overtaken"])
def test_a_put_that_stores_nothing_does_not_settle_a_removal(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old chunk is still there, and must be removed."""
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "remove", lambda refs: broken())
        with pytest.raises(TierError):
            bench.breaker.remove([ref_of(0), ref_of(1)])
        bench.tier.put_outcome = FULL
        if how == "full":
            assert bench.breaker.put([transfer(0)]) == [FULL]
        else:  # reads meanwhile do not settle it either
            patch.setattr(bench.tier, "before_put", lambda: bench.breaker.get([transfer(2)]))
            assert bench.breaker.put([transfer(0)]) == [FULL]
    assert bench.breaker.pending_removals == 2
    bench.breaker.remove([ref_of(3)])
    assert set(bench.tier.chunks) == {ref_of(2)}
    assert bench.breaker.pending_removals == 0


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
