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

Work = Callable[[Callable[[], None]], None]
"""Begins some work on other threads. It must call its argument once, when the work has ended or failed."""


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


class FileOrder:
    """Keeps the order of works. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Work]] = {}  # by the key of a chunk, while work on its file is under way
        self._traffic: dict[bytes, _Traffic] = {}  # by namespace, while it has any work
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """True if any work is under way."""
        return bool(self._traffic)

    def queue(self, space_id: bytes, key: bytes, work: Work) -> None:
        """Queue work on the file of a chunk, behind earlier work on it or on the whole namespace."""
        self._queue(space_id, _Held(key, work))

    def queue_alone(self, space_id: bytes, work: Work) -> None:
        """Queue work on a whole namespace; earlier work there ends first, and later work waits."""
        self._queue(space_id, _Held(None, work))

    def queue_next(self, space_id: bytes, work: Work) -> None:
        """Queue work on a whole namespace ahead of all that waits. To be called by such work before it ends."""
        with self._lock:
            self._traffic[space_id].held.appendleft(_Held(None, work))

    def _queue(self, space_id: bytes, item: _Held) -> None:
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
                ready.append(partial(work, partial(self._end, space_id, key)))
            else:
                waiting.append(work)
        if traffic.alone is not None and not traffic.active:
            traffic.active = 1  # itself
            ready.append(partial(traffic.alone, partial(self._end, space_id, None)))
        return ready

    def _end(self, space_id: bytes, key: bytes | None) -> None:
        with self._lock:
            traffic = self._traffic[space_id]
            traffic.active -= 1
            if key is None:
                traffic.alone = None
            ready = self._admit(space_id, traffic)
            if key is not None and self._waiting[key]:
                ready.append(partial(self._waiting[key].popleft(), partial(self._end, space_id, key)))
            elif key is not None:
                del self._waiting[key]
            if not (traffic.active or traffic.held or traffic.alone):
                del self._traffic[space_id]
        for begin in ready:
            begin()
