"""Asks a remote tier what it holds: beside a scheduler, which must not wait, or on the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

from kvstore.chunks import ChunkRef
from kvstore.errors import ClosedError, TierError
from kvstore.keys import Namespace
from kvstore.tiers.base import Tier
from kvstore.tiers.guards import find
from kvstore.tiers.peers import PeersTier
from kvstore.tiers.questions import Answer, Asker, Question


class RemoteDirectory:
    """Questions to a remote tier. Those of ``ask`` are answered on threads of its own, many together.

    Args:
        tiers: the same storage, opened once for each namespace that must hold its part of a chunk: one for each shard.
            Guarded, with the deadline of a lookup; ``close`` closes them.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._changed = threading.Condition()
        self._asker = Asker("kvstore-ask", self._ask, self._changed)
        self._shards = ThreadPoolExecutor(max(1, len(self._tiers) - 1), "kvstore-ask-shard")
        self._lock = threading.Lock()  # of what follows
        self._source_askers: dict[str, Asker] = {}  # by address: one that hangs holds up nobody but who named it
        self._is_closed = False
        self._resetting: Future[None] | None = None

    def ask(
        self,
        refs: Sequence[ChunkRef],
        source: str = "",
        tell: Callable[[Question], object] | None = None,
        since: int = 0,
    ) -> Question:
        """Start to find out which chunks are there, every part of them.

        Args:
            refs: the chunks.
            source: one of the engines that requests may name, to ask only that; empty for all but those.
            tell: is called with the question when it is done, on a thread that must not be held up.
            since: is kept with the question.
        """
        question = Question(refs, tell, since)
        asker = self._asker_of(source) if source else self._asker
        asker.put(question)
        return question

    def wait(self, questions: Iterable[Question], timeout_s: float) -> bool:
        """Wait until questions are done; False if that takes too long."""
        waiting = list(questions)
        with self._changed:
            return self._changed.wait_for(lambda: all(question.is_done for question in waiting), timeout_s)

    def answer(self, refs: Sequence[ChunkRef]) -> list[Answer]:
        """``ask``, and wait for it, for no longer than the tiers' deadline: one hand-over between threads less.

        Raises:
            ClosedError: after ``close``.
        """
        self._await_reset()
        return self._ask(tuple(refs))

    def reset(self, namespaces: Sequence[Namespace]) -> None:
        """Ask about other namespaces from now on, one for each tier, in their order."""
        self._resetting = self._asker.then(partial(self._reset, tuple(namespaces)))

    def close(self) -> None:
        """End the threads, and close the tiers: a question under way ends within its deadline."""
        with self._lock:
            self._is_closed = True
            askers = [self._asker, *self._source_askers.values()]
        for asker in askers:  # all of them, before one is waited for
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
            return self._source_askers.get(source, self._asker)  # which is closed, too, and says so

    def _ask(self, refs: Sequence[ChunkRef]) -> list[Answer]:
        """Ask all shards at once: one that hangs costs a deadline, several together no more."""
        others = [self._shards.submit(_held, tier, refs) for tier in self._tiers[1:]]
        return _together([*(_held(tier, refs) for tier in self._tiers[:1]), *(other.result() for other in others)])

    def _ask_source(self, source: str, refs: Sequence[ChunkRef]) -> list[Answer]:
        """Ask an engine that was named, shard by shard; one that does not answer is not asked for the other shards."""
        self._await_reset()
        parts: list[Sequence[Answer]] = []
        for tier in self._tiers:
            with_peers = find(tier, PeersTier)
            part = with_peers.look_at(source, refs) if with_peers else [None] * len(refs)
            parts.append(part)
            if True not in part:
                break
        return _together(parts)

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
                continue  # what could not be removed is out of reach all the same


def _held(tier: Tier, refs: Sequence[ChunkRef]) -> Sequence[Answer]:
    with_peers = find(tier, PeersTier)
    try:
        return with_peers.look(refs) if with_peers else tier.contains(refs)
    except TierError:  # said by the circuit breaker, once
        return [None] * len(refs)


def _together(parts: Sequence[Sequence[Answer]]) -> list[Answer]:
    """Of several shards: there if all have their part, not there if one is known to lack it."""
    return [all_have(answers) for answers in zip(*parts, strict=True)]


def all_have(answers: Sequence[Answer]) -> Answer:
    """One answer of several, each about a part of a chunk."""
    if False in answers:
        return False
    return None if None in answers else True
