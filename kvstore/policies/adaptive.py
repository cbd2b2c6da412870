"""The default policy: keeps the chunks with most hits for their space and time, estimated from this workload's past."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import MIN_GHOSTS, Policy
from kvstore.policies.ranking import Ranking, Unit
from kvstore.policies.survival import NUM_USES

_ADOPTED_TOGETHER: Final[int] = 64


class KeyUnit(Unit):
    """Unit with its keys.

    Attributes:
        keys: head first; includes keys that have moved to another unit since, among them always the last one. Each key
            occurs once, since a unit gets keys only from the request that begins it, or all at once.
        num_here: the unit's keys whose chunks are in the tier and offered.
        depth: a position after all of those.
        is_chain: True if one request used them, False for chunks that an earlier process left.
    """

    __slots__ = ("depth", "is_chain", "keys", "num_here")

    def __init__(self, *, is_chain: bool = True) -> None:
        super().__init__()
        self.keys: list[PrefixKey] = []
        self.num_here = self.depth = 0
        self.is_chain = is_chain

    def append(self, key: PrefixKey) -> None:
        """Add a key as the deepest."""
        self.keys.append(key)
        self.num_keys += 1

    def enter(self, count: int = 1) -> None:
        """Note that chunks of some of the keys are in the tier."""
        self.num_here += count
        self.depth = len(self.keys)


class Adaptive(Policy):
    """Evicts or refuses the chunks of least value by class (uses and answer) and age: see ``survival.py``.

    The units of least value are evicted first (``ranking.py``), the deepest chunk of each before the others. Keys of
    evicted and refused chunks are remembered, so that their next use counts.
    """

    name = "ADAPTIVE"
    filters = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._units: dict[PrefixKey, KeyUnit] = {}  # of all remembered keys, in the tier or not
        self._ranking = Ranking[KeyUnit](self._trim)

    @property
    def num_ghosts(self) -> int:  # noqa: D102 - inherited
        return len(self._units) - len(self._sizes)

    # -- what happened -----------------------------------------------------------------------------------------------

    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        ranking = self._ranking
        now = ranking.touch(len(used))
        fresh: list[KeyUnit | None] = [None] * NUM_USES
        begun: list[KeyUnit] = []
        for key in chain:
            unit = self._units.get(key)
            if unit is None:
                if key not in used:
                    continue
                uses = 0
            elif key in used:
                uses = ranking.hit(unit, now)
            elif unit.time == now:  # touched by this request
                continue
            else:
                ranking.lose(unit, now=now)
                uses = unit.uses
            target = fresh[uses]
            if target is None:
                target = fresh[uses] = ranking.begin(KeyUnit(), uses)
                begun.append(target)
            self._move(key, unit, target)
        ranking.remember(begun)
        ranking.survey(len(used))
        self._forget_oldest()

    def _on_end(self, chain: Sequence[PrefixKey], answer_tokens: int) -> None:
        own = {*chain}
        units = dict.fromkeys(unit for key in chain if (unit := self._units.get(key)) is not None)
        for unit in sorted(units, key=lambda unit: (unit.time, unit.cls)):
            # Another request may have used them last, or several go on from here, and may return at any time.
            if unit.is_chain and unit.keys[-1] in own and self._prefixes.num_children(unit.keys[-1]) <= 1:
                self._ranking.end(unit, answer_tokens)

    def _on_add(self, key: PrefixKey) -> None:
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = self._ranking.begin(KeyUnit(), 0)
            self._ranking.remember([unit])
            unit.append(key)
        unit.enter()
        self._ranking.enqueue(unit)

    def _on_adopt(self, keys: Sequence[PrefixKey]) -> None:
        fresh: list[PrefixKey] = []  # for one unit, as one for each chunk would take 0.6 KB
        for key in keys:
            if key in self._units:
                self._adopt(fresh)
                fresh = []
                self._on_add(key)
            else:
                fresh.append(key)
                if len(fresh) == _ADOPTED_TOGETHER:
                    self._adopt(fresh)
                    fresh = []
        self._adopt(fresh)

    def _adopt(self, keys: list[PrefixKey]) -> None:
        """Begin a unit of chunks, the one to be evicted first in front."""
        if not keys:
            return
        unit = self._ranking.begin(KeyUnit(is_chain=False), 0)
        self._ranking.remember([unit])
        for key in reversed(keys):
            self._units[key] = unit
            unit.append(key)
        unit.enter(len(keys))
        self._ranking.enqueue(unit)

    def _on_evict(self, key: PrefixKey) -> None:
        unit = self._units[key]
        self._leave(unit)
        if unit in self._ranking.stripped:
            self._ranking.lose(unit)
            self._forget(key, unit)

    def _on_remove(self, key: PrefixKey) -> None:
        unit = self._units.get(key)
        if unit is None:
            return
        if self._is_here(key, unit):
            self._leave(unit)
        self._ranking.lose(unit)
        self._forget(key, unit)

    # -- what should go ----------------------------------------------------------------------------------------------

    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        own = None if newcomer is None else self._units.get(newcomer)
        limit = None if newcomer is None else self._ranking.value(own)
        for value, unit in self._ranking.by_value():
            if limit is not None and value > limit:
                return
            if unit is own and unit.is_chain:  # a request does not give up its own front for its end
                return
            yield from self._deepest_first(unit)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_here(self, key: PrefixKey, unit: KeyUnit) -> bool:
        """Tell if a key belongs to a unit, and its chunk is in the tier and offered."""
        return self._units.get(key) is unit and key in self._sizes and key not in self._held

    def _deepest_first(self, unit: KeyUnit) -> Generator[PrefixKey]:
        """Yield the chunks of a unit, from the end of the chain to its head."""
        keys = unit.keys
        while unit.depth and not self._is_here(keys[unit.depth - 1], unit):
            unit.depth -= 1
        for place in range(unit.depth - 1, -1, -1):
            if self._is_here(keys[place], unit):
                yield keys[place]

    def _move(self, key: PrefixKey, unit: KeyUnit | None, target: KeyUnit) -> None:
        is_here = unit is not None and self._is_here(key, unit)
        if unit is not None:
            if is_here:
                self._leave(unit)
            self._forget(key, unit)
        self._units[key] = target
        target.append(key)
        if is_here:
            target.enter()
            self._ranking.enqueue(target)

    def _leave(self, unit: KeyUnit) -> None:
        """Note that a chunk leaves the tier or this unit."""
        unit.num_here -= 1
        if not unit.num_here:
            self._ranking.dequeue(unit)

    def _forget(self, key: PrefixKey, unit: KeyUnit) -> None:
        del self._units[key]
        self._ranking.drop(unit)
        if not unit.num_keys:
            unit.keys.clear()

    def _forget_oldest(self) -> None:
        """Keep the number of remembered keys within its bound; keys of chunks in the tier stay."""
        if len(self._units) - len(self._sizes) <= MIN_GHOSTS:  # the usual case
            return
        limit = self.max_ghosts
        while len(self._units) - len(self._sizes) > limit and (unit := self._ranking.pop_oldest()) is not None:
            ghosts = [key for key in unit.keys if self._units.get(key) is unit and not self._is_here(key, unit)]
            if ghosts:
                self._ranking.lose(unit, len(ghosts))
            if unit.num_here:
                self._ranking.stripped[unit] = None
            for key in ghosts:
                self._forget(key, unit)

    def _trim(self, unit: KeyUnit) -> None:
        if len(unit.keys) > 2 * unit.num_keys + 8:  # most keys are in other units by now
            *keys, leaf = unit.keys
            unit.keys = [*(key for key in keys if self._units.get(key) is unit), leaf]
            unit.depth = len(unit.keys)
