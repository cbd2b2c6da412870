"""Units of the adaptive policy, and their order in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvstore.model.keys import PrefixKey

PAGE_UNITS = 64


class Unit:
    """Chunks of one class that one request touched last, which have the same age and value.

    Attributes:
        cls: the class.
        time: the clock at the end of the request.
        keys: head first; includes keys that have moved to another unit since.
        num_keys: keys that belong to this unit.
        here: those of them whose chunks are in the tier.
        depth: a position after all keys in ``here``.
    """

    __slots__ = ("cls", "depth", "here", "keys", "num_keys", "time")

    def __init__(self, cls: int, time: int) -> None:
        self.cls = cls
        self.time = time
        self.keys: list[PrefixKey] = []
        self.num_keys = 0
        self.here: set[PrefixKey] = set()
        self.depth = 0

    def append(self, key: PrefixKey) -> None:
        """Add a key as the deepest."""
        self.keys.append(key)
        self.num_keys += 1

    def enter(self, key: PrefixKey) -> None:
        """Note that the chunk of a key is in the tier."""
        self.here.add(key)
        self.depth = len(self.keys)

    def deepest_first(self) -> Iterator[PrefixKey]:
        """Yield the chunks in the tier, from the end of the chain to its head."""
        while self.depth and self.keys[self.depth - 1] not in self.here:
            self.depth -= 1
        for place in range(self.depth - 1, -1, -1):
            if self.keys[place] in self.here:
                yield self.keys[place]


class History:
    """All units in order of time, in pages that can be surveyed one by one while units are added and removed."""

    def __init__(self) -> None:
        self._pages: deque[deque[Unit]] = deque()
        self._place = 0  # number of the page to survey next

    def __bool__(self) -> bool:
        return bool(self._pages)

    def append(self, unit: Unit) -> None:
        """Add the newest unit."""
        if not self._pages or len(self._pages[-1]) >= PAGE_UNITS:
            self._pages.append(deque())
        self._pages[-1].append(unit)

    def pop_oldest(self) -> Unit:
        """Remove and return the oldest unit."""
        page = self._pages[0]
        unit = page.popleft()
        if not page:
            self._pages.popleft()
            self._place = max(0, self._place - 1)
        return unit

    def survey_page(self) -> list[Unit] | None:
        """Return the units of the next page that have keys, dropping the others; None once after the last page."""
        if self._place >= len(self._pages):
            self._place = 0
            return None
        page = self._pages[self._place]
        units = [unit for unit in page if unit.num_keys]
        if units:
            self._pages[self._place] = deque(units)
            self._place += 1
        else:
            del self._pages[self._place]
        return units
