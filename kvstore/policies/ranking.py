"""Ranking of units by value: the part of the adaptive policy that does not depend on how their keys are kept.

Chunks of one class that one request touched have the same age and value. They form one *unit*. Of each class only the
oldest and the newest units are compared.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from kvstore.policies.survival import (
    NO_ANSWER,
    NUM_ANSWERS,
    NUM_CLASSES,
    NUM_HALVES,
    NUM_USES,
    SurvivalTable,
    answer_of,
    bucket_of,
)

MOST_USES: Final = NUM_USES - 1
_SURVEY_INTERVAL = 2_000  # chunks touched between two surveys, at least
_CHUNKS_PER_UNIT = 2  # touched between two surveys for each unit that waits, so that surveys cost little
_SURVEY_UNITS = 8  # surveyed for each chunk touched
_PAGE_UNITS = 64


class Unit:
    """Chunks of one class that one request touched last. Subclasses keep their keys.

    Attributes:
        cls: the class.
        half: the half of all requests in which it counts.
        time: the clock when the request touched them, or ended.
        num_keys: keys that belong to this unit, of chunks in the tier or remembered.
    """

    __slots__ = ("cls", "half", "num_keys", "time")

    def __init__(self) -> None:
        self.cls = self.half = self.time = self.num_keys = 0

    @property
    def uses(self) -> int:
        """Uses of each chunk before the last one."""
        return self.cls // NUM_ANSWERS


U = TypeVar("U", bound=Unit)
_End = tuple[float, int, int, bool, U]
"""Value, time and class of a class's oldest unit, or of its newest if that is True; at equal value the older goes."""


