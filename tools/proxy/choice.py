"""Which engine answers a request. Pure: no I/O, no clock.

The least loaded one, except that requests which begin alike go to the same engine as long as that has not many more
requests than the others: it has the KV of that beginning. Among equals engines take turns, as often as their weights
say.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import xxhash
from msgspec import Raw

Buffer = bytes | bytearray | Raw

_FIRST_BYTES: Final = 512  # less is computed faster than another engine's queue ends
_MOST_BYTES: Final = 64 << 10
_MAX_BEGINNINGS: Final = 1 << 16
_MORE_REQUESTS: Final = 4.0  # that an engine may have which knows all of a prompt
_SEED: Final = secrets.randbits(64)  # so that no client finds another beginning with the same key


class Beginning(NamedTuple):
    """A leading part of a request.

    Attributes:
        key: its name.
        share: how much of the request it is, from 0 to 1; of its first 64 KiB, if it is longer.
    """

    key: int
    share: float


class Choosable(Protocol):
    """An engine, as far as it is chosen.

    Attributes:
        weight: how much it can do, compared with others; above 0.
        load: requests that it has now.
        is_well: whether it answers.
        credit: its claim to the next turn; for ``Rota``.
    """

    weight: float
    load: int
    is_well: bool
    credit: float


E = TypeVar("E", bound=Choosable)


def beginnings_of(kind: Iterable[Buffer], prompt: Buffer) -> list[Beginning]:
    """The beginnings of a request by which an engine is remembered, the longest first.

    Args:
        kind: what else must be equal, such as the model.
        prompt: as the client wrote it.
    """
    view = memoryview(prompt)[:_MOST_BYTES]
    if len(view) < _FIRST_BYTES:
        return []
    digest = xxhash.xxh3_64(seed=_SEED)
    for part in kind:
        data = memoryview(part)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    found, begin, end = [], 0, _FIRST_BYTES
    while begin < len(view):
        end = min(end, len(view))
        digest.update(view[begin:end])
        found.append(Beginning(digest.intdigest(), end / len(view)))
        begin, end = end, 2 * end
    return found[::-1]


class Rota(Generic[E]):
    """The engines of one role. Belongs to one event loop."""

    def __init__(self, engines: Iterable[E]) -> None:
        self.engines = tuple(engines)
        self._known: OrderedDict[int, E] = OrderedDict()  # which engine had a beginning last; the oldest first

    def replace(self, engines: Iterable[E]) -> None:
        """Choose among these from now on."""
        self.engines = tuple(engines)
        gone = {key for key, engine in self._known.items() if engine not in self.engines}
        for key in gone:
            del self._known[key]

    @property
    def num_well(self) -> int:
        """How many of them are healthy."""
        return sum(engine.is_well for engine in self.engines)

    def candidates(self, beginnings: Sequence[Beginning] = ()) -> list[E]:
        """The healthy engines, in the order to try them; the first one is remembered as having these beginnings."""
        well = [engine for engine in self.engines if engine.is_well]
        if not well:
            return well
        well.sort(key=_relative_load)
        first = self._knowing(beginnings, _relative_load(well[0])) or _next_in_turn(well)
        for beginning in beginnings:
            self._known[beginning.key] = first
            self._known.move_to_end(beginning.key)
        while len(self._known) > _MAX_BEGINNINGS:
            self._known.popitem(last=False)
        if first is not well[0]:
            well.remove(first)
            well.insert(0, first)
        return well

    def _knowing(self, beginnings: Sequence[Beginning], least: float) -> E | None:
        """The engine that had the longest beginning, unless it has too many more requests than the least loaded."""
        for beginning in beginnings:
            engine = self._known.get(beginning.key)
            if engine is not None and engine.is_well:
                allowed = least + _MORE_REQUESTS * beginning.share
                return engine if _relative_load(engine) <= allowed else None
        return None


def _relative_load(engine: Choosable) -> float:
    return engine.load / engine.weight


def _next_in_turn(well: Sequence[E]) -> E:
    """Of the least loaded, which come first, the one whose turn it is: smooth weighted turns."""
    if len(well) == 1:
        return well[0]
    equal = [engine for engine in well if _relative_load(engine) == _relative_load(well[0])]
    for engine in equal:
        engine.credit += engine.weight
    first = max(equal, key=lambda engine: engine.credit)
    first.credit -= sum(engine.weight for engine in equal)
    return first
