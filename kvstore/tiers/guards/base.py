"""Base of wrappers: a tier around a tier that forwards every call. Each wrapper overrides the calls of its concern.

The idea, that every cross-cutting concern is a small store around a store and keeps the same contract, is taken from
py-key-value (``key_value/aio/wrappers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.tiers.base import UNBOUNDED_BYTES, BoundedTier, Loan, Tier, Transfer

SomeTier = TypeVar("SomeTier", bound=Tier)
Result = TypeVar("Result")


class TierWrapper(BoundedTier):
    """Wrapper that forwards every call to ``inner``, and shares its name, capacity and counters. Closes ``inner``.

    A wrapper that treats all calls alike overrides ``_call``, through which all calls with possible I/O pass except
    ``check`` and ``close``.

    Around a tier without a bound, the calls that only a ``BoundedTier`` has raise ``InvalidCallError``.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.capacity_bytes = inner.capacity_bytes if isinstance(inner, BoundedTier) else UNBOUNDED_BYTES
        self.counters = inner.counters

    def _call(self, operation: str, action: Callable[[], Result]) -> Result:  # noqa: ARG002 - for wrappers
        """Carry out a call; ``operation`` is the name of the called method."""
        return action()

    @property
    def _bounded(self) -> BoundedTier:
        """Wrapped tier, for the calls that only a tier with a bound has."""
        if not isinstance(self.inner, BoundedTier):
            raise InvalidCallError(f"the {self.name} tier has no bound, and does not account for what it holds")
        return self.inner

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Forward."""
        return self._call("scan", self._bounded.scan)

    def trails(self) -> dict[PrefixKey, bytes]:
        """Forward."""
        return self._call("trails", self._bounded.trails)

    @property
    def parts(self) -> tuple[Tier, ...]:
        """Parts of ``inner``, or this wrapper if ``inner`` is its own only part."""
        parts = self.inner.parts
        return (self,) if parts == (self.inner,) else parts

    @property
    def answers(self) -> bool:
        """Forward."""
        return self.inner.answers

    def check(self) -> None:
        """Forward."""
        self.inner.check()

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward."""
        return self._call("contains", lambda: self.inner.contains(refs))

    @property
    def keeps_trails(self) -> bool:
        """Forward."""
        return self.inner.keeps_trails

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Forward."""
        return self._call("nearest", lambda: self.inner.nearest(trails))

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self._call("get", lambda: self.inner.get(transfers))

    @property
    def reads_layers(self) -> bool:
        """Forward."""
        return self.inner.reads_layers

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward."""
        return self._call("get_layers", lambda: self.inner.get_layers(transfers, layers))

    @property
    def reads_fronts(self) -> bool:
        """Forward."""
        return self.inner.reads_fronts

    @property
    def lends(self) -> bool:
        """Forward."""
        return self.inner.lends

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward."""
        return self._call("borrow", lambda: self.inner.borrow(refs))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self._call("put", lambda: self.inner.put(transfers))

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward."""
        fixed = tuple(refs)  # the caller's iterator may work only once, and not on another thread
        self._call("remove", lambda: self.inner.remove(fixed))

    def clear(self) -> None:
        """Forward."""
        self._call("clear", self.inner.clear)

    def reset(self, namespace: Namespace) -> None:
        """Forward."""
        self._call("reset", lambda: self.inner.reset(namespace))

    def drop_spares(self, wanted_bytes: int) -> None:
        """Forward."""
        bounded = self._bounded
        self._call("drop_spares", lambda: bounded.drop_spares(wanted_bytes))

    def stored_bytes(self, num_blocks: int) -> int:
        """Forward."""
        return self._bounded.stored_bytes(num_blocks)

    def size_of(self, ref: ChunkRef) -> int:
        """Forward."""
        return self._bounded.size_of(ref)

    @property
    def usable_bytes(self) -> int:
        """Forward."""
        return self._bounded.usable_bytes

    @property
    def used_bytes(self) -> int:
        """Forward."""
        return self._bounded.used_bytes

    def close(self) -> None:
        """Forward."""
        self.inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def layers(tier: Tier) -> Iterator[Tier]:
    """Yield the wrappers around a tier, the outermost first, and last the tier itself."""
    while isinstance(tier, TierWrapper):
        yield tier
        tier = tier.inner
    yield tier


def find(tier: Tier, kind: type[SomeTier]) -> SomeTier | None:
    """Return the outermost layer of a kind, or None."""
    return next((layer for layer in layers(tier) if isinstance(layer, kind)), None)
