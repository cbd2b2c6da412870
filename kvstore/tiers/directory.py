"""Lookups in a remote tier: on other threads for a scheduler, which must not wait, or on the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvstore.model.chunks import Answer, Asked, ChunkRef, Presence, in_all
from kvstore.model.errors import ClosedError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.lifetime import clock_ahead_s
from kvstore.model.threads import start
from kvstore.tiers.base import Tier
from kvstore.tiers.guards import find
from kvstore.tiers.peers import PeersTier
from kvstore.tiers.questions import Asker, Question

Item = TypeVar("Item")
Result = TypeVar("Result")


class RemoteDirectory:
    """Lookups in a remote tier. ``ask`` answers on separate threads, many questions together.

    Args:
        tiers: the same storage, opened once for each namespace that must hold its part of a chunk, one for each shard.
            Guarded, with the deadline of a lookup; ``close`` closes them.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._changed = threading.Condition()
        self._asker = Asker("kvstore-ask", self._ask, self._changed)
        self._shards = ThreadPoolExecutor(max(1, len(self._tiers)), "kvstore-ask-shard")
        self._lock = threading.Lock()  # guards the fields below
        self._source_askers: dict[str, Asker] = {}  # by address; one that hangs delays only requests that name it
        self._is_closed = False
        self._resetting: Future[None] | None = None

    def ask(
        self,
        asked: Sequence[Asked],
        source: str = "",
        tell: Callable[[Question], object] | None = None,
        since: int = 0,
    ) -> Question:
        """Start to look up chunks with all their parts, and chunks that share blocks with trails.

        Args:
            asked: the chunks and trails. A chunk that is named for a trail may have been removed, or lack a part.
            source: the only engine to ask, one of those that requests may name; empty to ask the tier and its peers.
            tell: called with the question when it is done, on a thread that must not be blocked.
            since: kept with the question.
        """
        question = Question(asked, tell, since)
        asker = self._asker_of(source) if source else self._asker
        asker.put(question)
        return question

    def names_peer(self, host: str, port: int | None) -> bool:
        """Tell if a peer that was found, and is in use now, has this host and port. Never waits."""
        with_peers = find(self._tiers[0], PeersTier) if self._tiers else None
        return with_peers is not None and with_peers.names(host, port)

    def wait(self, questions: Iterable[Question], timeout_s: float) -> bool:
        """Wait until questions are done; False if that takes too long."""
        waiting = list(questions)
        with self._changed:
            return self._changed.wait_for(lambda: all(question.is_done for question in waiting), timeout_s)

    def answer(self, asked: Sequence[Asked]) -> list[Answer]:
        """Look up on the caller's thread, which saves a hand-over between threads, within the tiers' deadline.

        Raises:
            ClosedError: after ``close``.
        """
        self._await_reset()
        return self._ask(tuple(asked))

    def reset(self, namespaces: Sequence[Namespace]) -> None:
        """Move the tiers to other namespaces, one for each tier in order."""
        self._resetting = self._asker.then(partial(self._reset, tuple(namespaces)))

    def close(self) -> None:
        """End the threads, and close the tiers. A question under way ends within its deadline."""
        with self._lock:
            self._is_closed = True
            askers = [self._asker, *self._source_askers.values()]
        for asker in askers:  # all, before waiting for one
            asker.refuse()
        for asker in askers:
            asker.close()
        self._shards.shutdown(wait=True)
        for tier in self._tiers:
            tier.close()

    def _asker_of(self, source: str) -> Asker:
        with self._lock:
            if source not in self._source_askers and not self._is_closed:
                ask = partial(self._ask_source, source)
                self._source_askers[source] = Asker("kvstore-ask-source", ask, self._changed)
            return self._source_askers.get(source, self._asker)  # which is also closed, and answers accordingly

    def _ask(self, asked: Sequence[Asked]) -> list[Answer]:
        """Ask all shards at once, so that several hanging ones cost only one deadline.

        Only the first one is asked about trails, at the same time.
        """
        refs, trails = _sorted(asked)
        near = self._submit(_near, self._tiers[0], trails) if trails and self._tiers else None
        others = [self._submit(_held, tier, refs) for tier in self._tiers[1:]]
        held = [*(_held(tier, refs) for tier in self._tiers[:1]), *(other.result() for other in others)]
        return _in_order(asked, _together(held), near.result() if near is not None else [None] * len(trails))

    def _submit(
        self, ask: Callable[[Tier, Sequence[Item]], Result], tier: Tier, asked: Sequence[Item]
    ) -> Future[Result]:
        if self._is_closed:
            raise ClosedError("the remote tier was closed")
        ask_tier = partial(ask, tier, asked)
        return start(self._shards, ask_tier, ask_tier)

    def _ask_source(self, source: str, asked: Sequence[Asked]) -> list[Answer]:
        """Ask a named engine, shard by shard, until a shard has none of the chunks."""
        self._await_reset()
        refs, trails = _sorted(asked)
        parts: list[Sequence[Presence | None]] = []
        near: Sequence[Answer] = [None] * len(trails)
        for tier in self._tiers:
            with_peers = find(tier, PeersTier)
            part = with_peers.look_at(source, refs) if with_peers else [None] * len(refs)
            if with_peers and trails and not parts:
                near = with_peers.nearest_at(source, trails)
            parts.append(part)
            if not any(part):
                break
        return _in_order(asked, _together(parts), near)

    def _await_reset(self) -> None:
        if self._resetting is not None:
            try:
                self._resetting.result()
            except CancelledError as error:
                raise ClosedError("the remote tier was closed") from error

    def _reset(self, namespaces: Sequence[Namespace]) -> None:
        for tier, namespace in zip(self._tiers, namespaces, strict=True):
            try:
                tier.reset(namespace)
            except TierError:
                continue  # chunks that could not be removed are unreachable anyway


