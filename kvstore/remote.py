"""What a remote tier is known to hold: its recent answers, each for a short time.

Other engines store there, and it evicts by its own rules, so nothing about it is known for long. A "yes" that is stale
ends in a miss when the chunk is loaded; a "no" that is stale costs computing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.tiers.base import ChunkRef

MAX_ANSWERS = 1 << 18  # about 50 MB; beyond that the oldest are forgotten


class _Answer(NamedTuple):
    is_there: bool
    expires_s: float


class RemoteView:
    """Answers of a remote tier by chunk. Knows no clock: the caller says what time it is.

    Args:
        hold_s: how long an answer counts.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._answers: OrderedDict[ChunkRef, _Answer] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._answers)

    def note(self, refs: Iterable[ChunkRef], answers: Iterable[bool], now_s: float) -> None:
        """Take in what the tier said, or what its behaviour told."""
        for ref, is_there in zip(refs, answers, strict=True):
            self._answers[ref] = _Answer(is_there, now_s + self._hold_s)
            self._answers.move_to_end(ref)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def holds(self, ref: ChunkRef, now_s: float) -> bool | None:
        """Whether the tier has the chunk; None if that must be asked."""
        answer = self._answers.get(ref)
        if answer is None:
            return None
        if answer.expires_s <= now_s:
            del self._answers[ref]
            return None
        return answer.is_there

    def unknown(self, refs: Iterable[ChunkRef], now_s: float) -> list[ChunkRef]:
        """Those about which the tier must be asked."""
        return [ref for ref in refs if self.holds(ref, now_s) is None]

    def forget(self, refs: Sequence[ChunkRef]) -> None:
        """Drop the answers about some chunks."""
        for ref in refs:
            self._answers.pop(ref, None)

    def forget_missing(self, refs: Iterable[ChunkRef]) -> None:
        """Drop the answers that said "no" about some chunks, as those are on their way."""
        for ref in refs:
            answer = self._answers.get(ref)
            if answer is not None and not answer.is_there:
                del self._answers[ref]

    def clear(self) -> None:
        """Drop all answers."""
        self._answers.clear()
