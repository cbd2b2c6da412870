"""What all tiers share whose chunks belong to others: nothing is stored, and nothing removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ClosedError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.tiers.base import Tier, TierCounters, Transfer, payload_view


class ForeignTier(Tier):
    """Chunks that are only read. Whoever reads them remembers what it does not want.

    Args:
        layout: of the chunks.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.counters = TierCounters()
        self._layout = layout
        self._is_closed = False

    @final
    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Answer ``FAILED``."""
        for transfer in transfers:
            payload_view(self._layout, transfer)
        self._check_open()
        return [self.counters.count(Outcome.FAILED, 0) for _ in transfers]

    @final
    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Do nothing: they are others'."""

    @final
    def clear(self) -> None:
        """Do nothing: they are others'."""

    @final
    def reset(self, namespace: Namespace) -> None:
        """Do nothing: opened anew for another namespace, it finds what others have of that."""

    def close(self) -> None:
        """Let no further call begin."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the {self.name} tier was closed")