def _held(tier: Tier, refs: Sequence[ChunkRef]) -> Sequence[Presence | None]:
    try:
        return tier.look(refs)
    except TierError:  # the circuit breaker has logged it
        return [None] * len(refs)


def _near(tier: Tier, trails: Sequence[bytes]) -> Sequence[Answer]:
    with_peers = find(tier, PeersTier)
    try:
        return with_peers.look_near(trails) if with_peers else tier.nearest(trails)
    except TierError:  # the circuit breaker has logged it
        return [None] * len(trails)


def _sorted(asked: Sequence[Asked]) -> tuple[list[ChunkRef], list[bytes]]:
    """Separate the chunks and the trails of a question."""
    refs = [item for item in asked if not isinstance(item, bytes)]
    return refs, [item for item in asked if isinstance(item, bytes)] if len(refs) < len(asked) else []


def _in_order(asked: Sequence[Asked], held: Sequence[Answer], near: Sequence[Answer]) -> list[Answer]:
    """Merge the answers about chunks and about trails, in the order of the question."""
    if not near:
        return list(held)
    of_chunks, of_trails = iter(held), iter(near)
    return [next(of_trails if isinstance(item, bytes) else of_chunks) for item in asked]


def _together(parts: Sequence[Sequence[Presence | None]]) -> list[Presence | None]:
    """Combine the answers of several shards, with ends on the monotonic clock.

    A chunk is held if all have their part, and missing if one lacks it.
    """
    ahead_s = clock_ahead_s()
    answers = (all_have(answers) for answers in zip(*parts, strict=True))
    return [answer if answer is None or isinstance(answer, bool) else answer - ahead_s for answer in answers]


def all_have(answers: Sequence[Presence | None]) -> Presence | None:
    """Return the answer about a chunk, given those about its parts."""
    if False in answers:
        return False
    return None if None in answers else in_all(answer for answer in answers if answer is not None)
