"""Batches of small chunks that one call writes to a tier: a call costs as much as moving some of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.model.chunks import Outcome

_MAX_CHUNKS: Final = 8
_MAX_BYTES: Final = 12 << 20
_MAX_CALL_S: Final = 0.1  # one of this length costs little by itself, and a longer one might reach its deadline


def chunks_per_batch(slot_bytes: int) -> int:
    """Return the most chunks that one call writes."""
    return max(1, min(_MAX_CHUNKS, _MAX_BYTES // slot_bytes))


class Batches:
    """Number of chunks for the next call, which grows while calls are short. Threads may race: any size is right.

    A call has one deadline for all of its chunks, so a tier that is slow, but works, gets one at a time.

    Args:
        slot_bytes: bytes of a chunk.

    Attributes:
        size: the number.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._most = chunks_per_batch(slot_bytes)
        self.size = 1

    @contextmanager
    def call(self) -> Iterator[list[Outcome]]:
        """Time a call that writes chunks and adds their outcomes to a list; after one that raises, the next has one.

        Chunks that ``FAILED`` tell nothing: a tier that is left out answers at once, until it is tried again.
        """
        begin_s, fitting, outcomes = time.monotonic(), 1, list[Outcome]()
        try:
            yield outcomes
            count = len(outcomes) - outcomes.count(Outcome.FAILED)
            fitting = int(count * _MAX_CALL_S / max(time.monotonic() - begin_s, 1e-6))
        finally:
            self.size = max(1, min(self._most, 2 * self.size, fitting))
