"""Tests of storage that was changed behind the tier's back, which never leads to a wrong byte."""

from __future__ import annotations

import random

import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.testing.harness import ODD, TierHarness, make_ref

A, B = make_ref(1), make_ref(2)


class DamageTests(TierHarness):
    """Tests of tiers that check their bytes: damaged chunks are found, removed and counted; lost ones are misses."""

    @pytest.fixture(autouse=True)
    def _only_where_bytes_are_checked(self, request: pytest.FixtureRequest) -> None:
        if request.function.__qualname__.startswith(DamageTests.__name__):
            self.only_if_bytes_are_checked()

    def test_a_flipped_bit_anywhere(self) -> None:
        """A flipped bit is found in header and payload, at the ends and in the middle."""
        self.start()
        self.put(A)
        size = len(self._stored(A))
        offsets = {0, 8, size - 1, size // 2, *random.Random(1).sample(range(size), 4)}  # noqa: S311 - not a secret
        for offset in sorted(offsets):
            self.put(A)
            value = bytearray(self._stored(A))
            value[offset] ^= 16
            self._expect_corrupt(A, bytes(value))

    @pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
    def test_a_value_that_was_cut(self, part: float) -> None:
        """A value that was cut is found, be it empty or a few bytes short."""
        self.start()
        self.put(A)
        value = self._stored(A)
        self._expect_corrupt(A, value[: int(len(value) * part)])
        self.put(A)
        self._expect_corrupt(A, value[:-1])

    def test_a_value_that_has_grown(self) -> None:
        """A value that is too long is found, because a chunk has one length."""
        self.start()
        self.put(A)
        self._expect_corrupt(A, self._stored(A) + b"\0")

    @pytest.mark.parametrize("filling", [b"\0", b"\xff", b"{", b'{"a":'])
    def test_foreign_content(self, filling: bytes) -> None:
        """Unrelated content of the right length is found."""
        self.start()
        self.put(A)
        size = len(self._stored(A))
        self._expect_corrupt(A, (filling * size)[:size])

    def test_the_value_of_another_chunk(self) -> None:
        """A whole and sound value of another chunk is found."""
        self.start()
        self.put(A, B)
        self._expect_corrupt(A, self._stored(B))
        assert self.get(B) == [Outcome.HIT]

    def test_the_value_of_another_length(self) -> None:
        """A value with the same key but one block less is found."""
        self.start(ODD)
        self.put(make_ref(1, 4), make_ref(1, 3))
        self._expect_corrupt(make_ref(1, 4), self._stored(make_ref(1, 3)))
        assert self.get(make_ref(1, 3)) == [Outcome.HIT]

    def test_damage_fails_one_chunk_of_a_batch(self) -> None:
        """The other chunks of a batch are served."""
        self.start()
        self.put(A, B)
        self.raw_write(A, bytes(len(self._stored(A))))
        assert self.get(B, A, B) == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]

    def test_a_damaged_chunk_can_be_stored_again(self) -> None:
        """A damaged chunk can be stored again, with or without a get in between."""
        self.start()
        for _ in range(2):
            self.put(A)
            self.raw_write(A, bytes(len(self._stored(A))))
            assert self.put(A) == [Outcome.STORED]
            assert self.get(A) == [Outcome.HIT]
        self.check_bytes()

    def test_a_chunk_that_is_gone_is_a_miss(self) -> None:
        """A lost chunk is a miss and not an error, and its bytes are no longer counted."""
        tier = self.start()
        self.put(A, B)
        self.raw_remove(A)
        assert self.get(A, B) == [Outcome.MISS, Outcome.HIT]
        assert self.held() == {B}
        self.check_bytes()
        assert (tier.counters.corrupt, tier.counters.misses) == (0, 1)

    def test_a_chunk_that_is_gone_can_be_removed_and_stored(self) -> None:
        """A lost chunk can be removed and stored as if it were there."""
        tier = self.start()
        self.put(A)
        self.raw_remove(A)
        tier.remove([A])
        self.check_bytes()
        self.put(A)
        self.raw_remove(A)
        assert self.put(A) == [Outcome.STORED]
        assert self.get(A) == [Outcome.HIT]
        self.check_bytes()

    def _stored(self, ref: ChunkRef) -> bytes:
        value = self.raw_read(ref)
        assert value is not None
        return value

    def _expect_corrupt(self, ref: ChunkRef, value: bytes) -> None:
        """Put ``value`` in the place of a chunk; the tier must detect it once, remove it and count it."""
        before, is_damage = self.tier.counters.corrupt, bool(value) or not self.empty_is_absent
        self.raw_write(ref, value)
        assert self.get(ref) == [Outcome.CORRUPT if is_damage else Outcome.MISS]
        assert self.tier.counters.corrupt == before + is_damage
        assert self.raw_read(ref) is None
        assert self.get(ref) == [Outcome.MISS]
        assert self.tier.contains([ref]) == [False]
        self.check_bytes()
