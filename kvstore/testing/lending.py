"""Tests of loans: a tier lends the payload of a chunk, unchanged until the loan ends, even if the chunk changes."""

from __future__ import annotations

import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ClosedError, InvalidCallError
from kvstore.testing.harness import EVEN, LAYOUTS, TierHarness, make_payload, make_ref, make_transfer
from kvstore.tiers.base import MAX_LENT, Tier
from kvstore.tiers.loan import Loan

A, B, GONE = make_ref(1), make_ref(2), make_ref(3, 1)
_MANY_LOANS = 50


class LendingRefusalTest(TierHarness):
    """Test of the refusal to lend, also for tiers that do not lend."""

    def test_a_tier_that_does_not_lend_refuses(self) -> None:
        """A tier that does not lend refuses loans like calls that make no sense."""
        tier = self.start(EVEN)
        self.put(A)
        if tier.lends:
            tier.borrow([A]).end()
        else:
            with pytest.raises(InvalidCallError):
                tier.borrow([A])


class LendingTests(LendingRefusalTest):
    """Tests of tiers that lend. Subclass it in addition to ``TierConformance``."""

    def _start_lender(self, geometry: str = "even") -> Tier:
        tier = self.start(LAYOUTS[geometry])
        assert tier.lends
        return tier

    def _check(self, loan: Loan, *refs: ChunkRef | None, version: int = 0) -> None:
        """Check the chunks of a loan; None stands for a missing one."""
        assert loan.outcomes == [Outcome.MISS if ref is None else Outcome.HIT for ref in refs]
        for ref, payload in zip(refs, loan.payloads, strict=True):
            assert (ref is None) == (payload is None)
            if ref is not None and payload is not None:
                assert not payload.flags.writeable
                assert payload.tobytes() == make_payload(self.layout, ref, version)

    @pytest.mark.parametrize("geometry", LAYOUTS)
    def test_what_is_lent_is_what_was_put(self, geometry: str) -> None:
        """Lent bytes are those that were put, for every length and next to missing chunks."""
        tier = self._start_lender(geometry)
        refs = [make_ref(blocks, blocks) for blocks in range(1, self.layout.blocks_per_chunk + 1)]
        self.put(*refs)
        before = tier.counters.hits, tier.counters.misses
        with tier.borrow([refs[0], GONE, *refs[1:]]) as loan:
            self._check(loan, refs[0], None, *refs[1:])
        assert (tier.counters.hits, tier.counters.misses) == (before[0] + len(refs), before[1] + 1)
        with tier.borrow([]) as nothing:
            self._check(nothing)

    def test_it_stays_while_the_chunk_is_replaced_and_removed(self) -> None:
        """A loan is of bytes, not of a name."""
        tier = self._start_lender()
        self.put(A, B)
        with tier.borrow([A, B]) as loan:
            tier.put([make_transfer(self.layout, A, version=1)])
            self._check(loan, A, B)
            with tier.borrow([A]) as another:
                self._check(another, A, version=1)
            tier.remove([A])
            tier.clear()
            self.put(*(make_ref(number) for number in range(10, 30)))
            self._check(loan, A, B)
        assert loan.payloads == [None, None]
        assert tier.contains([A, B]) == [False, False]

    def test_what_was_given_back_can_be_lent_again(self) -> None:
        """Chunks can be lent any number of times, also twice at once."""
        tier = self._start_lender()
        self.put(A)
        for _ in range(_MANY_LOANS):
            loan = tier.borrow([A])
            self._check(loan, A)
            loan.end()
            loan.end()
        with tier.borrow([A]) as first, tier.borrow([A, B]) as second:
            self._check(first, A)
            self._check(second, A, None)
        self.check_bytes()

    def test_calls_that_make_no_sense(self) -> None:
        """Too many chunks, impossible ones and calls after the end are refused."""
        tier = self._start_lender()
        for refs in ([ChunkRef(b"short", 1)], [make_ref(1, 0)], [make_ref(n) for n in range(MAX_LENT + 1)]):
            with pytest.raises(InvalidCallError):
                tier.borrow(refs)
        self.stop()
        with pytest.raises(ClosedError):
            tier.borrow([A])