class Ranking(Generic[U]):
    """The units of a tier in the order of their value, and the experience with earlier ones.

    Args:
        trim: called for a surveyed unit, may drop what it keeps of keys that have moved to another one.

    Attributes:
        clock: chunks touched.
        table: the experience.
        stripped: units of which only the chunks in the tier are remembered.
    """

    def __init__(self, trim: Callable[[U], None] | None = None) -> None:
        self.clock = 0
        self.table = SurvivalTable()
        self.stripped: dict[U, None] = {}
        self._trim = trim
        self._num_units = 0  # so far
        self._next_survey = _SURVEY_INTERVAL
        self._num_surveyed = 0  # units, in this survey so far
        self._history = _History[U]()
        self._queues: list[OrderedDict[U, None]] = [OrderedDict() for _ in range(NUM_CLASSES)]  # units in the tier
        self._ends: list[list[_End[U]]] = [[] for _ in range(NUM_CLASSES)]  # by class, up to date but for ...
        self._changed = {*range(NUM_CLASSES)}  # ... these

    # -- what happened -----------------------------------------------------------------------------------------------

    def touch(self, num_chunks: int) -> int:
        """Advance the clock and return the time before."""
        now = self.clock
        self.clock += num_chunks
        self._changed.update(range(NUM_CLASSES))
        return now

    def begin(self, unit: U, uses: int) -> U:
        """Set up a new unit of chunks that were used so often before, at most ``MOST_USES``."""
        unit.cls, unit.half, unit.time = uses * NUM_ANSWERS + NO_ANSWER, self._num_units % NUM_HALVES, self.clock
        self._num_units += 1
        return unit

    def remember(self, units: Sequence[U]) -> None:
        """Add the new units of a request to the history, head first; the deepest will be forgotten first."""
        for unit in reversed(units):
            self._history.append(unit)

    def hit(self, unit: U, now: int, count: int = 1) -> int:
        """Count chunks of a unit that are used at ``now``, and return the uses with which a new unit begins."""
        uses = unit.uses
        if uses < MOST_USES or unit.time < now:  # a chunk in every request is no evidence for its class
            self.table.hit(unit.cls, unit.half, now - unit.time, count)
        return min(uses + 1, MOST_USES)

    def lose(self, unit: U, count: int = 1, now: int | None = None) -> None:
        """Count chunks of a unit that are no longer observed."""
        self.table.lose(unit.cls, unit.half, (self.clock if now is None else now) - unit.time, count)

    def end(self, unit: U, answer_tokens: int) -> None:
        """Note that the request that used a unit last has ended, after an answer of so many tokens."""
        cls = unit.cls - unit.cls % NUM_ANSWERS + answer_of(answer_tokens)
        if cls == unit.cls:
            return
        if self.clock > unit.time:
            self.lose(unit, unit.num_keys)
        is_queued = unit in self._queues[unit.cls]
        if is_queued:
            self.dequeue(unit)
        unit.cls, unit.time = cls, self.clock
        if is_queued:
            self.enqueue(unit)

    def enqueue(self, unit: U) -> None:
        """Note that a unit has chunks in the tier, unless that is known."""
        queue = self._queues[unit.cls]
        if unit in queue:
            return
        queue[unit] = None
        if unit.time < self.clock:
            queue.move_to_end(unit, last=False)
        self._changed.add(unit.cls)

    def dequeue(self, unit: U) -> None:
        """Note that a unit has no more chunks in the tier."""
        del self._queues[unit.cls][unit]
        self._changed.add(unit.cls)

    def drop(self, unit: U, count: int = 1) -> None:
        """Take keys from a unit."""
        unit.num_keys -= count
        if not unit.num_keys:
            self.stripped.pop(unit, None)

    def pop_oldest(self) -> U | None:
        """Remove the oldest unit from the history and return it; None without one."""
        return self._history.pop_oldest()

    def survey(self, num_touched: int) -> None:
        """Count some of the waiting keys, in proportion to the chunks touched; update the values after the last page.

        Counting all of them at once would take tens of milliseconds.
        """
        if self.clock < self._next_survey:
            return
        for _ in range(1 + num_touched * _SURVEY_UNITS // _PAGE_UNITS):
            units = self._history.survey_page()
            if units is None:
                self._count_waiting(self.stripped)
                self.table.update()
                self._changed.update(range(NUM_CLASSES))
                self._next_survey = self.clock + max(_SURVEY_INTERVAL, _CHUNKS_PER_UNIT * self._num_surveyed)
                self._num_surveyed = 0
                return
            self._num_surveyed += len(units)
            self._count_waiting(units)

    def _count_waiting(self, units: Iterable[U]) -> None:
        wait, clock, trim = self.table.wait, self.clock, self._trim
        for unit in units:
            if trim is not None:
                trim(unit)
            wait(unit.cls, unit.half, clock - unit.time, unit.num_keys)

    # -- what should go ----------------------------------------------------------------------------------------------

    def value(self, unit: U | None) -> float:
        """Return the value of a chunk of this unit; None stands for a new chunk."""
        if unit is None:
            return self.table.values[0][0]
        return self.table.values[unit.cls][bucket_of(self.clock - unit.time)]

    def by_value(self) -> Iterator[tuple[float, U]]:
        """Merge the ends of all classes' queues; at equal value the older unit comes first."""
        self._refresh()
        ends = [end for both in self._ends for end in both]
        heapify(ends)
        left = [len(queue) for queue in self._queues]
        walks: dict[tuple[int, bool], Iterator[U]] = {}
        while ends:
            value, _, cls, is_newest, unit = heappop(ends)
            if not left[cls]:
                continue
            left[cls] -= 1
            yield value, unit
            walk = walks.get((cls, is_newest))
            if walk is None:
                queue = self._queues[cls]
                walk = walks[cls, is_newest] = reversed(queue) if is_newest else iter(queue)
                next(walk)  # the end itself
            following = next(walk, None)
            if following is not None:
                heappush(ends, (self.value(following), following.time, cls, is_newest, following))

    def _refresh(self) -> None:
        """Bring the ends of the queues up to date. Written for speed, since every request needs them."""
        values, clock = self.table.values, self.clock
        for cls in self._changed:
            queue = self._queues[cls]
            ends: list[_End[U]] = []  # list[_End[U]]() would take 3 us
            if queue:
                unit = next(iter(queue))
                ends.append((values[cls][bucket_of(clock - unit.time)], unit.time, cls, False, unit))
                if len(queue) > 1:
                    unit = next(reversed(queue))
                    ends.append((values[cls][bucket_of(clock - unit.time)], unit.time, cls, True, unit))
            self._ends[cls] = ends
        self._changed.clear()


class _History(Generic[U]):
    """All units in order of time, in pages that can be surveyed one by one while units are added and removed."""

    def __init__(self) -> None:
        self._pages: deque[deque[U]] = deque()
        self._place = 0  # number of the page to survey next

    def append(self, unit: U) -> None:
        """Add the newest unit."""
        if not self._pages or len(self._pages[-1]) >= _PAGE_UNITS:
            self._pages.append(deque())
        self._pages[-1].append(unit)

    def pop_oldest(self) -> U | None:
        """Remove and return the oldest unit; None without one."""
        if not self._pages:
            return None
        page = self._pages[0]
        unit = page.popleft()
        if not page:
            self._pages.popleft()
            self._place = max(0, self._place - 1)
        return unit

    def survey_page(self) -> list[U] | None:
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
