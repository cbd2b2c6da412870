"""Loads directly from a tier's memory, where one batch is scattered while the next one is being lent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.tiers.loan import Loan, end_late_loan
from kvstore.transfer.lane import Lane

BATCH: Final = 8  # chunks in one loan; few, because a chunk that the server reads from disk delays the others
_AHEAD: Final = 2  # loans at a time
_Lending = tuple[Sequence[int], Future[Loan]]


def use_borrowed(lane: Lane, refs: Sequence[ChunkRef], use: Callable[[int, ByteArray], None]) -> list[Outcome]:
    """Borrow chunks, and call ``use`` with the number and the payload of each hit, on the caller's thread.

    Chunks refused because too much is lent are borrowed again, one by one. All loans end if ``use`` raises.
    """
    outcomes = [Outcome.FAILED] * len(refs)
    waiting: deque[Sequence[int]] = deque(
        range(begin, min(begin + BATCH, len(refs))) for begin in range(0, len(refs), BATCH)
    )
    lent: deque[_Lending] = deque()
    try:
        while waiting or lent:
            while waiting and len(lent) < _AHEAD:
                numbers = waiting.popleft()
                lent.append((numbers, lane.borrow([refs[number] for number in numbers])))
            numbers, lending = lent[0]
            with lending.result() as loan:
                lent.popleft()
                _use(loan, numbers, use)
                for number, outcome in zip(numbers, loan.outcomes, strict=True):
                    outcomes[number] = outcome
            if Outcome.HIT in loan.outcomes:
                refused = (n for n, outcome in zip(numbers, loan.outcomes, strict=True) if outcome is Outcome.FAILED)
                waiting.extend(range(number, number + 1) for number in refused)
    finally:
        for _, lending in lent:
            lending.add_done_callback(end_late_loan)
    return outcomes


def _use(loan: Loan, numbers: Sequence[int], use: Callable[[int, ByteArray], None]) -> None:
    """Call ``use`` with each payload, and keep no view of one, because the last view of a mapping unmaps it."""
    for number, payload in zip(numbers, loan.payloads, strict=True):
        if payload is not None:
            use(number, payload)
