"""Reads that several threads carry out together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

from kvstore.tiers.disk.shared_reads import SharedReads

WAIT_S = 20.0


class Gate:
    """A read that has begun when ``begun`` is set, and ends on command."""

    def __init__(self, result: bool = True) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._result = result

    def __call__(self) -> bool:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        return self._result


def read_all(shared: SharedReads, reads: list[Callable[[], bool]]) -> list[bool]:
    with closing(shared.results(reads)) as results:
        return list(results)


def test_one_thread_reads_in_order() -> None:
    done: list[int] = []

    def read(number: int) -> bool:
        done.append(number)
        return number != 2

    assert read_all(SharedReads(), [partial(read, number) for number in range(4)]) == [True, True, False, True]
    assert done == [0, 1, 2, 3]


def test_who_comes_later_reads_for_who_came_before() -> None:
    shared, first, second = SharedReads(), [Gate(), Gate(), Gate()], [Gate(), Gate()]
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(read_all, shared, list(first))
        assert first[0].begun.wait(WAIT_S)
        other = threads.submit(read_all, shared, list(second))
        assert first[1].begun.wait(WAIT_S)
        assert not second[0].begun.is_set()
        first[1].may_end.set()
        assert first[2].begun.wait(WAIT_S), "by the second thread"
        first[0].may_end.set()
        first[2].may_end.set()
        for gate in second:
            gate.may_end.set()
        assert one.result(WAIT_S) == [True, True, True]
        assert other.result(WAIT_S) == [True, True]


def test_an_error_is_that_of_its_own_call() -> None:
    shared, gate = SharedReads(), Gate()

    def fail() -> bool:
        raise OSError("broken")

    with ThreadPoolExecutor(2) as threads:
        broken = threads.submit(read_all, shared, [gate, fail])
        assert gate.begun.wait(WAIT_S)
        sound = threads.submit(read_all, shared, [lambda: True])
        assert sound.result(WAIT_S) == [True]
        gate.may_end.set()
        with pytest.raises(OSError, match="broken"):
            broken.result(WAIT_S)


def test_whoever_gives_up_waits_for_what_has_begun_and_withdraws_the_rest() -> None:
    shared, gates, never = SharedReads(), [Gate(result=False), Gate()], Gate()

    def first_only() -> bool:
        with closing(shared.results([*gates, never])) as results:
            return next(iter(results))

    with ThreadPoolExecutor(2) as threads:
        gives_up = threads.submit(first_only)
        assert gates[0].begun.wait(WAIT_S)
        helper = threads.submit(read_all, shared, [lambda: True])
        assert gates[1].begun.wait(WAIT_S), "by the helper"
        withdrawn = shared._waiting[0][0]
        gates[0].may_end.set()
        while not withdrawn.cancelled():
            time.sleep(0.001)
        assert not gives_up.done(), "one of its reads is under way"
        gates[1].may_end.set()
        assert gives_up.result(WAIT_S) is False
        assert helper.result(WAIT_S) == [True]
        assert not never.begun.is_set()
