"""Loads of chunks that a tier lends: each is loaded once, and none stays lent after refusals and failures."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.testing.harness import make_ref
from kvstore.tiers.loan import Loan
from kvstore.transfer.borrowing import use_borrowed
from kvstore.transfer.lane import Lane

REFS = [make_ref(number) for number in range(40)]


class Lender:
    """Stand-in for a lane. It lends so many chunks at once, lacks some, and is broken after so many calls."""

    def __init__(self, most: int, missing: set[int], broken_after: int) -> None:
        self.most = most
        self.missing = missing
        self.calls_left = broken_after
        self.lent = 0
        self.most_lent = 0

    def borrow(self, refs: Sequence[ChunkRef]) -> Future[Loan]:
        lending: Future[Loan] = Future()
        lending.set_result(self._lend(refs))
        return lending

    def _lend(self, refs: Sequence[ChunkRef]) -> Loan:
        self.calls_left -= 1
        if self.calls_left < 0:
            return Loan.refused(len(refs))
        outcomes: list[Outcome] = []
        payloads: list[ByteArray | None] = []
        for ref in refs:
            number = REFS.index(ref)
            is_here = number not in self.missing
            may_be_lent = is_here and (outcomes.count(Outcome.HIT) < self.most)
            outcomes.append(Outcome.HIT if may_be_lent else Outcome.FAILED if is_here else Outcome.MISS)
            payloads.append(np.array([number], np.uint8) if may_be_lent else None)
        count = outcomes.count(Outcome.HIT)
        self.lent += count

        def give_back() -> None:
            self.lent -= count

        return Loan(outcomes, payloads, give_back)


@given(
    count=st.integers(0, len(REFS)),
    most=st.integers(1, 10),
    missing=st.sets(st.integers(0, len(REFS) - 1)),
    broken_after=st.integers(0, 60),
    raises_at=st.none() | st.integers(0, len(REFS)),
)
def test_every_chunk_once(count: int, most: int, missing: set[int], broken_after: int, raises_at: int | None) -> None:
    lender = Lender(most, missing, broken_after)
    used: list[int] = []

    def use(number: int, payload: ByteArray) -> None:
        assert payload[0] == number
        used.append(number)
        if len(used) - 1 == raises_at:
            raise ZeroDivisionError

    try:
        outcomes = use_borrowed(cast("Lane", lender), REFS[:count], use)
    except ZeroDivisionError:
        assert raises_at is not None
        assert lender.lent == 0
        return
    assert lender.lent == 0
    assert sorted(used) == [number for number, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
    if lender.calls_left >= 0:
        here = [Outcome.MISS if number in missing else Outcome.HIT for number in range(count)]
        assert outcomes == here


def test_no_view_is_left_when_a_loan_ends() -> None:
    """The last view of a server's memory unmaps it, which takes too long for the model's thread."""
    seen: list[weakref.ref[ByteArray]] = []
    left_at_end: list[bool] = []

    class Watched(Lender):
        def _lend(self, refs: Sequence[ChunkRef]) -> Loan:
            payloads: list[ByteArray | None] = [np.zeros(1, np.uint8) for _ in refs]
            give_back = lambda: left_at_end.append(any(view() is not None for view in seen))  # noqa: E731
            return Loan([Outcome.HIT] * len(refs), payloads, give_back)

    use_borrowed(cast("Lane", Watched(8, set(), 9)), REFS[:1], lambda _, payload: seen.append(weakref.ref(payload)))
    assert left_at_end == [False]


def test_a_loan_that_ends_twice_is_given_back_once() -> None:
    ends: list[int] = []
    with Loan([Outcome.HIT], [np.zeros(1, np.uint8)], lambda: ends.append(1)) as loan:
        loan.end()
    assert ends == [1]
    with pytest.raises(ZeroDivisionError), Loan([Outcome.MISS], [None], lambda: ends.append(2)):
        raise ZeroDivisionError
    assert ends == [1, 2]
