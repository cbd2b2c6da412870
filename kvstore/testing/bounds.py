"""A tier keeps to its bound, counts its bytes and its events, and ends."""

from __future__ import annotations

import pytest

from kvstore.chunks import Outcome
from kvstore.errors import ClosedError
from kvstore.testing.harness import EVEN, FEW_CHUNKS, LAYOUTS, OTHER, TierHarness, make_ref, make_transfer

A, B, C = make_ref(1), make_ref(2), make_ref(3)
FEW = [make_ref(number) for number in range(1, FEW_CHUNKS + 1)]
STORED, FULL, HIT = Outcome.STORED, Outcome.FULL, Outcome.HIT


class BoundsTests(TierHarness):
    """Capacity, accounting, counters, close."""

    @pytest.mark.parametrize("geometry", LAYOUTS)
    def test_stored_bytes_cover_the_payload(self, geometry: str) -> None:
        """And do not shrink with the length."""
        layout = LAYOUTS[geometry]
        tier = self.start(layout)
        sizes = [tier.stored_bytes(blocks) for blocks in range(1, layout.blocks_per_chunk + 1)]
        assert all(size >= layout.payload_bytes(blocks) for blocks, size in enumerate(sizes, start=1))
        assert sizes == sorted(sizes)

    def test_used_bytes_are_the_sum_of_stored_bytes(self) -> None:
        """To the byte, while nothing was removed."""
        tier = self.start()
        for number in range(12):
            self.put(make_ref(number, 1 + number % 4))
            assert tier.used_bytes == sum(size for _, size in tier.scan()) == self.raw_used_bytes()

    def test_full_is_an_answer(self) -> None:
        """The first chunks are stored, the rest is refused, each on its own."""
        self.only_with_exact_sizes()
        self.start(chunks=FEW_CHUNKS)
        outcomes = self.put(*FEW) + self.put(make_ref(91), make_ref(92))
        assert outcomes == [STORED] * FEW_CHUNKS + [FULL] * 2
        self.check_bytes()

    def test_full_writes_nothing(self) -> None:
        """What was refused is nowhere, and what was there is unharmed."""
        self.only_with_exact_sizes()
        tier = self.start(chunks=FEW_CHUNKS)
        self.put(*FEW)
        used_bytes = tier.used_bytes
        refused = make_ref(91)
        assert self.put(refused) == [FULL]
        assert self.raw_read(refused) is None
        assert tier.contains([*FEW, refused]) == [True] * FEW_CHUNKS + [False]
        assert self.get(*FEW, refused) == [HIT] * FEW_CHUNKS + [Outcome.MISS]
        assert tier.used_bytes == used_bytes == self.raw_used_bytes()

    def test_a_full_tier_can_replace(self) -> None:
        """Without room for two of them, the new one takes the place of the old."""
        self.start(chunks=FEW_CHUNKS)
        self.put(*FEW)
        assert self.put(*FEW, version=1) == [STORED] * FEW_CHUNKS
        assert self.get(*FEW, version=1) == [HIT] * FEW_CHUNKS
        self.check_bytes()

    def test_what_is_removed_makes_room(self) -> None:
        """At once, for as many chunks as were removed."""
        self.only_with_exact_sizes()
        tier = self.start(chunks=FEW_CHUNKS)
        self.put(*FEW)
        tier.remove([A, B])
        assert self.put(make_ref(91), make_ref(92)) + self.put(make_ref(93)) == [STORED, STORED, FULL]
        assert self.held() == {*FEW, make_ref(91), make_ref(92)} - {A, B}
        self.check_bytes()

    def test_room_of_one_length_serves_another(self) -> None:
        """Chunks of other lengths can take what a removed one gave back."""
        tier = self.start(chunks=FEW_CHUNKS)
        self.put(*FEW)
        tier.remove([A])
        assert self.put(make_ref(91, 1)) == [STORED]
        tier.remove([make_ref(91, 1)])
        assert self.put(A) == [STORED]
        self.check_bytes()

    def test_clear_makes_room(self) -> None:
        """For all that fits."""
        tier = self.start(chunks=FEW_CHUNKS)
        for version in range(3):
            assert self.put(*FEW, version=version) == [STORED] * FEW_CHUNKS
            tier.clear()
            self.check_bytes()

    def test_no_byte_is_lost_over_many_rounds(self) -> None:
        """Storing and removing again and again, in a tier that is nearly full."""
        tier = self.start(chunks=FEW_CHUNKS)
        keep = FEW_CHUNKS - 1
        for number in range(60):
            assert self.put(make_ref(number, 1 + number % 4)) == [STORED]
            tier.remove([make_ref(number - keep, 1 + (number - keep) % 4)] if number >= keep else [])
            self.check_bytes()

    def test_counters_add_up(self) -> None:
        """One event for every chunk asked for, whatever its batch."""
        self.only_with_exact_sizes()
        tier = self.start(chunks=FEW_CHUNKS)
        refused = make_ref(91)
        self.put(*FEW)
        self.put(refused)
        self.put(A)
        self.get(A, B, refused, refused)
        self.get(refused)
        found = tier.counters
        assert (found.stored, found.full, found.hits, found.misses) == (FEW_CHUNKS + 1, 1, 2, 3)
        assert (found.corrupt, found.failed) == (0, 0)

    def test_bytes_moved_are_counted(self) -> None:
        """At least the payloads, unless a codec is at work, and none for what did not move."""
        tier = self.start()
        self.put(A, make_ref(2, 1))
        self.get(A, C)
        found = tier.counters
        assert self._least_bytes(5) <= found.bytes_written <= tier.used_bytes
        assert self._least_bytes(4) <= found.bytes_read <= tier.stored_bytes(4)

    def _least_bytes(self, num_blocks: int) -> int:
        return EVEN.payload_bytes(num_blocks) if self.exact_sizes else 1

    def test_looking_is_not_counted(self) -> None:
        """Neither ``contains`` nor ``scan`` is a hit or a miss."""
        tier = self.start()
        self.put(A)
        tier.contains([A, B])
        tier.scan()
        assert (tier.counters.hits, tier.counters.misses) == (0, 0)

    def test_close_may_be_repeated(self) -> None:
        """Also for a tier that was never used."""
        tier = self.start()
        tier.close()
        tier.close()

    def test_calls_after_close_are_refused(self) -> None:
        """Every method, with the exception made for it."""
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
            tier.scan,
        )
        for call in calls:
            with pytest.raises(ClosedError):
                call()
