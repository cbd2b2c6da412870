"""The default policy: keeps the chunks with most hits for their space and time, estimated from this workload's past."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import MIN_GHOSTS, Policy
from kvstore.policies.survival import NUM_CLASSES, SurvivalTable, bucket_of

_SURVEY_INTERVAL = 2_000  # chunks touched between two surveys
_SURVEY_UNITS = 8  # surveyed for each chunk touched
_TOP_CLASS = NUM_CLASSES - 1
_PAGE_UNITS = 64


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
        if not self._pages or len(self._pages[-1]) >= _PAGE_UNITS:
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


class Adaptive(Policy):
    """Evicts or refuses the chunks of least value by class (number of uses) and age: see ``survival.py``.

    Chunks of one class that one request touched have the same age and value. They form one *unit*, whose deepest chunk
    is evicted first. Of each class only the oldest and the newest units are compared. Keys of evicted and refused
    chunks are remembered, so that their next use counts.
    """

    name = "ADAPTIVE"
    filters = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._table = SurvivalTable()
        self._clock = 0  # chunks touched
        self._next_survey = _SURVEY_INTERVAL
        self._units: dict[PrefixKey, Unit] = {}  # of all remembered keys, in the tier or not
        self._history = History()
        self._stripped: dict[Unit, None] = {}  # units of which only the chunks in the tier are remembered
        self._queues: list[OrderedDict[Unit, None]] = [OrderedDict() for _ in range(NUM_CLASSES)]  # units in the tier

    @property
    def num_ghosts(self) -> int:  # noqa: D102 - inherited
        return len(self._units) - len(self._sizes)

    # -- what happened -----------------------------------------------------------------------------------------------

    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        now = self._clock
        self._clock += len(used)
        fresh: list[Unit | None] = [None] * NUM_CLASSES
        for key in chain:
            unit = self._units.get(key)
            if unit is None:
                if key not in used:
                    continue
                cls = 0
            elif key in used:
                if unit.cls < _TOP_CLASS or unit.time < now:  # a chunk in every request is no evidence for its class
                    self._table.hit(unit.cls, now - unit.time)
                cls = min(unit.cls + 1, _TOP_CLASS)
            elif unit.time == now:  # touched by this request
                continue
            else:
                self._table.lose(unit.cls, now - unit.time)
                cls = unit.cls
            target = fresh[cls]
            if target is None:
                target = fresh[cls] = self._new_unit(cls)
            self._move(key, unit, target)
        if self._clock >= self._next_survey:
            self._survey(len(used))
        self._forget_oldest()

    def _on_add(self, key: PrefixKey) -> None:
        unit = self._units.get(key)
        if unit is None:
            unit = self._new_unit(0)
            self._units[key] = unit
            unit.append(key)
        unit.enter(key)
        queue = self._queues[unit.cls]
        if unit not in queue:
            queue[unit] = None
            if unit.time < self._clock:
                queue.move_to_end(unit, last=False)

    def _on_evict(self, key: PrefixKey) -> None:
        unit = self._units[key]
        self._leave(key, unit)
        if unit in self._stripped:
            self._table.lose(unit.cls, self._clock - unit.time)
            self._forget(key, unit)

    def _on_remove(self, key: PrefixKey) -> None:
        unit = self._units.get(key)
        if unit is None:
            return
        if key in unit.here:
            self._leave(key, unit)
        self._table.lose(unit.cls, self._clock - unit.time)
        self._forget(key, unit)

    # -- what should go ----------------------------------------------------------------------------------------------

    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        own = None if newcomer is None else self._units.get(newcomer)
        limit = None if newcomer is None else self._value(own)
        for value, unit in self._units_by_value():
            if unit is own or (limit is not None and value > limit):
                return
            yield from unit.deepest_first()

    def _units_by_value(self) -> Iterator[tuple[float, Unit]]:
        """Merge the ends of all classes' queues; at equal value the older unit comes first."""
        ends: list[tuple[float, int, int, Unit, Iterator[Unit]]] = []
        left = [len(queue) for queue in self._queues]
        for cls, queue in enumerate(self._queues):
            for walk in (iter(queue), reversed(queue)):
                for unit in walk:
                    ends.append((self._value(unit), unit.time, cls, unit, walk))
                    break
        while ends:
            end = min(ends, key=_value_and_time)
            value, _, cls, unit, walk = end
            ends.remove(end)
            if not left[cls]:
                continue
            left[cls] -= 1
            yield value, unit
            for following in walk:
                ends.append((self._value(following), following.time, cls, following, walk))
                break

    def _value(self, unit: Unit | None) -> float:
        """Return the value of a chunk of this unit; None stands for a new chunk."""
        if unit is None:
            return self._table.values[0][0]
        return self._table.values[unit.cls][bucket_of(self._clock - unit.time)]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _new_unit(self, cls: int) -> Unit:
        unit = Unit(cls, self._clock)
        self._history.append(unit)
        return unit

    def _move(self, key: PrefixKey, unit: Unit | None, target: Unit) -> None:
        is_here = unit is not None and key in unit.here
        if unit is not None:
            if is_here:
                self._leave(key, unit)
            self._forget(key, unit)
        self._units[key] = target
        target.append(key)
        if is_here:
            target.enter(key)
            self._queues[target.cls][target] = None

    def _leave(self, key: PrefixKey, unit: Unit) -> None:
        """Note that a chunk leaves the tier or this unit."""
        unit.here.remove(key)
        if not unit.here:
            del self._queues[unit.cls][unit]

    def _forget(self, key: PrefixKey, unit: Unit) -> None:
        del self._units[key]
        unit.num_keys -= 1
        if not unit.num_keys:
            unit.keys.clear()
            self._stripped.pop(unit, None)

    def _forget_oldest(self) -> None:
        """Keep the number of remembered keys within its bound; keys of chunks in the tier stay."""
        if len(self._units) - len(self._sizes) <= MIN_GHOSTS:  # the usual case
            return
        limit = self.max_ghosts
        while self._history and len(self._units) - len(self._sizes) > limit:
            unit = self._history.pop_oldest()
            ghosts = [key for key in unit.keys if self._units.get(key) is unit and key not in unit.here]
            if ghosts:
                self._table.lose(unit.cls, self._clock - unit.time, len(ghosts))
            if unit.here:
                self._stripped[unit] = None
            for key in ghosts:
                self._forget(key, unit)

    def _survey(self, touched: int) -> None:
        """Count some of the waiting keys, in proportion to the chunks touched; update the values after the last page.

        Counting all of them at once would take tens of milliseconds.
        """
        for _ in range(1 + touched * _SURVEY_UNITS // _PAGE_UNITS):
            units = self._history.survey_page()
            if units is None:
                self._count_waiting(self._stripped)
                self._table.update()
                self._next_survey = self._clock + _SURVEY_INTERVAL
                return
            self._count_waiting(units)

    def _count_waiting(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if len(unit.keys) > 2 * unit.num_keys + 8:  # most keys are in other units by now
                unit.keys = [key for key in unit.keys if self._units.get(key) is unit]
                unit.depth = len(unit.keys)
            self._table.wait(unit.cls, self._clock - unit.time, unit.num_keys)


def _value_and_time(end: tuple[float, int, int, Unit, Iterator[Unit]]) -> tuple[float, int]:
    return end[0], end[1]
