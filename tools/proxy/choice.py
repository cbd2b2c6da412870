"""Choice of the engine that answers a request, without I/O or clock.

The least loaded engine is chosen. As an exception, requests of the same session, or else with the same beginning, are
sent to the same engine, which has the KV of that beginning, as long as it does not have many more requests than the
others. Engines with equal load take turns in proportion to their weights.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import xxhash
from msgspec import Raw

Buffer = bytes | bytearray | Raw

_FIRST_BYTES: Final = 512  # computing less is faster than waiting in another engine's queue
MOST_BYTES: Final = 64 << 10
_MAX_BEGINNINGS: Final = 1 << 16
_MORE_REQUESTS: Final = 4.0  # requests more than the least loaded engine that one with the whole prompt may have
_SEED: Final = secrets.randbits(64)  # random, so that clients cannot construct beginnings with the same key


class Beginning(NamedTuple):
    """Leading part of a request.

    Attributes:
        key: hash of the part.
        share: size relative to the request, from 0 to 1; relative to its first 64 KiB, if it is longer.
    """

    key: int
    share: float


class Choosable(Protocol):
    """Engine that a ``Rota`` can choose.

    Attributes:
        weight: capacity relative to other engines; above 0.
        load: requests that it has now.
        is_well: whether it is healthy.
        credit: claim to the next turn, which ``Rota`` maintains.
    """

    weight: float
    load: int
    is_well: bool
    credit: float


E = TypeVar("E", bound=Choosable)


def beginnings_of(kind: Iterable[Buffer], prompt: Buffer) -> list[Beginning]:
    """Return the beginnings of a request by which engines are remembered, the longest first.

    Args:
        kind: other members that must be equal, such as the model.
        prompt: the prompt as JSON from the client.
    """
    view = memoryview(prompt)[:MOST_BYTES]
    if len(view) < _FIRST_BYTES:
        return []
    digest = _digest_of(kind)
    found, begin, end = [], 0, _FIRST_BYTES
    while begin < len(view):
        end = min(end, len(view))
        digest.update(view[begin:end])
        found.append(Beginning(digest.intdigest(), end / len(view)))
        begin, end = end, 2 * end
    return found[::-1]


def session_beginning(kind: Iterable[Buffer], session: str) -> list[Beginning]:
    """Return the beginning that stands for a session, which counts like the whole prompt; none without a name."""
    if not session:
        return []
    return [Beginning(_digest_of([b"session", *kind, session.encode()]).intdigest(), 1.0)]


def _digest_of(parts: Iterable[Buffer]) -> xxhash.xxh3_64:
    """Return the hash of parts and of their lengths, to which more can be added."""
    digest = xxhash.xxh3_64(seed=_SEED)
    for part in parts:
        data = memoryview(part)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest


class Rota(Generic[E]):
    """Engines of one role, for use on one event loop."""

    def __init__(self, engines: Iterable[E]) -> None:
        self.engines = tuple(engines)
        self._known: OrderedDict[int, E] = OrderedDict()  # last engine of each beginning; the oldest first

    def replace(self, engines: Iterable[E]) -> None:
        """Choose among these engines from now on."""
        self.engines = tuple(engines)
        gone = {key for key, engine in self._known.items() if engine not in self.engines}
        for key in gone:
            del self._known[key]

    @property
    def num_well(self) -> int:
        """Number of healthy engines."""
        return sum(engine.is_well for engine in self.engines)

    def candidates(self, beginnings: Sequence[Beginning] = ()) -> list[E]:
        """Return the healthy engines in the order to try them, and remember the first one for these beginnings."""
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
        """Return the engine that had the longest beginning, unless it has many more requests than the least loaded."""
        for beginning in beginnings:
            engine = self._known.get(beginning.key)
            if engine is not None and engine.is_well:
                allowed = least + _MORE_REQUESTS * beginning.share
                return engine if _relative_load(engine) <= allowed else None
        return None


def _relative_load(engine: Choosable) -> float:
    return engine.load / engine.weight


def _next_in_turn(well: Sequence[E]) -> E:
    """Return the next of the least loaded engines, which come first, by smooth weighted round-robin."""
    if len(well) == 1:
        return well[0]
    equal = [engine for engine in well if _relative_load(engine) == _relative_load(well[0])]
    for engine in equal:
        engine.credit += engine.weight
    first = max(equal, key=lambda engine: engine.credit)
    first.credit -= sum(engine.weight for engine in equal)
    return first
