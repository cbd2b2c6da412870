"""Tests of bounds: a tier keeps to its bound, accounts for its bytes, and reports its chunks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ClosedError
from kvstore.testing.harness import EVEN, FEW_CHUNKS, LAYOUTS, MINE, BoundedHarness, make_ref
from kvstore.tiers.base import TierSetup

A, B = make_ref(1), make_ref(2)
FEW = [make_ref(number) for number in range(1, FEW_CHUNKS + 1)]
STORED, FULL, HIT = Outcome.STORED, Outcome.FULL, Outcome.HIT


class BoundsTests(BoundedHarness):
    """Tests of capacity, accounting and ``scan``."""

    def test_the_bound_may_be_rounded_down_but_never_up(self) -> None:
        """The bound may be rounded down but not up, because it is reported to users."""
        tier = self.start_bounded(chunks=FEW_CHUNKS)
        assert tier.usable_bytes <= tier.capacity_bytes == FEW_CHUNKS * tier.stored_bytes(EVEN.blocks_per_chunk)

    @pytest.mark.parametrize("geometry", LAYOUTS)
    def test_stored_bytes_cover_the_payload(self, geometry: str) -> None:
        """Stored bytes cover the payload, and never shrink with the number of blocks."""
        layout = LAYOUTS[geometry]
        tier = self.start_bounded(layout)
        sizes = [tier.stored_bytes(blocks) for blocks in range(1, layout.blocks_per_chunk + 1)]
        assert all(size >= layout.payload_bytes(blocks) for blocks, size in enumerate(sizes, start=1))
        assert sizes == sorted(sizes)

    def test_used_bytes_are_the_sum_of_stored_bytes(self) -> None:
        """Used bytes are exactly the sum of the stored bytes, while nothing was removed."""
        tier = self.start_bounded()
        for number in range(12):
            self.put(make_ref(number, 1 + number % 4))
            assert tier.used_bytes == sum(size for _, size in tier.scan()) == self.raw_used_bytes()

    def test_full_is_an_answer(self) -> None:
        """The first chunks are stored, and each of the others is refused individually."""
        self.only_with_exact_sizes()
        self.start(chunks=FEW_CHUNKS)
        outcomes = self.put(*FEW) + self.put(make_ref(91), make_ref(92))
        assert outcomes == [STORED] * FEW_CHUNKS + [FULL] * 2
        self.check_bytes()

    def test_full_writes_nothing(self) -> None:
        """A refused chunk is stored nowhere, and chunks stored before are unharmed."""
        self.only_with_exact_sizes()
        tier = self.start_bounded(chunks=FEW_CHUNKS)
        self.put(*FEW)
        used_bytes = tier.used_bytes
        refused = make_ref(91)
        assert self.put(refused) == [FULL]
        assert self.raw_read(refused) is None
        assert tier.contains([*FEW, refused]) == [True] * FEW_CHUNKS + [False]
        assert self.get(*FEW, refused) == [HIT] * FEW_CHUNKS + [Outcome.MISS]
        assert tier.used_bytes == used_bytes == self.raw_used_bytes()

    def test_a_full_tier_can_replace(self) -> None:
        """Without room for both, the new chunk replaces the old one."""
        self.start(chunks=FEW_CHUNKS)
        self.put(*FEW)
        assert self.put(*FEW, version=1) == [STORED] * FEW_CHUNKS
        assert self.get(*FEW, version=1) == [HIT] * FEW_CHUNKS
        self.check_bytes()

    def test_what_is_removed_makes_room(self) -> None:
        """Removals make room at once, for as many chunks as were removed."""
        self.only_with_exact_sizes()
        tier = self.start_bounded(chunks=FEW_CHUNKS)
        self.put(*FEW)
        tier.remove([A, B])
        assert self.put(make_ref(91), make_ref(92)) + self.put(make_ref(93)) == [STORED, STORED, FULL]
        assert self.held() == {*FEW, make_ref(91), make_ref(92)} - {A, B}
        self.check_bytes()

    def test_room_of_one_length_serves_another(self) -> None:
        """Chunks of other lengths can use the room of a removed one."""
        tier = self.start_bounded(chunks=FEW_CHUNKS)
        self.put(*FEW)
        tier.remove([A])
        assert self.put(make_ref(91, 1)) == [STORED]
        tier.remove([make_ref(91, 1)])
        assert self.put(A) == [STORED]
        self.check_bytes()

    def test_clear_makes_room(self) -> None:
        """A clear makes room for as many chunks as fit."""
        tier = self.start_bounded(chunks=FEW_CHUNKS)
        for version in range(3):
            assert self.put(*FEW, version=version) == [STORED] * FEW_CHUNKS
            tier.clear()
            self.check_bytes()

    def test_no_byte_is_lost_over_many_rounds(self) -> None:
        """No byte is lost over many puts and removals in a tier that is nearly full."""
        tier = self.start_bounded(chunks=FEW_CHUNKS)
        keep = FEW_CHUNKS - 1
        for number in range(60):
            assert self.put(make_ref(number, 1 + number % 4)) == [STORED]
            tier.remove([make_ref(number - keep, 1 + (number - keep) % 4)] if number >= keep else [])
            self.check_bytes()

    def test_what_is_refused_is_counted(self) -> None:
        """Refused chunks are counted as full, separately from stored ones."""
        self.only_with_exact_sizes()
        tier = self.start_bounded(chunks=FEW_CHUNKS)
        self.put(*FEW)
        self.put(make_ref(91))
        self.put(A)
        assert (tier.counters.stored, tier.counters.full, tier.counters.failed) == (FEW_CHUNKS + 1, 1, 0)

    def test_bytes_moved_are_bytes_stored(self) -> None:
        """Counted bytes do not exceed the stored bytes."""
        tier = self.start_bounded()
        self.put(A, make_ref(2, 1))
        self.get(A)
        assert tier.counters.bytes_written <= tier.used_bytes
        assert tier.counters.bytes_read <= tier.stored_bytes(4)

    def test_scan_after_close_is_refused(self) -> None:
        """``scan`` after ``close`` is refused like every other call."""
        tier = self.start_bounded()
        tier.close()
        with pytest.raises(ClosedError):
            tier.scan()

    def test_scan_tells_stored_bytes(self) -> None:
        """``scan`` returns the stored bytes, with which the index keeps the tier within its bound."""
        tier = self.start_bounded()
        refs = [make_ref(blocks, blocks) for blocks in range(1, 5)]
        self.put(*refs)
        assert dict(tier.scan()) == {ref: tier.size_of(ref) for ref in refs}

    def test_scan_names_the_longest_untouched_first(self) -> None:
        """A hit and a put are touches, so an index that is filled from a scan evicts in the right order."""
        refs = [make_ref(number) for number in range(8)]
        tier = self.start_bounded()
        self.put(*refs)
        time.sleep(self.pause_s)
        self.get(*refs[::2])
        self.put(refs[1], version=1)
        tier.contains(refs)
        touched = {*refs[::2], refs[1]}
        for restarted in (False, True)[: 1 + self.persistent]:
            if restarted:
                self.restart()
            order = [ref for ref, _ in self.bounded.scan()]
            assert set(order[:3]) == set(refs) - touched
            assert set(order[3:]) == touched

    def test_sizes_are_found_again_after_a_restart(self) -> None:
        """The sizes of each chunk and of all are found again after a restart."""
        self.only_if_persistent()
        tier = self.start_bounded()
        self.put(*(make_ref(number, 1 + number % 4) for number in range(12)))
        found, used_bytes = dict(tier.scan()), tier.used_bytes
        self.restart()
        assert dict(self.bounded.scan()) == found
        assert self.bounded.used_bytes == used_bytes == self.raw_used_bytes()

    def test_a_lowered_bound_holds_at_once(self) -> None:
        """Chunks that no longer fit are removed, and the others are whole."""
        self.only_if_persistent()
        self.only_with_exact_sizes()
        tier = self.start_bounded()
        self.put(*(make_ref(number) for number in range(4 * FEW_CHUNKS)))
        capacity_bytes = FEW_CHUNKS * tier.stored_bytes(4)
        self.stop()
        self._open(TierSetup(MINE, EVEN, capacity_bytes))
        self.check_bytes()
        kept = [ref for ref, _ in self.bounded.scan()]
        assert len(kept) == FEW_CHUNKS
        assert self.get(*kept) == [HIT] * FEW_CHUNKS

    def test_the_bound_holds_under_concurrent_puts(self) -> None:
        """Of the puts of twelve threads into a tier with room for six chunks, six are stored."""
        self.only_with_exact_sizes()
        self.start(chunks=FEW_CHUNKS)
        stored: list[ChunkRef] = []

        def put(number: int) -> None:
            if self.put(make_ref(number)) == [STORED]:
                stored.append(make_ref(number))
            self.check_bound()

        with ThreadPoolExecutor(2 * FEW_CHUNKS) as threads:
            list(threads.map(put, range(2 * FEW_CHUNKS)))
        assert len(stored) == FEW_CHUNKS
        assert self.held() == set(stored)
        self.check_bytes()
