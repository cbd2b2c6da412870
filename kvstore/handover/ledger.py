"""The hand-overs of one worker that are under way, and what became of their chunks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.chunks import ChunkRef
from kvstore.handover.transport import Receiver
from kvstore.paged.base import BlockIds
from kvstore.protocol.messages import MAX_OPEN
from kvstore.protocol.progress import ALL_TOKENS, Progress


class PushJob(NamedTuple):
    """A chunk to hand over, whose blocks are complete after the step.

    Attributes:
        ref: its key and length.
        block_ids: where it is.
        handover: the number of the hand-over that it belongs to.
        begin_tokens: where in the prompt it begins.
        is_needed: without it, what comes after it is of no use.
        trail: the keys at the ends of its blocks; empty if nobody needs them.
    """

    ref: ChunkRef
    block_ids: BlockIds
    handover: int = 0
    begin_tokens: int = 0
    is_needed: bool = True
    trail: bytes = b""


@dataclass
class Settled:
    """What became of chunks that were to be handed over.

    Attributes:
        arrived: how many have, by the number of the hand-over and the token at which they begin.
        lost: by the number, the first token of the first chunk that has not, and never will.
    """

    arrived: Counter[tuple[int, int]] = field(default_factory=Counter)
    lost: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.arrived or self.lost)

    def lose(self, handover: int, begin_tokens: int) -> None:
        """Note a chunk that never arrives."""
        self.lost[handover] = min(begin_tokens, self.lost.get(handover, ALL_TOKENS))

    def merge(self, other: Settled) -> None:
        """Add another rank's part."""
        self.arrived += other.arrived
        for handover, begin_tokens in other.lost.items():
            self.lose(handover, begin_tokens)


@dataclass
class _Entry:
    receiver: Receiver
    num_left: int = 0  # chunks of which it is not known yet whether they arrive
    end_tokens: int = ALL_TOKENS
    is_complete: bool = False  # no more chunks will come

    @property
    def is_over(self) -> bool:
        return self.is_complete and not self.num_left


class Ledger:
    """One per worker. Thread-safe.

    Attributes:
        sender: how receivers call this engine; empty as long as they are told nothing.
    """

    def __init__(self) -> None:
        self.sender = ""
        self._lock = threading.Lock()
        self._next = 0
        self._entries: dict[int, _Entry] = {}
        self._settled = Settled()

    def begin(self, receiver: Receiver, jobs: Iterable[PushJob]) -> None:
        """Note chunks that are to be sent; each must be settled."""
        with self._lock:
            for job in jobs:
                self._next = max(self._next, job.handover + 1)
                self._entries.setdefault(job.handover, _Entry(receiver)).num_left += 1

    def settle(self, job: PushJob, *, has_arrived: bool) -> None:
        """Note that a chunk has arrived, or never will."""
        with self._lock:
            entry = self._entries[job.handover]
            entry.num_left -= 1
            if has_arrived:
                self._settled.arrived[job.handover, job.begin_tokens] += 1
            elif job.is_needed:
                entry.end_tokens = min(entry.end_tokens, job.begin_tokens)
                self._settled.lose(job.handover, job.begin_tokens)
            if entry.is_over:
                del self._entries[job.handover]

    def wants(self, job: PushJob) -> bool:
        """Whether a chunk is of use, as nothing before it is lost."""
        with self._lock:
            return job.begin_tokens < self._entries[job.handover].end_tokens

    def complete(self, handover: int) -> Receiver | None:
        """Note that no more chunks of a hand-over will come; to whom those went that are not settled, if any."""
        with self._lock:
            self._next = max(self._next, handover + 1)
            entry = self._entries.get(handover)
            if entry is None:
                return None
            entry.is_complete = True
            if entry.is_over:
                del self._entries[handover]
            return entry.receiver

    def progress(self, receiver: Receiver) -> Progress:
        """What a receiver is to know now."""
        with self._lock:
            numbers = sorted(number for number, entry in self._entries.items() if entry.receiver == receiver)
            following = numbers[MAX_OPEN] if len(numbers) > MAX_OPEN else self._next
            open_ = {number: self._entries[number].end_tokens for number in numbers[:MAX_OPEN]}
            return Progress(self.sender, following, open_)

    def take_settled(self) -> Settled:
        """What was settled since the last call."""
        with self._lock:
            settled, self._settled = self._settled, Settled()
            return settled
