"""Deadlines by name."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

_SLACK: Final = 64  # stale entries of the heap that are not worth clearing away

Name = TypeVar("Name", bound=str | bytes)


class Deadlines(Generic[Name]):
    """Named deadlines. Memory is proportional to the names, time to those that expire."""

    def __init__(self) -> None:
        self._at_s: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []  # an entry at or before each, and stale ones

    def set(self, name: Name, at_s: float) -> None:
        """Set or move the deadline of a name; infinity means never."""
        known_s = self._at_s.get(name)
        self._at_s[name] = at_s
        if known_s is None or at_s < known_s:  # a later one gets an entry once the known one is due
            heapq.heappush(self._heap, (at_s, name))
            self._clear_away()

    def withdraw(self, name: Name) -> None:
        """Remove the deadline of a name. Unknown names are ignored."""
        if self._at_s.pop(name, None) is not None:
            self._clear_away()

    def take_due(self, now_s: float, at_most: int = sys.maxsize) -> list[Name]:
        """Remove and return the names that have expired by now, earliest first; the rest at a later call."""
        names = (name for name in self.each_due(now_s) if name is not None)
        due = list(islice(names, at_most))
        self._clear_away()
        return due

    def each_due(self, now_s: float) -> Iterator[Name | None]:
        """Remove the names that have expired by now, earliest first; None stands for a step that removes none."""
        while self._heap and self._heap[0][0] <= now_s:
            entry_s, name = heapq.heappop(self._heap)
            at_s = self._at_s.get(name)
            if at_s == entry_s:
                del self._at_s[name]
                yield name
                continue
            if at_s is not None and at_s > entry_s:
                heapq.heappush(self._heap, (at_s, name))
            yield None

    def _clear_away(self) -> None:
        """Drop stale entries once they are the majority, so that each costs constant time."""
        if len(self._heap) > 2 * len(self._at_s) + _SLACK:
            self._heap = [(at_s, name) for name, at_s in self._at_s.items()]
            heapq.heapify(self._heap)
