"""Tests of times to live: a tier that keeps them tells after a restart until when its chunks may stay."""

from __future__ import annotations

import time

import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.lifetime import Lifetime
from kvstore.testing.harness import EVEN, BoundedHarness, make_ref, make_transfer

A, B, C = make_ref(1), make_ref(2, 3), make_ref(3)


class LifetimeTests(BoundedHarness):
    """Tests of tiers that keep times to live."""

    def test_times_to_live_are_told(self) -> None:
        """Ends are told of the chunks that have one, to the second, and after a restart, too."""
        self._start()
        end_s = time.time() + 1e6
        self._put_until(A, end_s)
        self._put_until(B, end_s + 50)
        self.put(C)
        self._restart_if_persistent()
        self._check_ends({A: end_s, B: end_s + 50})
        assert self.held() == {A, B, C}
        assert self.get(A, B, C) == [Outcome.HIT] * 3
        self.check_bytes()

    def test_times_to_live_change(self) -> None:
        """An end may become later, or none; those of unknown chunks are ignored."""
        self._start()
        end_s = time.time() + 1e6
        for ref in (A, B):
            self._put_until(ref, end_s)
        self.bounded.limit([Lifetime(A, end_s + 50), Lifetime(B, None), Lifetime(C, end_s)])
        for restarts in (False, True):
            if restarts:
                self._restart_if_persistent()
            self._check_ends({A: end_s + 50})
            assert self.get(A, B, C) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
        self.check_bytes()

    def test_a_chunk_that_is_stored_again_has_its_new_time(self) -> None:
        """The last put of a chunk decides on its end."""
        self._start()
        end_s = time.time() + 1e6
        self._put_until(A, end_s)
        self._put_until(B, end_s)
        self.put(A, C)
        self.bounded.remove([B])
        self._put_until(B, end_s + 50)
        self._put_until(C, end_s)
        self._restart_if_persistent()
        self._check_ends({B: end_s + 50, C: end_s})
        assert self.get(A, B, C) == [Outcome.HIT] * 3
        self.check_bytes()

    def test_what_is_gone_has_no_time(self) -> None:
        """Ends leave with their chunks."""
        self._start()
        for ref in (A, B):
            self._put_until(ref, time.time() + 1e6)
        self.bounded.remove([A])
        assert {ref for ref, _ in self.bounded.lifetimes()} == {B}
        self.tier.clear()
        assert self.bounded.lifetimes() == []
        self._restart_if_persistent()
        assert self.bounded.lifetimes() == []
        self.check_bytes()

    def _start(self) -> None:
        if not self.start_bounded().keeps_lifetimes:
            pytest.skip("this tier keeps no times to live")

    def _restart_if_persistent(self) -> None:
        if self.persistent:
            self.restart()

    def _put_until(self, ref: ChunkRef, until_s: float) -> None:
        assert self.put_all([make_transfer(EVEN, ref)._replace(until_s=until_s)]) == [Outcome.STORED]

    def _check_ends(self, expected: dict[ChunkRef, float]) -> None:
        found = {ref: until_s for ref, until_s in self.bounded.lifetimes() if until_s is not None}
        assert found.keys() == expected.keys()
        assert all(0 <= found[ref] - until_s <= 1 for ref, until_s in expected.items())
