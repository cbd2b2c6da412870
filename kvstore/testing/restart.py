"""Tests of restarts: a persistent tier that is opened again holds its old chunks, and nothing else."""

from __future__ import annotations

import pytest

from kvstore.model.chunks import Outcome
from kvstore.testing.harness import MINE, ODD, OTHER, TierHarness, make_ref

A, B, C = make_ref(1), make_ref(2), make_ref(3)


class RestartTests(TierHarness):
    """Tests of persistent tiers, which are closed and opened again over the same storage."""

    @pytest.fixture(autouse=True)
    def _only_where_chunks_persist(self, request: pytest.FixtureRequest) -> None:
        if request.function.__qualname__.startswith(RestartTests.__name__):
            self.only_if_persistent()

    def test_everything_is_found_again(self) -> None:
        """All chunks are found again, with their bytes."""
        self.start()
        refs = [make_ref(number, 1 + number % 4) for number in range(12)]
        self.put(*refs)
        self.restart()
        assert self.held() == set(refs)
        assert self.get(*refs) == [Outcome.HIT] * 12
        self.check_bytes()

    def test_what_was_removed_stays_away(self) -> None:
        """Removed chunks stay away, and chunks stored again after a removal have the new bytes."""
        tier = self.start()
        self.put(A, B)
        tier.remove([A, B])
        self.put(B, version=1)
        self.restart()
        assert self.get(A) == [Outcome.MISS]
        assert self.get(B, version=1) == [Outcome.HIT]
        self.check_bytes()

    def test_what_was_cleared_stays_away(self) -> None:
        """All cleared chunks stay away."""
        self.start()
        self.put(A, B)
        self.tier.clear()
        self.restart()
        assert self.held() == set()
        self.check_bytes()

    def test_after_a_reset_nothing_of_before_comes_back(self) -> None:
        """Chunks are kept under the namespace that was entered, and not under the first one."""
        self.start().reset(OTHER)
        self.put(B)
        self.restart()
        assert self.held() == set()
        self.start(namespace=OTHER)
        assert self.get(A, B) == [Outcome.MISS, Outcome.HIT]
        self.tier.reset(MINE)
        self.put(A, version=1)
        self.start(namespace=OTHER)
        assert self.held() == set()
        self.start()
        assert self.get(A, B, version=1) == [Outcome.HIT, Outcome.MISS]
        self.check_bytes()

    def test_replaced_bytes_stay_replaced(self) -> None:
        """The new bytes are found, and the chunk is held once."""
        self.start()
        self.put(A)
        self.put(A, version=1)
        self.restart()
        assert self.held() == {A}
        assert self.get(A, version=1) == [Outcome.HIT]

    def test_another_namespace_sees_nothing(self) -> None:
        """Another namespace neither sees these chunks nor adds any."""
        self.start()
        self.put(A)
        self.start(namespace=OTHER)
        assert self.held() == set()
        assert self.get(A) == [Outcome.MISS]
        self.put(A, version=1)
        self.start()
        assert self.get(A) == [Outcome.HIT]

    def test_another_geometry_is_never_served(self) -> None:
        """Chunks of another layout under the same namespace are no hits."""
        self.start()
        self.put(A)
        self.start(ODD)
        assert self.get(A)[0] is not Outcome.HIT
        self.check_bytes()

    def test_damage_while_it_was_closed(self) -> None:
        """A chunk that was damaged, cut or lost meanwhile is not served."""
        self.only_if_bytes_are_checked()
        self.start()
        self.put(A, B, C, make_ref(4))
        value = self.raw_read(A)
        assert value is not None
        self.stop()
        self.raw_write(A, bytes(len(value)))
        self.raw_write(B, value[:-1])
        self.raw_remove(C)
        self.restart()
        outcomes = self.get(A, B, C, make_ref(4))
        assert Outcome.HIT not in outcomes[:3]
        assert outcomes[3] is Outcome.HIT
        self.check_bytes()

    def test_a_tier_that_was_opened_can_be_closed_unused(self) -> None:
        """An unused tier can be closed and opened again, any number of times."""
        self.start()
        self.put(A)
        for _ in range(3):
            self.restart()
        assert self.get(A) == [Outcome.HIT]
