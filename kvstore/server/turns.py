"""In which order files are worked on.

Of one chunk's file, what was begun first ends first: an older version would otherwise come to stand in the place of a
newer one. Some work has a namespace for itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple


class Work(NamedTuple):
    """Something to do.

    Attributes:
        run: does it, on a thread. It is given what to call when it has ended, which may be later than it returns.
        give_up: called instead of the rest of it, if it raised what nobody foresaw.
    """

    run: Callable[[Callable[[], None]], None]
    give_up: Callable[[], None]


class Once:
    """Calls something the first time that it is called itself, from whatever thread."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._left = deque([action])

    def __call__(self) -> None:
        """Call it, unless that was done."""
        try:
            action = self._left.pop()
        except IndexError:
            return
        action()


class _Held(NamedTuple):
    key: bytes | None  # of the chunk; None for what wants to be alone
    work: Work


@dataclass
class _Traffic:
    """What is done in one namespace.

    Attributes:
        active: works under way, or waiting for their file.
        alone: the one that wants to be alone, or is; None without one.
        held: what came after that, in order.
    """

    active: int = 0
    alone: Work | None = None
    held: deque[_Held] = field(default_factory=deque)


class Turns:
    """Thread-safe.

    Args:
        start: begins something on another thread, and calls the second if that raised.
    """

    def __init__(self, start: Callable[[Callable[[], None], Callable[[], None]], None]) -> None:
        self._start = start
        self._waiting: dict[bytes, deque[Work]] = {}  # for the file of a chunk, while something is done to it
        self._traffic: dict[bytes, _Traffic] = {}  # by namespace, while there is any
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._traffic)

    def take(self, space_id: bytes, key: bytes, work: Work) -> None:
        """Do something to the file of a chunk once nothing else is done to it, and nothing wants to be alone."""
        self._take(space_id, _Held(key, work))

    def take_all(self, space_id: bytes, work: Work) -> None:
        """Do something to a namespace: what was begun before ends first, and what comes later waits."""
        self._take(space_id, _Held(None, work))

    def take_next(self, space_id: bytes, works: Sequence[tuple[bytes, Work]]) -> None:
        """Do something to files before what waits. For what is alone, to be called before it says that it has ended."""
        with self._lock:
            self._traffic[space_id].held.extendleft(_Held(key, work) for key, work in reversed(works))

    def _take(self, space_id: bytes, item: _Held) -> None:
        with self._lock:
            traffic = self._traffic.setdefault(space_id, _Traffic())
            traffic.held.append(item)
            ready = self._admit(space_id, traffic)
        for begin in ready:
            begin()

    def _admit(self, space_id: bytes, traffic: _Traffic) -> list[Callable[[], None]]:
        """Let in what waits, in order, as far as it may; what is to be begun without the lock. Needs the lock."""
        ready: list[Callable[[], None]] = []
        while traffic.held and traffic.alone is None:
            key, work = traffic.held.popleft()
            if key is None:
                traffic.alone = work
                break
            traffic.active += 1
            waiting = self._waiting.get(key)
            if waiting is None:
                self._waiting[key] = deque()
                ready.append(partial(self._begin, work, partial(self._end, space_id, key)))
            else:
                waiting.append(work)
        if traffic.alone is not None and not traffic.active:
            traffic.active = 1  # itself
            ready.append(partial(self._begin, traffic.alone, partial(self._end_alone, space_id)))
        return ready

    def _begin(self, work: Work, end: Callable[[], None]) -> None:
        ending = Once(end)

        def give_up() -> None:
            work.give_up()
            ending()

        self._start(partial(work.run, ending), give_up)

    def _end(self, space_id: bytes, key: bytes) -> None:
        with self._lock:
            traffic = self._traffic[space_id]
            traffic.active -= 1
            ready = self._admit(space_id, traffic)
            if self._waiting[key]:
                ready.append(partial(self._begin, self._waiting[key].popleft(), partial(self._end, space_id, key)))
            else:
                del self._waiting[key]
            self._forget(space_id, traffic)
        for begin in ready:
            begin()

    def _end_alone(self, space_id: bytes) -> None:
        with self._lock:
            traffic = self._traffic[space_id]
            traffic.active, traffic.alone = 0, None
            ready = self._admit(space_id, traffic)
            self._forget(space_id, traffic)
        for begin in ready:
            begin()

    def _forget(self, space_id: bytes, traffic: _Traffic) -> None:
        if not (traffic.active or traffic.held or traffic.alone):
            del self._traffic[space_id]
