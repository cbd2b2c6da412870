"""Work side by side in forked processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial

import pytest

from kvstore.model.errors import ConfigError
from kvstore.tools.simulate.beside import Tick, side_by_side


def work(number: int, *, tick: Tick) -> tuple[int, int]:
    """Return a number, and the process that computed with it."""
    tick(number)
    return number, os.getpid()


def fail(*, tick: Tick) -> tuple[int, int]:
    raise ValueError(f"broken on purpose by {tick.__name__}")


def hang(*, tick: Tick) -> tuple[int, int]:
    tick(1)
    time.sleep(600)
    return 0, 0


@pytest.mark.parametrize("processors", [1, 3])
def test_results_come_in_order_and_all_is_counted(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors))
    ticks: list[int] = []
    found = side_by_side([partial(work, number) for number in range(7)], ticks.append)
    assert [number for number, _ in found] == list(range(7))
    assert sum(ticks) == sum(range(7))
    assert all((process == os.getpid()) is (processors == 1) for _, process in found)
    assert not multiprocessing.active_children()


def test_a_failure_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    with pytest.raises(ValueError, match="broken on purpose"):
        side_by_side([hang, fail], lambda _: None)
    assert not multiprocessing.active_children()


def test_an_interrupt_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))

    def tick(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side([hang, hang], tick)
    assert not multiprocessing.active_children()


def die(*, tick: Tick) -> tuple[int, int]:
    tick(1)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0, 0


def test_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    with pytest.raises(ConfigError, match="lack of memory"):
        side_by_side([hang, die], lambda _: None)
    assert not multiprocessing.active_children()
