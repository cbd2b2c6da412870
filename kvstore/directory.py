"""Asks a remote tier what it holds, beside the caller: a lookup must not wait for a network."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.errors import TierError
from kvstore.keys import Namespace
from kvstore.tiers.base import ChunkRef, Tier


class RemoteDirectory:
    """Questions to a remote tier, answered on a thread of its own, one after the other.

    Args:
        tiers: the same storage, opened once for each namespace that must hold its part of a chunk: one for each shard.
            Guarded, with the deadline of a lookup; ``close`` closes them.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._thread = ThreadPoolExecutor(1, "kvstore-ask")

    def ask(self, refs: Sequence[ChunkRef]) -> Future[list[bool]]:
        """Start to find out which chunks are there, every part of them. A tier that fails holds nothing."""
        return self._thread.submit(self._ask, tuple(refs))

    def reset(self, namespaces: Sequence[Namespace]) -> None:
        """Ask about other namespaces from now on, one for each tier, in their order."""
        self._thread.submit(self._reset, tuple(namespaces))

    def close(self) -> None:
        """End the thread, and close the tiers."""
        self._thread.shutdown(wait=True, cancel_futures=True)  # a question under way ends within its deadline
        for tier in self._tiers:
            tier.close()

    def _ask(self, refs: Sequence[ChunkRef]) -> list[bool]:
        complete = [True] * len(refs)
        for tier in self._tiers:
            try:
                held = tier.contains(refs)
            except TierError:  # said by the circuit breaker, once
                return [False] * len(refs)
            complete = [so_far and here for so_far, here in zip(complete, held, strict=True)]
        return complete

    def _reset(self, namespaces: Sequence[Namespace]) -> None:
        for tier, namespace in zip(self._tiers, namespaces, strict=True):
            try:
                tier.reset(namespace)
            except TierError:
                continue  # what could not be removed is out of reach all the same
