"""Tests of times to live: a tier that keeps them tells until when its chunks may stay, also after a restart."""

from __future__ import annotations

import time

import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.lifetime import Lifetime
from kvstore.testing.harness import EVEN, BoundedHarness, TierHarness, make_ref, make_transfer
from kvstore.tiers.base import BoundedTier, Tier

A, B, C = make_ref(1), make_ref(2, 3), make_ref(3)


class LifetimeTests(TierHarness):
    """Tests of tiers that keep times to live, as those who look up their chunks see them."""

    def test_a_lookup_tells_the_end(self) -> None:
        """``contains`` tells the end of a chunk that has one, also after a restart."""
        self._start()
        end_s = time.time() + 1e6
        self._put_until(A, end_s)
        self._put_until(B, end_s + 50)
        self.put(C)
        for restarts in (False, True):
            if restarts and self.persistent:
                self.restart()
            self._check_presence({A: end_s, B: end_s + 50, C: None})
            assert self.get(A, B, C) == [Outcome.HIT] * 3

    def test_an_end_becomes_later(self) -> None:
        """``limit`` lets chunks stay for longer, or without end; unknown ones are ignored."""
        self._start()
        end_s = time.time() + 1e6
        for ref in (A, B):
            self._put_until(ref, end_s)
        self.tier.limit([Lifetime(A, end_s + 50), Lifetime(B, None), Lifetime(C, end_s)])
        for restarts in (False, True):
            if restarts and self.persistent:
                self.restart()
            self._check_presence({A: end_s + 50, B: None})
            assert self.get(A, B, C) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]

    def test_the_last_put_decides_on_the_end(self) -> None:
        """A chunk that is stored again has the end of that put."""
        self._start()
        end_s = time.time() + 1e6
        self._put_until(A, end_s)
        self.put(A, B)
        self._put_until(B, end_s)
        self._check_presence({A: None, B: end_s})
        self.tier.clear()
        assert self.tier.contains([A, B]) == [False, False]
        self._put_until(A, end_s)
        self._check_presence({A: end_s})

    def test_a_shared_tier_ends_chunks(self) -> None:
        """A chunk whose time is over is neither found nor read, and can be stored again."""
        tier = self._start()
        if isinstance(tier, BoundedTier):
            pytest.skip("the index ends the chunks of this tier")
        far_s = time.time() + 1e6
        self._put_until(B, far_s)
        end_s, outcomes = far_s, list[Outcome]()
        for life_s in (2, 8, 32):  # a tier may keep whole seconds only, and a machine may be busy
            if Outcome.HIT not in outcomes:
                end_s = time.time() + life_s
                self._put_until(A, end_s)
                outcomes = self.get(A)
        assert outcomes == [Outcome.HIT]
        assert self.get(B) == [Outcome.HIT]
        while any(tier.contains([A])):
            assert time.time() < end_s + 10, "it is still there"
            time.sleep(0.05)
        assert self.get(A, B) == [Outcome.MISS, Outcome.HIT]
        self.put(A)
        self._check_presence({A: None, B: far_s})
        assert self.get(A, B) == [Outcome.HIT] * 2

    def _start(self) -> Tier:
        tier = self.start()
        tier.contains([A])  # a server tells what it knows once it has been asked
        if not tier.keeps_lifetimes:
            pytest.skip("this tier keeps no times to live")
        return tier

    def _put_until(self, ref: ChunkRef, until_s: float) -> None:
        assert self.put_all([make_transfer(EVEN, ref)._replace(until_s=until_s)]) == [Outcome.STORED]

    def _check_presence(self, expected: dict[ChunkRef, float | None]) -> None:
        for (ref, until_s), told in zip(expected.items(), self.tier.contains([*expected]), strict=True):
            if until_s is None:
                assert told is True, ref
            else:
                assert isinstance(told, float), ref
                assert abs(told - until_s) <= 1, ref


class BoundedLifetimeTests(LifetimeTests, BoundedHarness):
    """Tests of tiers with a bound that keep times to live."""

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

    def _restart_if_persistent(self) -> None:
        if self.persistent:
            self.restart()

    def _check_ends(self, expected: dict[ChunkRef, float]) -> None:
        found = {ref: until_s for ref, until_s in self.bounded.lifetimes() if until_s is not None}
        assert found.keys() == expected.keys()
        assert all(0 <= found[ref] - until_s <= 1 for ref, until_s in expected.items())
