"""The adaptive policy with a set of chunks in each unit, and a unit for each adopted chunk: slow, large and plain."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from collections.abc import Set as AbstractSet

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import Policy
from kvstore.policies.ranking import Ranking, Unit
from kvstore.policies.survival import NUM_USES


class PlainUnit(Unit):
    """Unit with its keys.

    Attributes:
        keys: head first; includes keys that have moved to another unit since, among them always the last one.
        here: the unit's keys whose chunks are in the tier.
        depth: a position after all keys in ``here``.
    """

    __slots__ = ("depth", "here", "keys")

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[PrefixKey] = []
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


class PlainAdaptive(Policy):
    """Model of ``Adaptive``, without the limit of remembered keys and without surveys."""

    name = "ADAPTIVE"
    filters = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._units: dict[PrefixKey, PlainUnit] = {}
        self._ranking = Ranking[PlainUnit]()
        self._adopted: set[PlainUnit] = set()

    @property
    def num_ghosts(self) -> int:
        return len(self._units) - len(self._sizes)

    # -- what happened -----------------------------------------------------------------------------------------------

    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        ranking = self._ranking
        now = ranking.touch(len(used))
        fresh: list[PlainUnit | None] = [None] * NUM_USES
        begun: list[PlainUnit] = []
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
                target = fresh[uses] = ranking.begin(PlainUnit(), uses)
                begun.append(target)
            self._move(key, unit, target)
        ranking.remember(begun)

    def _on_end(self, chain: Sequence[PrefixKey], answer_tokens: int) -> None:
        own = {*chain}
        units = dict.fromkeys(unit for key in chain if (unit := self._units.get(key)) is not None)
        for unit in sorted(units, key=lambda unit: (unit.time, unit.cls)):
            if unit not in self._adopted and unit.keys[-1] in own and self._prefixes.num_children(unit.keys[-1]) <= 1:
                self._ranking.end(unit, answer_tokens)

    def _on_add(self, key: PrefixKey) -> None:
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = self._ranking.begin(PlainUnit(), 0)
            self._ranking.remember([unit])
            unit.append(key)
        unit.enter(key)
        self._ranking.enqueue(unit)

    def _on_adopt(self, keys: Sequence[PrefixKey]) -> None:
        for key in keys:
            is_new = key not in self._units
            self._on_add(key)
            if is_new:
                self._adopted.add(self._units[key])

    def _on_evict(self, key: PrefixKey) -> None:
        unit = self._units[key]
        self._leave(key, unit)

    def _on_remove(self, key: PrefixKey) -> None:
        unit = self._units.get(key)
        if unit is None:
            return
        if key in unit.here:  # not if it was held
            self._leave(key, unit)
        self._ranking.lose(unit)
        self._forget(key, unit)

    # -- what should go ----------------------------------------------------------------------------------------------

    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        own = None if newcomer is None else self._units.get(newcomer)
        limit = None if newcomer is None else self._ranking.value(own)
        for value, unit in self._ranking.by_value():
            if unit is own or (limit is not None and value > limit):
                return
            yield from unit.deepest_first()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _move(self, key: PrefixKey, unit: PlainUnit | None, target: PlainUnit) -> None:
        is_here = unit is not None and key in unit.here
        if unit is not None:
            if is_here:
                self._leave(key, unit)
            self._forget(key, unit)
        self._units[key] = target
        target.append(key)
        if is_here:
            target.enter(key)
            self._ranking.enqueue(target)

    def _leave(self, key: PrefixKey, unit: PlainUnit) -> None:
        unit.here.remove(key)
        if not unit.here:
            self._ranking.dequeue(unit)

    def _forget(self, key: PrefixKey, unit: PlainUnit) -> None:
        del self._units[key]
        self._ranking.drop(unit)
        if not unit.num_keys:
            unit.keys.clear()
