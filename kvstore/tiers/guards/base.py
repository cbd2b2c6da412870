"""A tier around a tier: forwards everything, for wrappers that change one thing.

The idea, that every cross-cutting concern is a small store around a store and keeps the same contract, is taken from
py-key-value (``key_value/aio/wrappers``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvstore.chunks import ChunkRef, Outcome
from kvstore.tiers.base import Loan, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.keys import Namespace

SomeTier = TypeVar("SomeTier", bound=Tier)


class TierWrapper(Tier):
    """Forwards every call to ``inner``, whose name, capacity and counters it shares. Closing it closes ``inner``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.capacity_bytes = inner.capacity_bytes
        self.counters = inner.counters

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Forward."""
        return self.inner.scan()

    @property
    def parts(self) -> tuple[Tier, ...]:
        """Those of ``inner``, or this wrapper if that is whole."""
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
        return self.inner.contains(refs)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self.inner.get(transfers)

    @property
    def reads_layers(self) -> bool:
        """Forward."""
        return self.inner.reads_layers

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward."""
        return self.inner.get_layers(transfers, layers)

    def layer_bytes(self, num_blocks: int, layers: range) -> int:
        """Forward."""
        return self.inner.layer_bytes(num_blocks, layers)

    @property
    def lends(self) -> bool:
        """Forward."""
        return self.inner.lends

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward."""
        return self.inner.borrow(refs)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self.inner.put(transfers)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward."""
        self.inner.remove(refs)

    def clear(self) -> None:
        """Forward."""
        self.inner.clear()

    def reset(self, namespace: Namespace) -> None:
        """Forward."""
        self.inner.reset(namespace)

    def drop_spares(self, wanted_bytes: int) -> None:
        """Forward."""
        self.inner.drop_spares(wanted_bytes)

    def stored_bytes(self, num_blocks: int) -> int:
        """Forward."""
        return self.inner.stored_bytes(num_blocks)

    def size_of(self, ref: ChunkRef) -> int:
        """Forward."""
        return self.inner.size_of(ref)

    @property
    def usable_bytes(self) -> int:
        """Forward."""
        return self.inner.usable_bytes

    @property
    def used_bytes(self) -> int:
        """Forward."""
        return self.inner.used_bytes

    def close(self) -> None:
        """Forward."""
        self.inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def layers(tier: Tier) -> Iterator[Tier]:
    """The wrappers around a tier, the outermost first, and last the tier itself."""
    while isinstance(tier, TierWrapper):
        yield tier
        tier = tier.inner
    yield tier


def find(tier: Tier, kind: type[SomeTier]) -> SomeTier | None:
    """The outermost layer of a kind, or None."""
    return next((layer for layer in layers(tier) if isinstance(layer, kind)), None)
