"""Tests of a tier's counters and of its end."""

from __future__ import annotations

import pytest

from kvstore.model.errors import ClosedError
from kvstore.testing.harness import EVEN, OTHER, TierHarness, make_ref, make_transfer

A, B, C = make_ref(1), make_ref(2), make_ref(3)


class EndingTests(TierHarness):
    """Tests of counters and ``close``."""

    def test_counters_add_up(self) -> None:
        """Every requested chunk counts one event, in batches of any size."""
        tier = self.start()
        self.put(A, B)
        self.put(A)
        self.get(A, B, C, C)
        self.get(C)
        found = tier.counters
        assert (found.stored, found.hits, found.misses) == (3, 2, 3)
        assert (found.full, found.corrupt, found.failed) == (0, 0, 0)

    def test_bytes_moved_are_counted(self) -> None:
        """Moved bytes are at least the payloads, unless a codec is used, and none for chunks that did not move."""
        tier = self.start()
        self.put(A, make_ref(2, 1))
        self.get(A, C)
        found = tier.counters
        assert self._least_bytes(5) <= found.bytes_written <= self.raw_used_bytes()
        assert self._least_bytes(4) <= found.bytes_read < found.bytes_written

    def _least_bytes(self, num_blocks: int) -> int:
        return EVEN.payload_bytes(num_blocks) if self.exact_sizes else 1

    def test_looking_is_not_counted(self) -> None:
        """``contains`` counts neither a hit nor a miss."""
        tier = self.start()
        self.put(A)
        tier.contains([A, B])
        assert self.held() == {A}
        assert (tier.counters.hits, tier.counters.misses) == (0, 0)

    def test_close_may_be_repeated(self) -> None:
        """``close`` may be repeated, also for a tier that was never used."""
        tier = self.start()
        tier.close()
        tier.close()

    def test_calls_after_close_are_refused(self) -> None:
        """Every method raises ``ClosedError`` after ``close``."""
        tier = self.start()
        self.put(A)
        tier.close()
        transfers = [make_transfer(EVEN, A)]
        calls = (
            lambda: tier.get(transfers),
            lambda: tier.put(transfers),
            lambda: tier.contains([A]),
            lambda: tier.remove([A]),
            tier.clear,
            lambda: tier.reset(OTHER),
        )
        for call in calls:
            with pytest.raises(ClosedError):
                call()
