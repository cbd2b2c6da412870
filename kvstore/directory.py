"""Asks a remote tier what it holds: beside a scheduler, which must not wait, or on the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.errors import TierError
from kvstore.keys import Namespace
from kvstore.tiers.base import ChunkRef, Tier
from kvstore.tiers.peers import PeersTier
from kvstore.wrappers import find


class RemoteDirectory:
    """Questions to a remote tier: those of ``ask`` are answered on a thread of its own, one after the other.

    Args:
        tiers: the same storage, opened once for each namespace that must hold its part of a chunk: one for each shard.
            Guarded, with the deadline of a lookup; ``close`` closes them.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._thread = ThreadPoolExecutor(1, "kvstore-ask")
        self._shards = ThreadPoolExecutor(max(1, len(self._tiers) - 1), "kvstore-ask-shard")
        self._resetting: Future[None] | None = None

    def ask(self, refs: Sequence[ChunkRef]) -> Future[list[bool]]:
        """Start to find out which chunks are there, every part of them. A tier that fails holds nothing."""
        return self._thread.submit(self._ask, tuple(refs))

    def answer(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """``ask``, and wait for it, for no longer than the tiers' deadline: one hand-over between threads less.

        Raises:
            ClosedError: after ``close``.
        """
        if self._resetting is not None:
            self._resetting.result()
        return self._ask(tuple(refs))

    def reset(self, namespaces: Sequence[Namespace]) -> None:
        """Ask about other namespaces from now on, one for each tier, in their order."""
        self._resetting = self._thread.submit(self._reset, tuple(namespaces))

    def close(self) -> None:
        """End the threads, and close the tiers."""
        self._thread.shutdown(wait=True, cancel_futures=True)  # a question under way ends within its deadline
        self._shards.shutdown(wait=True)
        for tier in self._tiers:
            tier.close()

    def add_peer(self, url: str) -> None:
        """Ask one more engine from now on. Thread-safe.

        Raises:
            ConfigError: there is no such address.
        """
        for tier in self._tiers:
            with_peers = find(tier, PeersTier)
            if with_peers is not None:
                with_peers.add(url)

    def _ask(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Ask all shards at once: one that hangs costs a deadline, several together no more."""
        others = [self._shards.submit(_held, tier, refs) for tier in self._tiers[1:]]
        answers = [*(_held(tier, refs) for tier in self._tiers[:1]), *(other.result() for other in others)]
        return [all(parts) for parts in zip(*answers, strict=True)]

    def _reset(self, namespaces: Sequence[Namespace]) -> None:
        for tier, namespace in zip(self._tiers, namespaces, strict=True):
            try:
                tier.reset(namespace)
            except TierError:
                continue  # what could not be removed is out of reach all the same


def _held(tier: Tier, refs: Sequence[ChunkRef]) -> list[bool]:
    try:
        return tier.contains(refs)
    except TierError:  # said by the circuit breaker, once
        return [False] * len(refs)
