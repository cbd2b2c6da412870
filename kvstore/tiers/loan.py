"""Loan: memory of a tier that others read in place."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from kvstore.model.chunks import ByteArray, Outcome


class Loan:
    """Memory of a tier, lent for reading, as a context manager that returns it. Any thread may end the loan.

    Attributes:
        outcomes: of each chunk: HIT, MISS, CORRUPT or FAILED.
        payloads: of each chunk, read-only; None unless it is a HIT. Must not be used after the end.
    """

    def __init__(
        self, outcomes: list[Outcome], payloads: list[ByteArray | None], give_back: Callable[[], None] | None = None
    ) -> None:
        self.outcomes = outcomes
        self.payloads = payloads
        self._give_back = give_back

    @classmethod
    def refused(cls, num_chunks: int) -> Loan:
        """Return a loan in which every chunk ``FAILED``."""
        return cls([Outcome.FAILED] * num_chunks, [None] * num_chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Return the memory. Idempotent."""
        give_back, self._give_back = self._give_back, None
        self.payloads = [None] * len(self.outcomes)
        if give_back is not None:
            give_back()


def end_late_loan(lending: Future[Loan]) -> None:
    """End a loan that nobody waits for any more; a callback of its future."""
    if not lending.cancelled() and lending.exception() is None:
        lending.result().end()
