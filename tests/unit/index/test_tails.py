"""Tails that a longer chunk holds: they lead to it, and have no bytes."""

from __future__ import annotations

import math

import pytest
from support.index import (
    BLOCK,
    CHUNK,
    FULL_BYTES,
    hasher_of,
    keys,
    known_tokens,
    load,
    make,
    refs_of,
    store,
    stored_bytes,
    trails_of,
)
from support.invariants import check_invariants
from support.uses import uses_of

from kvstore.index.index import ChunkIndex
from kvstore.index.leases import Leases
from kvstore.index.plans import MissReason, Place, StoreStep, TierState, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.model.keys import PrefixHasher


def offer(index: ChunkIndex, num_tokens: int, ttl_s: float | None = None) -> list[StoreStep]:
    """Plan a store and return its steps, of which none is carried out."""
    steps = index.prepare_store(refs_of(num_tokens), hasher=hasher_of(num_tokens), ttl_s=ttl_s)
    check_invariants(index)
    return steps


def parting(shared_tokens: int, seed: int, num_tokens: int = CHUNK) -> PrefixHasher:
    """Return a sequence that leaves that of ``hasher_of`` after so many tokens."""
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update([*range(shared_tokens), *range(seed * 1000, seed * 1000 + num_tokens - shared_tokens)])
    return hasher


# Offered chunks


