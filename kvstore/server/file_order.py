"""Order of writes and deletions of files.

Work on one chunk's file runs one after another in the order of the calls, because otherwise an older version could
replace a newer one. Some work, such as a clear, runs alone in its namespace.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple


class Work(NamedTuple):
    """Work to do.

    Attributes:
        run: does the work, on a thread. It must call its argument when the work has ended, maybe after it returns.
        give_up: called if ``run`` raised unexpectedly.
    """

    run: Callable[[Callable[[], None]], None]
    give_up: Callable[[], None]


class Once:
    """Forwards its first call, from any thread, and ignores the others."""

    def __init__(self, action: Callable[..., None]) -> None:
        self._left = deque([action])

    def __call__(self, *args: object) -> None:
        """Call the action, unless it was called before."""
        try:
            action = self._left.pop()
        except IndexError:
            return
        action(*args)


class _Held(NamedTuple):
    key: bytes | None  # of the chunk; None for work that runs alone in the namespace
    work: Work


@dataclass
class _Traffic:
    """Work in one namespace.

    Attributes:
        active: number of works under way, or waiting for their file.
        alone: the work that runs alone in the namespace and is next, or under way; None without any.
        held: works after that, in order.
    """

    active: int = 0
    alone: Work | None = None
    held: deque[_Held] = field(default_factory=deque)


class Turns:
    """Keeps the order of works. Thread-safe.

    Args:
        start: runs its first argument on another thread, and calls its second one if that raised.
    """

    def __init__(self, start: Callable[[Callable[[], None], Callable[[], None]], None]) -> None:
        self._start = start
        self._waiting: dict[bytes, deque[Work]] = {}  # by the key of a chunk, while work on its file is under way
        self._traffic: dict[bytes, _Traffic] = {}  # by namespace, while it has any work
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """True if any work is under way."""
        return bool(self._traffic)

    def take(self, space_id: bytes, key: bytes, work: Work) -> None:
        """Queue work on the file of a chunk, behind earlier work on it or on the whole namespace."""
        self._take(space_id, _Held(key, work))

    def take_all(self, space_id: bytes, work: Work) -> None:
        """Queue work on a whole namespace; earlier work there ends first, and later work waits."""
        self._take(space_id, _Held(None, work))

    def take_next(self, space_id: bytes, work: Work) -> None:
        """Queue work on a whole namespace ahead of all that waits. To be called by such work before it ends."""
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
        """Admit work in order, as far as it may begin; return the calls to make without the lock. Needs the lock."""
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
