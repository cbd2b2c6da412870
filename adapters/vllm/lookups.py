"""Lookups at a remote tier, which must not hold up vLLM's scheduler: asked beside it, within a deadline."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from kvstore.directory import RemoteDirectory
from kvstore.index import ChunkIndex
from kvstore.keys import Namespace, PrefixHasher
from kvstore.plans import Place
from kvstore.remote import RemoteView
from kvstore.tiers.base import ChunkRef

_BRIEFLY_S = 0.002  # waiting a moment for an answer that is nearly here is shorter than coming back in a step


@dataclass
class _Question:
    refs: Sequence[ChunkRef]
    answers: Future[list[bool]]


@dataclass
class _Asking:
    """A request whose lookup has begun."""

    deadline_s: float
    question: _Question | None = None


class RemoteLookup:
    """What the requests that wait to be scheduled have asked of the remote tier. Used by one thread.

    Args:
        directory: asks; ``close`` closes it.
        view: takes the answers.
        timeout_s: how long the lookup of one request may take; then what has not been answered is not there.
    """

    def __init__(self, directory: RemoteDirectory, view: RemoteView, timeout_s: float) -> None:
        self.view = view
        self.timeouts = 0  # lookups that ended without an answer
        self._directory = directory
        self._timeout_s = timeout_s
        self._requests: dict[str, _Asking] = {}
        self._is_slow = False

    def answered(self, request_id: str, refs: Sequence[ChunkRef]) -> bool:
        """Ask about chunks for a request. False means to come back later; True, that the view knows what can be known.

        Waits for a moment at most, and not even that while the tier is slow. A request that comes back too late gets a
        "no" for what is still open.
        """
        asking = self._requests.setdefault(request_id, _Asking(time.monotonic() + self._timeout_s))
        if asking.question is None:
            asking.question = _Question(refs, self._directory.ask(refs))
        question = asking.question
        if not self._is_slow:
            wait_for([question.answers], _BRIEFLY_S)
        self._is_slow = not question.answers.done()
        if question.answers.done():
            asking.question = None
            self.view.note(question.refs, question.answers.result(), time.monotonic())
            return True
        if time.monotonic() < asking.deadline_s:
            return False
        question.answers.cancel()
        self.timeouts += 1
        self.view.note(refs, [False] * len(refs), time.monotonic())
        self.end(request_id)
        return True

    def end(self, request_id: str) -> None:
        """A request has its answer, or is gone."""
        asking = self._requests.pop(request_id, None)
        if asking is not None and asking.question is not None:
            asking.question.answers.cancel()

    def ask(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Ask about chunks, and wait for the answer within the deadline. From any thread."""
        answers = self._directory.ask(refs)
        try:
            return answers.result(self._timeout_s)
        except NotYet:
            answers.cancel()
            return [False] * len(refs)

    def add_peer(self, url: str) -> None:
        """Ask one more engine from now on.

        Raises:
            ConfigError: there is no such address.
        """
        self._directory.add_peer(url)

    def reset(self, namespaces: Sequence[Namespace]) -> None:
        """Ask about other namespaces, one for each shard, from now on."""
        self._requests.clear()
        self._directory.reset(namespaces)

    def close(self) -> None:
        """End the questions."""
        self._directory.close()


def find_tokens(hasher: PrefixHasher, index: ChunkIndex, remote: RemoteLookup | None) -> Counter[Place]:
    """How many leading tokens of a sequence are known, by the fastest tier that has them; for people and routers.

    From any thread: it only looks chunks up, one by one, and asks the remote tier itself.
    """
    blocks_per_chunk = hasher.chunk_tokens // hasher.block_tokens
    found: Counter[Place] = Counter()
    chunks = [ChunkRef(key, blocks_per_chunk) for key in hasher.chunk_keys()]
    places = _places(chunks, index, remote)
    whole = next((number for number, place in enumerate(places) if place is None), len(chunks))
    for place in places[:whole]:
        if place is not None:
            found[place] += hasher.chunk_tokens
    tails = [ChunkRef(key, number) for number, key in enumerate(hasher.block_keys(whole), 1)][: blocks_per_chunk - 1]
    for ref, place in zip(reversed(tails), reversed(_places(tails, index, remote)), strict=True):
        if place is not None:
            found[place] += ref.num_blocks * hasher.block_tokens
            break
    return found


def _places(refs: Sequence[ChunkRef], index: ChunkIndex, remote: RemoteLookup | None) -> list[Place | None]:
    """Where each chunk is."""
    local = (Place.MEMORY, Place.DISK)
    places = [next((place for place in local if index.holds(ref.prefix_key, place)), None) for ref in refs]
    missing = [ref for ref, place in zip(refs, places, strict=True) if place is None]
    if remote is None or not missing:
        return places
    elsewhere = {ref for ref, is_there in zip(missing, remote.ask(missing), strict=True) if is_there}
    return [place or (Place.REMOTE if ref in elsewhere else None) for ref, place in zip(refs, places, strict=True)]
