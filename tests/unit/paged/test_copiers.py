"""Copies shared between threads: each is made once, and none runs after the call."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate
from support.rig import Rig, tokens_of

from kvstore.paged.base import Copiers, copy_threads


@pytest.fixture
def copiers() -> Iterator[Copiers]:
    made = Copiers(3)
    yield made
    made.close()
    assert not any(thread.name.startswith("kvstore-copy") for thread in threading.enumerate())


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 100])
def test_everything_is_copied_once(copiers: Copiers, num_items: int) -> None:
    done: list[int] = []
    copiers.each(range(num_items), done.append)
    assert sorted(done) == list(range(num_items))


def test_helpers_copy_while_the_caller_does(copiers: Copiers) -> None:
    everybody = threading.Barrier(3, timeout=HANG_GUARD_S)

    def copy(_: int) -> None:
        everybody.wait()

    copiers.each(range(3), copy)


def test_a_helper_that_has_not_begun_is_not_waited_for(copiers: Copiers) -> None:
    gate = Gate()
    busy = threading.Thread(target=copiers.each, args=([0, 1, 2], lambda _: gate()))
    busy.start()
    assert gate.reached.wait(HANG_GUARD_S)
    done: list[int] = []
    copiers.each(range(9), done.append)  # another call's copies hold the helpers
    gate.open()
    busy.join(HANG_GUARD_S)
    assert done == list(range(9))


@pytest.mark.parametrize("by_caller", [True, False])
def test_what_a_copy_raises(copiers: Copiers, by_caller: bool) -> None:
    both = threading.Barrier(2, timeout=HANG_GUARD_S)
    caller, running = threading.current_thread(), []

    def copy(number: int) -> None:
        running.append(number)
        if number < 2:
            both.wait()
            if (threading.current_thread() is caller) is by_caller:
                raise ZeroDivisionError
        running.remove(number)

    two = Copiers(2)
    with pytest.raises(ZeroDivisionError):
        two.each(range(1000), copy)
    assert len(running) == 1  # the one that raised
    two.close()


@pytest.mark.parametrize("raises", ["kvstore-copy_0", "kvstore-copy_1"])
def test_none_copies_after_another_has_raised(copiers: Copiers, gate: Gate, raises: str) -> None:
    """Not even the helper that began last: the caller may use the slot for another chunk then."""
    all_three = threading.Barrier(3, timeout=HANG_GUARD_S)
    others = threading.Semaphore(0)
    ended: list[str] = []

    def copy(_: int) -> None:
        all_three.wait()
        name = threading.current_thread().name
        if name == raises:
            threading.Timer(0.05, gate.open).start()
            raise ZeroDivisionError
        if name.startswith("kvstore-copy"):
            gate()
        ended.append(name)
        others.release()

    with pytest.raises(ZeroDivisionError):
        copiers.each(range(3), copy)
    assert len(ended) == 2
    assert others.acquire(timeout=HANG_GUARD_S)


@pytest.mark.parametrize("refused", ["kvstore-copy_1", "kvstore-copy"])
def test_where_no_thread_can_be_started_the_others_copy(
    copiers: Copiers, gate: Gate, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """And none goes on after the call, when the slots may be other chunks'."""
    refuse_threads(monkeypatch, refused)
    done: list[int] = []

    def copy(number: int) -> None:
        if threading.current_thread().name.startswith("kvstore-copy"):
            threading.Timer(0.05, gate.open).start()
            gate()
        done.append(number)

    copiers.each(range(9), copy)
    assert sorted(done) == list(range(9))


def test_one_thread_needs_no_pool() -> None:
    alone = Copiers(1)
    done: list[int] = []
    alone.each(range(3), done.append)
    assert done == [0, 1, 2]
    assert not any(thread.name.startswith("kvstore-copy") for thread in threading.enumerate())
    alone.close()


def test_no_more_threads_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, threads in ((1, 1), (2, 2), (64, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, count=processors: set(range(count)))
        assert copy_threads() == threads


def test_blocks_are_the_same_with_help(copiers: Copiers) -> None:
    rig = Rig()
    tokens, ids = tokens_of(1, 40), rig.blocks(40)
    rig.compute(tokens, ids)
    blocks, others = np.array(ids, np.int64), np.array(ids[::-1], np.int64)
    alone, helped = rig.paged, rig.paged.with_help(copiers)
    first, second = (np.zeros(alone.layout.payload_bytes(len(ids)), np.uint8) for _ in range(2))
    alone.gather(blocks, first)
    helped.gather(blocks, second)
    assert first.any()
    assert np.array_equal(first, second)
    helped.scatter(others, first, len(ids), 0)
    alone.gather(others, second)
    assert np.array_equal(first, second)
