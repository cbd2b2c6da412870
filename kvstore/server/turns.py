"""The order in which files are written and deleted.

Work on one chunk's file ends in the order in which it was begun: otherwise an older version could replace a newer one.
Some work, such as a clear, has a whole namespace to itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple


class Work(NamedTuple):
    """Something to do.

    Attributes:
        run: does it, on a thread. Its argument is to be called when the work has ended, maybe after ``run`` returns.
        give_up: called if ``run`` raised something unforeseen.
    """

    run: Callable[[Callable[[], None]], None]
    give_up: Callable[[], None]


class Once:
    """Forwards the first call of it, from whatever thread, and ignores the others."""

    def __init__(self, action: Callable[..., None]) -> None:
        self._left = deque([action])

    def __call__(self, *args: object) -> None:
        """Call the action, unless that was done."""
        try:
            action = self._left.pop()
        except IndexError:
            return
        action(*args)


class _Held(NamedTuple):
    key: bytes | None  # of the chunk; None for work that needs the namespace to itself
    work: Work


@dataclass
class _Traffic:
    """The work in one namespace.

    Attributes:
        active: how much is under way, or waiting for its file.
        alone: the work that needs the namespace to itself and is next, or under way; None without any.
        held: what came after that, in order.
    """

    active: int = 0
    alone: Work | None = None
    held: deque[_Held] = field(default_factory=deque)


class Turns:
    """Thread-safe.

    Args:
        start: runs its first argument on another thread, and calls its second one if that raised.
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
        """Work on the file of a chunk, after what was begun before on it or on the whole namespace."""
        self._take(space_id, _Held(key, work))

    def take_all(self, space_id: bytes, work: Work) -> None:
        """Work on a whole namespace: what was begun before ends first, and what comes later waits."""
        self._take(space_id, _Held(None, work))

    def take_next(self, space_id: bytes, work: Work) -> None:
        """Work on a whole namespace before anything that waits. To be called by such work before it ends."""
        with self._lock:
            self._traffic[space_id].held.appendleft(_Held(None, work))

    def _take(self, space_id: bytes, item: _Held) -> None:
        with self._lock:
            traffic = self._traffic.setdefault(space_id, _Traffic())
            traffic.held.append(item)
            ready = self._admit(space_id, traffic)
        for begin in ready:
            begin()

    def _admit(self, space_id: bytes, traffic: _Traffic) -> list[Callable[[], None]]:
        """Take what waits, in order, as far as it may begin; returns what to call without the lock. Needs the lock."""
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
