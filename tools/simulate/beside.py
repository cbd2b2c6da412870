"""Work side by side: pure computations in forked processes, one for each processor."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, TypeVar

from kvstore.model.errors import ConfigError

T = TypeVar("T")
Tick = Callable[[int], None]
"""Callback with the number of requests replayed since the last call."""

_POLL_S: Final = 0.2
_forked: list[Any] = []  # in a forked process: its work, and the count


def side_by_side(works: Sequence[Callable[..., T]], tick: Tick) -> list[T]:
    """Return the results of functions, which count what they have done by a ``tick`` of their own.

    The processes see what this one has in memory, so nothing large is copied to them. This one waits; if it is
    interrupted, or a function raises, they are killed.

    Raises:
        ConfigError: one of them was killed.
    """
    count = min(len(works), len(os.sched_getaffinity(0)))
    if count < 2:
        return [work(tick=tick) for work in works]
    fork = multiprocessing.get_context("fork")
    done, seen = fork.Value("q", 0), 0
    with ProcessPoolExecutor(count, mp_context=fork, initializer=_begin, initargs=(works, done)) as pool:
        try:
            results = [pool.submit(_run, number) for number in range(len(works))]
            waiting = {*results}
            while waiting:
                ended, waiting = wait(waiting, timeout=_POLL_S)
                tick(done.value - seen)
                seen = done.value
                for result in ended:
                    result.result()
            return [result.result() for result in results]
        except BrokenProcessPool as error:
            raise ConfigError(
                "a process that replays the trace was killed, probably for lack of memory: name fewer policies or sizes"
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _begin(works: Sequence[Callable[..., object]], done: Any) -> None:  # noqa: ANN401 - a shared number
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, too, and kills this one
    _forked[:] = works, done


def _run(number: int) -> Any:  # noqa: ANN401 - what the function returns
    works, done = _forked

    def tick(count: int) -> None:
        with done.get_lock():
            done.value += count

    return works[number](tick=tick)
