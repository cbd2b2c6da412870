"""Base of read-only tiers, which neither store chunks nor remove them from their storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ClosedError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import Tier, TierCounters, Transfer, payload_view


class ForeignTier(Tier):
    """Read-only tier, whose chunks belong to others; callers track removals themselves.

    Args:
        layout: of the chunks.
    """

    refusal = Outcome.FAILED  # the answer to ``put``

    def __init__(self, layout: KVLayout) -> None:
        self.counters = TierCounters()
        self._layout = layout
        self._is_closed = False

    @final
    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Answer ``refusal``."""
        for transfer in transfers:
            payload_view(self._layout, transfer)
        self._check_open()
        return [self.counters.count(self.refusal, 0) for _ in transfers]

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Do nothing, because the chunks belong to others."""

    def clear(self) -> None:
        """Do nothing, because the chunks belong to others."""

    def reset(self, namespace: Namespace) -> None:
        """Do nothing; to read another namespace, open a new tier for it."""

    def close(self) -> None:
        """Refuse further calls."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the {self.name} tier was closed")
