"""Which of many things have run out. Pure: the caller tells the time."""

from __future__ import annotations

import heapq
from typing import Final, Generic, TypeVar

Name = TypeVar("Name", bound=str | bytes)

_SLACK: Final = 64  # withdrawn entries that are not worth clearing away


class Deadlines(Generic[Name]):
    """Named moments. Memory is proportional to the names that have one, and to ask costs what has run out."""

    def __init__(self) -> None:
        self._at_s: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []  # also of moments that were moved or withdrawn

    def __len__(self) -> int:
        return len(self._at_s)

    @property
    def num_entries(self) -> int:
        """Entries held in memory, for at most twice as many names."""
        return len(self._heap)

    def set(self, name: Name, at_s: float) -> None:
        """Let a name run out at a moment, in place of any other; infinity is never."""
        self._at_s[name] = at_s
        heapq.heappush(self._heap, (at_s, name))
        self._clear_away()

    def withdraw(self, name: Name) -> None:
        """A name does not run out any more. Unknown ones are ignored."""
        if self._at_s.pop(name, None) is not None:
            self._clear_away()

    def take_due(self, now_s: float) -> list[Name]:
        """The names that have run out by now, the first first; they are known no longer."""
        due: list[Name] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, name = heapq.heappop(self._heap)
            if self._at_s.get(name) == at_s:
                del self._at_s[name]
                due.append(name)
        return due

    def _clear_away(self) -> None:
        """Drop stale entries once they are the majority: so each costs a constant time."""
        if len(self._heap) > 2 * len(self._at_s) + _SLACK:
            self._heap = [(at_s, name) for name, at_s in self._at_s.items()]
            heapq.heapify(self._heap)