@pytest.mark.parametrize("num_tokens", [CHUNK, CHUNK - BLOCK], ids=["chunk", "tail"])
def test_a_tail_that_a_longer_one_holds_is_not_stored(num_tokens: int) -> None:
    index = make(disk_chunks=4)
    store(index, num_tokens)
    assert store(index, 8) == []
    assert (index.counters.known, index.counters.refused, index.slots_in_use) == (1, 0, 1)
    assert known_tokens(index, 8) == 8
    assert index.disk_used_bytes == stored_bytes(num_tokens // BLOCK)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("tail_first", [False, True])
def test_a_tail_is_not_lost_with_a_chunk_whose_store_fails(fails: bool, tail_first: bool) -> None:
    """The request that offered it has ended. The tail is dropped once the chunk is stored."""
    index = make(disk_chunks=4)
    chunk, tail = offer(index, 16), offer(index, 8)
    assert keys(tail) == keys(refs_of(8))
    for steps in (tail, chunk) if tail_first else (chunk, tail):
        index.complete_store(steps, keys(steps) if fails and steps is chunk else set())
        for step in steps:
            index.complete_write(step.ref.prefix_key, Place.DISK, stored=not (fails and steps is chunk))
        check_invariants(index)
    assert known_tokens(index, 8) == 8
    assert (len(index), index.slots_in_use, uses_of(index)) == (1, 1, 0)
    assert index.disk_used_bytes == (stored_bytes(2) if fails else FULL_BYTES)


def test_a_chunk_that_is_about_to_go_stands_in_for_nothing() -> None:
    index = make()
    store(index, 16)
    loads = index.prepare_load(refs_of(16))
    index.remove(keys(refs_of(16)))
    assert keys(offer(index, 8)) == keys(refs_of(8))
    index.complete_load(loads, set(), set())
    check_invariants(index)


@pytest.mark.parametrize("way", ["answers", "silent", "unread"])
def test_a_chunk_that_is_only_on_disk(way: str) -> None:
    """If it can be read, a tail of it is kept in memory only, as it may be computed sooner than the chunk is read."""
    index = make(disk_chunks=4)
    hasher = hasher_of(16)
    index.adopt([(refs_of(16)[0], FULL_BYTES)], trails_of(hasher, refs_of(16)))
    if way == "unread":
        steps = index.prepare_load(refs_of(16))
        index.complete_load(steps, keys(steps), set())
    index.set_tiers(TierState(disk_answers=way != "silent"))
    (step,) = offer(index, 8)
    assert (step.ref, step.targets) == (refs_of(8)[0], () if way == "answers" else (Place.DISK,))
    assert step.trail == b"".join(hasher_of(8).block_keys(0))


def test_a_tail_beside_a_chunk_on_disk_is_found_in_memory_and_goes_when_the_chunk_comes() -> None:
    index = make(disk_chunks=4)
    index.adopt([(refs_of(16)[0], FULL_BYTES)], trails_of(hasher_of(16), refs_of(16)))
    index.complete_store(offer(index, 8), set())
    for _ in range(2):
        assert offer(index, 8) == [], "it is not written where the chunk is"
        (found,) = index.lookup(hasher_of(8)).refs
        assert index.source(found) is Place.MEMORY
    assert index.disk_used_bytes == FULL_BYTES
    load(index, 16)
    assert (len(index), known_tokens(index, 8), uses_of(index)) == (1, 8, 0)
    assert offer(index, 8) == []


def test_a_chunk_on_disk_is_used_with_its_tail_in_memory() -> None:
    index = ChunkIndex(4, cache_policy="LRU", disk_capacity_bytes=2 * FULL_BYTES, stored_bytes=stored_bytes)
    for seed in (0, 1):
        index.adopt([(refs_of(16, seed)[0], FULL_BYTES)], trails_of(hasher_of(16, seed), refs_of(16, seed)))
    index.complete_store(offer(index, 8), set())
    store(index, 16, seed=2)
    assert index.take_removals() == refs_of(16, seed=1)
    check_invariants(index)


def test_a_chunk_that_passes_through_memory_stands_in_for_nothing_until_it_is_written() -> None:
    index = make(disk_chunks=4, keep=False)
    (step,) = offer(index, 16)
    index.complete_store([step], set())
    (tail,) = offer(index, 8)
    assert tail.ref == refs_of(8)[0], "the chunk's write may fail"
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert offer(index, 8) == []
    index.complete_store([tail], set())
    index.complete_write(tail.ref.prefix_key, Place.DISK, stored=True)
    assert (known_tokens(index, 8), index.disk_used_bytes, uses_of(index)) == (8, FULL_BYTES, 0)


@pytest.mark.parametrize(("ttl_s", "stored"), [(None, True), (9, True), (5, False), (1, False)])
def test_a_chunk_that_goes_sooner_does_not_stand_in(ttl_s: float | None, stored: bool) -> None:
    """It is not kept for longer either, as the engine that stored the rest knows when that expires."""
    index = make()
    index.complete_store(offer(index, 16, ttl_s=5), set())
    index.complete_store(steps := offer(index, 8, ttl_s), set())
    assert keys(steps) == (keys(refs_of(8)) if stored else set())
    index.advance(5)
    assert known_tokens(index, 16) == (8 if stored else 0)


def test_where_a_remote_tier_is_written_to_tails_are_stored() -> None:
    """This holds as long as the tier is not known to find more than keys."""
    for max_sends in (0, 4):
        index = ChunkIndex(4, remote=RemoteView(9), max_sends=max_sends)
        index.complete_store(offer(index, 16), set())
        assert keys(offer(index, 8)) == (keys(refs_of(8)) if max_sends else set())
        assert offer(index, 12, ttl_s=5) == [], "it would not be sent"


def test_the_holder_is_used_in_the_place_of_a_tail() -> None:
    index = ChunkIndex(2, cache_policy="LRU")
    store(index, 16)
    store(index, 16, seed=1)
    assert store(index, 8) == []
    store(index, 16, seed=2)
    assert (known_tokens(index, 16), known_tokens(index, 16, seed=1)) == (16, 0)


def test_a_tail_offered_twice_by_a_request_is_one_use_of_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    index = make()
    store(index, 16)
    noted = []
    monkeypatch.setattr(index._orders[0], "touch_chain", lambda chain, noted_, _leaves: noted.append((chain, noted_)))
    index.prepare_store(refs_of(8), hasher=hasher_of(8), noted=keys(refs_of(8)))
    ((chain, seen),) = noted
    assert set(chain) == keys(refs_of(16))
    assert set(chain) <= seen


def test_the_holder_is_written_in_the_stead_of_a_tail() -> None:
    index = make(disk_chunks=4, max_writes=0)
    store(index, 16)
    index._disk.max_writes = 1
    (step,) = offer(index, 8)
    assert (step.ref, step.gather, step.targets) == (refs_of(16)[0], False, (Place.DISK,))
    assert step.trail == b"".join(hasher_of(16).block_keys(0))
    index.complete_store([step], set())
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert (index.counters.writes_retried, index.disk_used_bytes, uses_of(index)) == (1, FULL_BYTES, 0)


def test_of_many_holders_one_in_memory_is_used() -> None:
    sequences = [parting(8, seed) for seed in range(1, 31)]
    for here in sequences:  # any of them is next to the tail
        index = make(disk_chunks=40)
        for hasher in sequences:
            refs = chunk_refs(hasher, with_tail=False)
            index.adopt([(refs[0], FULL_BYTES)] * (hasher is not here), trails_of(hasher, refs))
        steps = index.prepare_store(chunk_refs(here, with_tail=False), hasher=here)
        index.complete_store(steps, set())
        index.complete_write(steps[0].ref.prefix_key, Place.DISK, stored=False)
        assert keys(offer(index, 8)) == keys(steps), "which is written now"


# Chunks in memory and on disk


def test_a_tail_beside_a_chunk_on_disk_goes_when_it_is_offered() -> None:
    """A crash may leave both, and so do chunks stored before an engine knew block ends."""
    index, hasher = make(disk_chunks=4), hasher_of(16)
    tail = refs_of(8)
    known = trails_of(hasher, refs_of(16)) | trails_of(hasher_of(8), tail)
    index.adopt([(tail[0], 50), (refs_of(16)[0], FULL_BYTES)], known)
    (step,) = offer(index, 8)
    assert (step.targets, step.trail) == ((), b"".join(hasher_of(8).block_keys(0)))
    assert index.take_removals() == tail
    assert (index.counters.superseded_tails, index.disk_used_bytes) == (1, FULL_BYTES)
    index.complete_store([step], set())
    assert known_tokens(index, 8) == 8


def test_a_tail_in_memory_is_not_given_for_a_chunk_on_disk() -> None:
    index, hasher = make(disk_chunks=4), hasher_of(16)
    index.complete_store(index.prepare_store(refs_of(8), hasher=hasher_of(8), ttl_s=math.inf), set())
    index.adopt([(refs_of(16)[0], FULL_BYTES)], trails_of(hasher, refs_of(16)))
    assert offer(index, 8, ttl_s=math.inf) == []
    assert index.in_memory(refs_of(8)[0].prefix_key)
    steps = index.prepare_load(refs_of(16))
    index.complete_load(steps, set(), set())
    check_invariants(index)
    assert (len(index), index.slots_in_use, known_tokens(index, 8)) == (1, 1, 8), "now it is in memory, too"


def test_a_tail_that_is_being_read_stays_until_then() -> None:
    """Its file is not removed before the read."""
    index = make(disk_chunks=4)
    index.adopt([(refs_of(8)[0], 50)], trails_of(hasher_of(8), refs_of(8)))
    loads = index.prepare_load(refs_of(8))
    store(index, 16)
    assert index.take_removals() == []
    index.complete_load(loads, set(), set())
    assert known_tokens(index, 8) == 8
    assert offer(index, 8) == []
    assert index.take_removals() == refs_of(8)


def test_two_chunks_that_share_a_tail_both_hold_it() -> None:
    for first in (0, 1):
        index, sequences = make(8, disk_chunks=8), [parting(8, 1), parting(8, 2)]
        store(index, 8)
        refs = [chunk_refs(hasher, with_tail=False) for hasher in sequences]
        for hasher, mine in zip(sequences, refs, strict=True):
            index.complete_store(steps := index.prepare_store(mine, hasher=hasher), set())
            for step in steps:
                index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
        assert len(index) == 2
        index.remove(keys(refs[first]))
        assert known_tokens(index, 8) == 8
        assert offer(index, 8) == [], "the other one still does"
        index.remove(keys(refs[1 - first]))
        assert keys(offer(index, 8)) == keys(refs_of(8))


def test_a_chunk_that_takes_in_no_tail_yet_does_when_it_is_written() -> None:
    index = make(8, disk_chunks=8)
    store(index, 8)
    (step,) = store(index, 16, write=False)
    assert len(index) == 2, "the tail is on disk, and a crash would lose it"
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert (len(index), index.take_removals()) == (1, refs_of(8))


def test_a_chunk_that_was_removed_while_it_was_written_takes_in_no_tail() -> None:
    index = make(8, disk_chunks=8)
    store(index, 8)
    (step,) = store(index, 16, write=False)
    index.remove(keys([step]))
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert known_tokens(index, 16) == 8
    assert index.counters.superseded_tails == 0


# Leases


def test_the_lease_of_a_tail_moves_to_the_chunk_that_holds_it() -> None:
    index = make(8)
    store(index, 20)
    assert index.lease("one", refs_of(20), 10) == 2
    store(index, 32)
    assert not index.in_memory(refs_of(20)[1].prefix_key), "it has no bytes of its own any more"
    for seed in range(1, 12):
        store(index, 16, seed)
    assert known_tokens(index, 20) == 20
    assert known_tokens(index, 32) == 32, "the whole chunk is held"
    index.release("one")
    assert (index.leases, uses_of(index)) == (0, 0)
    for seed in range(20, 40):
        store(index, 16, seed)
    assert known_tokens(index, 32) == 0


def test_a_lease_that_moved_ends_with_its_time_and_can_be_renewed() -> None:
    index = make(8)
    store(index, 8)
    index.lease("one", refs_of(8), 10)
    store(index, 16)
    index.advance(9)
    assert index.lease("one", index.lookup(hasher_of(8)).refs, 10) == 1
    index.advance(18)
    assert index.leases == 1
    index.advance(19)
    assert (index.leases, uses_of(index)) == (0, 0)
    check_invariants(index)


def test_leases_of_several_tails_of_a_chunk_become_one_hold() -> None:
    index = make(8)
    for num_tokens in (4, 8, 12):
        store(index, num_tokens)
    index.lease("all", [*refs_of(4), *refs_of(8), *refs_of(12)], 10)
    index.lease("one", refs_of(12), 10)
    store(index, 16)
    assert [(view.name, view.num_chunks) for view in index.lease_views()] == [("all", 1), ("one", 1)]
    assert uses_of(index) == 2
    assert index.lease("more", refs_of(16), 10) == 1
    store(index, 48, seed=1)
    assert index.lease("others", refs_of(48, seed=1), 10) == 3, "the room of the tails is free again"
    for name in ("all", "one", "more", "others"):
        index.release(name)
    assert uses_of(index) == 0
    check_invariants(index)


def test_moving_leases_takes_no_room() -> None:
    leases = Leases(2)  # one chunk at once
    leases.add("a", [b"tail"], 1)
    leases.add("b", [b"tail"], 1)
    assert leases.move(b"tail", b"chunk") == (2, 2)
    assert leases.move(b"chunk", b"chunk of another") == (2, 2)
    assert leases.move(b"unknown", b"chunk") == (0, 0)
    assert (leases.admitted([b"chunk of another", b"tail"]), b"tail" in leases) == (1, False)
    assert leases.withdraw("a") == leases.withdraw("b") == [b"chunk of another"]
    assert leases._num_holds == 0


def test_a_tail_that_is_kept_for_longer_keeps_its_lease() -> None:
    index = make()
    store(index, 8)
    index.lease("one", refs_of(8), 100)
    index.complete_store(offer(index, 16, ttl_s=5), set())
    index.advance(6)
    assert known_tokens(index, 8) == 8
    assert (index.leases, uses_of(index)) == (1, 1)


# Misses


@pytest.mark.parametrize(("way", "reason"), [("evict", MissReason.EVICTED), ("remove", MissReason.REMOVED)])
def test_a_tail_is_missed_for_the_reason_for_which_its_chunk_went(way: str, reason: MissReason) -> None:
    index = ChunkIndex(2, cache_policy="LRU")
    store(index, 8)
    store(index, 16)
    if way == "evict":
        store(index, 32, seed=1)
    else:
        index.remove(keys(refs_of(16)))
    assert index.why_missing(hasher_of(8), 0, 8) is reason
    assert index.why_missing(hasher_of(16), 0, 16) is reason
    assert index.why_missing(hasher_of(8, seed=5), 0, 8) is MissReason.NEVER_STORED
