"""Calls on threads of a pool: where no thread can be started, none of them begins later."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate

from kvstore.model.threads import start


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2, "some") as made:
        yield made


def test_results_and_errors_arrive(pool: ThreadPoolExecutor) -> None:
    assert start(pool, lambda: 7, int).result(HANG_GUARD_S) == 7
    with pytest.raises(ZeroDivisionError):
        start(pool, lambda: 1 // 0, int).result(HANG_GUARD_S)


def test_what_cannot_begin_never_does(pool: ThreadPoolExecutor, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that there is would carry it out after its own call."""
    done: list[str] = []
    busy = start(pool, gate, lambda: None)
    assert gate.reached.wait(HANG_GUARD_S)
    refuse_threads(monkeypatch, "some")
    assert start(pool, lambda: done.append("later"), lambda: done.append("at once")).done()
    gate.open()
    busy.result(HANG_GUARD_S)
    pool.shutdown(wait=True)
    assert done == ["at once"]
    assert start(pool, lambda: 7, int).result(HANG_GUARD_S) == 0


def test_what_the_pool_cancels_is_cancelled(gate: Gate) -> None:
    pool = ThreadPoolExecutor(1)
    busy, waiting = start(pool, gate, lambda: None), start(pool, int, int)
    assert gate.reached.wait(HANG_GUARD_S)
    pool.shutdown(wait=False, cancel_futures=True)
    assert wait([waiting], HANG_GUARD_S).done == {waiting}
    with pytest.raises(CancelledError):
        waiting.result(HANG_GUARD_S)
    gate.open()
    busy.result(HANG_GUARD_S)
    pool.shutdown(wait=True)
