"""Tests of a tier's contents, counters and end: a chunk can be read until it is replaced, removed or cleared."""

from __future__ import annotations

import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ClosedError
from kvstore.testing.harness import EVEN, LAYOUTS, MINE, OTHER, TierHarness, make_ref, make_transfer
from kvstore.tiers.base import TierCounters

A, B, C = make_ref(1), make_ref(2), make_ref(3)


def _trail(ref: ChunkRef, *first: int) -> bytes:
    """Return a trail of a chunk of four blocks that begins with blocks of these numbers."""
    others = [make_ref(number, 1).prefix_key for number in first]
    own = [
        make_ref(100 * ref.prefix_key[0] + number, 1).prefix_key for number in range(len(others), ref.num_blocks - 1)
    ]
    return b"".join([*others, *own, ref.prefix_key])


class ContentTests(TierHarness):
    """Tests of round trips, batches, and the calls that forget."""

    def test_an_empty_tier_holds_nothing(self) -> None:
        """Right after opening there are no chunks, bytes or events."""
        tier = self.start()
        assert tier.name
        assert self.held() == set()
        self.check_bytes()
        assert tier.counters == TierCounters()

    def test_get_of_an_unknown_chunk_is_a_miss(self) -> None:
        """A miss is a value, in an empty tier as in a full one."""
        self.start()
        assert self.get(A) == [Outcome.MISS]
        self.put(A)
        assert self.get(B) == [Outcome.MISS]

    def test_contains(self) -> None:
        """``contains`` answers in the order of the chunks, and agrees with ``get``."""
        tier = self.start()
        self.put(A, C)
        assert tier.contains([A, B, C, A]) == [True, False, True, True]

    def test_what_is_named_for_a_trail_shares_blocks_with_it(self) -> None:
        """A tier that keeps trails names those that share most, the nearest first, and no tier names others."""
        tier = self.start()
        told = {ref: _trail(ref, *range(8, 8 - shared, -1)) for ref, shared in ((A, 1), (B, 3), (C, 2))}
        other = make_ref(4)
        told[other] = _trail(other, 5)
        self.put_all([make_transfer(self.layout, ref)._replace(trail=trail) for ref, trail in told.items()])
        near, far = tier.nearest([_trail(make_ref(9), 8, 7, 6), _trail(make_ref(9), 3)])
        assert far == ()
        assert near == ((told[B], told[C], told[A]) if self.keeps_trails else ())
        assert tier.nearest([]) == []
        assert tier.keeps_trails is self.keeps_trails
        tier.remove([B])
        tier.contains([B])
        (near,) = tier.nearest([_trail(make_ref(9), 8, 7, 6)])
        assert set(near) <= set(told.values()) - {told[other]}
        tier.clear()
        assert tier.nearest([told[B]]) == [()]

    def test_batches_of_nothing(self) -> None:
        """Empty batches get empty answers."""
        tier = self.start()
        assert [*tier.get([]), *tier.put([]), *tier.contains([])] == []
        tier.remove([])
        assert tier.counters == TierCounters()

    @pytest.mark.parametrize("geometry", LAYOUTS)
    def test_round_trip_of_every_length(self, geometry: str) -> None:
        """Round trips work for full chunks and tails, with even, odd, large and tiny pages, and one plane or two."""
        layout = LAYOUTS[geometry]
        self.start(layout)
        refs = [make_ref(blocks, blocks) for blocks in range(1, layout.blocks_per_chunk + 1)]
        assert self.put(*refs) == [Outcome.STORED] * len(refs)
        assert self.get(*refs) == [Outcome.HIT] * len(refs)
        self.check_bytes()

    def test_lengths_under_one_key_are_different_chunks(self) -> None:
        """A tail and a full chunk do not answer for each other."""
        tier = self.start()
        self.put(make_ref(1, 4), make_ref(1, 2))
        assert self.get(make_ref(1, 4), make_ref(1, 3), make_ref(1, 2)) == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
        tier.remove([make_ref(1, 4)])
        assert self.get(make_ref(1, 4), make_ref(1, 2)) == [Outcome.MISS, Outcome.HIT]

    def test_keys_are_any_bytes(self) -> None:
        """Keys of zeros, of separators, in upper and lower case, and keys that differ in one bit."""
        keys = [
            bytes(16),
            b"\xff" * 16,
            b"/../../../../../",
            b"abcdefghijklmnop",
            b"ABCDEFGHIJKLMNOP",
            b"%s\n:{}*? " * 2,
        ]
        keys += [bytes(15) + b"\1", b"\1" + bytes(15)]
        refs = [ChunkRef(key[:16], 4) for key in keys]
        self.start()
        assert self.put(*refs) == [Outcome.STORED] * len(refs)
        assert self.get(*refs) == [Outcome.HIT] * len(refs)
        assert self.held() == set(refs)

    def test_many_chunks_in_one_batch(self) -> None:
        """A batch may be as large as the tier."""
        self.start()
        refs = [make_ref(number, 1 + number % 4) for number in range(60)]
        assert self.put(*refs) == [Outcome.STORED] * 60
        assert self.get(*reversed(refs)) == [Outcome.HIT] * 60
        assert self.held() == set(refs)

    def test_answers_come_in_the_order_of_the_batch(self) -> None:
        """Hits and misses can be mixed, and each hit has its own bytes."""
        self.start()
        self.put(A, C)
        assert self.get(B, C, B, A) == [Outcome.MISS, Outcome.HIT, Outcome.MISS, Outcome.HIT]

    def test_one_chunk_twice_in_a_batch_of_gets(self) -> None:
        """Both buffers are filled."""
        self.start()
        self.put(A)
        assert self.get(A, A) == [Outcome.HIT, Outcome.HIT]

    def test_one_chunk_twice_in_a_batch_of_puts(self) -> None:
        """A chunk put twice in a batch is held once, with the bytes of one of the two."""
        self.start()
        assert self.put_all([make_transfer(self.layout, A) for _ in range(2)]) == [Outcome.STORED, Outcome.STORED]
        assert self.get(A) == [Outcome.HIT]
        assert self.held() == {A}
        self.check_bytes()

    def test_replacing_serves_the_new_bytes(self) -> None:
        """A replaced chunk has the new bytes, and is held once."""
        self.start()
        self.put(A, B)
        assert self.put(A, version=1) == [Outcome.STORED]
        assert self.get(A, version=1) == self.get(B) == [Outcome.HIT]
        assert self.held() == {A, B}
        self.check_bytes()

    def test_the_storage_holds_what_the_tier_says(self) -> None:
        """The storage holds the chunks that the tier reports."""
        tier = self.start()
        assert self.raw_read(A) is None
        self.put(A)
        assert self.raw_read(A) is not None
        tier.remove([A])
        assert self.raw_read(A) is None

    def test_remove_forgets(self) -> None:
        """A removed chunk is forgotten, and no other."""
        tier = self.start()
        self.put(A, B)
        tier.remove([A])
        assert self.get(A, B) == [Outcome.MISS, Outcome.HIT]
        assert tier.contains([A, B]) == [False, True]
        self.check_bytes()

    def test_remove_of_unknown_chunks_is_ignored(self) -> None:
        """Unknown chunks before, after and between known ones are ignored."""
        tier = self.start()
        tier.remove([A])
        self.put(A)
        tier.remove([B, A, A, C])
        tier.remove([A])
        assert self.held() == set()

    def test_remove_takes_any_iterable(self) -> None:
        """``remove`` takes any iterable, even one that can be iterated only once."""
        tier = self.start()
        self.put(A, B, C)
        tier.remove(ref for ref in (A, B))
        assert self.held() == {C}

    def test_a_removed_chunk_can_be_stored_again(self) -> None:
        """A removed chunk can be stored again, with other bytes."""
        tier = self.start()
        self.put(A)
        tier.remove([A])
        assert self.put(A, version=1) == [Outcome.STORED]
        assert self.get(A, version=1) == [Outcome.HIT]

    def test_reset_begins_anew(self) -> None:
        """After a reset no earlier chunk is found, and new ones are kept."""
        tier = self.start()
        self.put(A, B)
        tier.reset(OTHER)
        assert tier.contains([A, B]) == [False, False]
        assert self.held() == set()
        assert self.get(A, B) == [Outcome.MISS] * 2
        self.put(A, version=1)
        assert self.get(A, version=1) == [Outcome.HIT]
        self.check_bytes()

    def test_a_put_of_another_epoch_stores_nothing(self) -> None:
        """A put that was overtaken by ``reset`` stores nothing, because it holds KV of other weights."""
        tier = self.start()
        old, new = ([make_transfer(EVEN, ref)._replace(namespace_id=n.id) for ref in (A, B)] for n in (MINE, OTHER))
        assert self.put_all([old[0], new[1]]) == [Outcome.STORED, Outcome.FAILED]
        tier.reset(OTHER)
        assert self.put_all(old) == [Outcome.FAILED] * 2
        assert tier.contains([A, B]) == [False, False]
        assert self.get(A, B) == [Outcome.MISS] * 2
        assert self.put_all([old[0], new[1]]) == [Outcome.FAILED, Outcome.STORED]
        assert self.held() == {B}
        assert self.get(A, B) == [Outcome.MISS, Outcome.HIT]
        self.check_bytes()

    def test_clear_forgets_everything(self) -> None:
        """After a clear all chunks are forgotten, and the tier works."""
        tier = self.start()
        tier.clear()
        self.put(A, B)
        tier.clear()
        assert self.held() == set()
        assert tier.contains([A, B]) == [False, False]
        assert self.get(A, B) == [Outcome.MISS, Outcome.MISS]
        assert self.raw_read(A) is None
        self.check_bytes()
        assert self.put(A) == [Outcome.STORED]
        assert self.get(A) == [Outcome.HIT]
        self.check_bytes()


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
