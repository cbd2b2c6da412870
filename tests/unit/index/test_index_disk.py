"""The index over a disk tier: writes to it, evictions from it, and chunks that it cannot deliver."""

from __future__ import annotations

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
from kvstore.index.plans import MissReason, Place, StoreStep, TierState, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.model.keys import PrefixHasher

# Write and evict


def test_what_is_evicted_from_memory_is_still_on_disk() -> None:
    index = make(1, disk_chunks=4)
    for seed in range(3):
        store(index, 16, seed)
    assert [known_tokens(index, 16, seed) for seed in range(3)] == [16] * 3
    assert (index.slots_in_use, index.disk_used_bytes) == (1, 3 * FULL_BYTES)
    assert [step.source for step in load(index, 16, 0)] == [Place.DISK]


def test_the_disk_gives_way_in_order_of_use_and_says_so_first() -> None:
    index = make(1, disk_chunks=2)
    store(index, 16, 0)
    store(index, 16, 1)
    load(index, 16, 0)
    assert index.take_removals() == []
    steps = index.prepare_store(refs_of(16, 2))
    assert index.take_removals() == refs_of(16, 1)
    assert steps[0].targets == (Place.DISK,)
    index.complete_store(steps, set())
    index.complete_write(steps[0].ref.prefix_key, Place.DISK, stored=True)
    assert index.disk_used_bytes == 2 * FULL_BYTES
    assert [known_tokens(index, 16, seed) for seed in range(3)] == [16, 0, 16]
    assert index.counters.evicted_disk == 1


def test_a_failed_write_leaves_the_chunk_in_memory() -> None:
    index = make(2, disk_chunks=2)
    (step,) = store(index, 16, write=False)
    assert index.disk_used_bytes == FULL_BYTES
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=False)
    assert (known_tokens(index, 16), index.disk_used_bytes, index.take_removals()) == (16, 0, [])


def test_a_write_that_ends_before_its_store_shows_nothing_early() -> None:
    index = make(2, disk_chunks=2)
    (step,) = index.prepare_store(refs_of(16))
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert known_tokens(index, 16) == 0
    index.complete_store([step], set())
    assert known_tokens(index, 16) == 16
    assert uses_of(index) == 0


def test_the_number_of_writes_is_bounded() -> None:
    index = make(8, disk_chunks=8, max_writes=2)
    steps = index.prepare_store(refs_of(64))
    assert [bool(step.targets) for step in steps] == [True, True, False, False]
    assert index.counters.writes_dropped == 2
    check_invariants(index)


def test_a_chunk_larger_than_the_disk_is_only_kept_in_memory() -> None:
    index = ChunkIndex(2, disk_capacity_bytes=FULL_BYTES - 1, stored_bytes=stored_bytes)
    steps = index.prepare_store(refs_of(24))
    assert [bool(step.targets) for step in steps] == [False, True]  # the tail is smaller
    check_invariants(index)


def test_the_disk_evicts_all_that_is_needed_or_nothing() -> None:
    index = make(4, disk_chunks=2)
    store(index, 16, 0)
    held = store(index, 16, 1, write=False)
    refs = index.prepare_load(refs_of(16, 0))
    steps = index.prepare_store(refs_of(16, 2))  # both on disk are in use
    assert [bool(step.targets) for step in steps] == [False]
    assert index.take_removals() == []
    assert index.disk_used_bytes == 2 * FULL_BYTES
    index.complete_store(steps, set())
    index.complete_load(refs, set(), set())
    index.complete_write(held[0].ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)
    assert uses_of(index) == 0


def test_pool_as_a_mere_passage() -> None:
    index = make(2, disk_chunks=8, keep=False)
    (step,) = store(index, 16, write=False)
    assert index.slots_in_use == 1
    assert known_tokens(index, 16) == 16
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert (index.slots_in_use, known_tokens(index, 16)) == (0, 16)
    assert [step.source for step in load(index, 16)] == [Place.DISK]
    assert index.slots_in_use == 0


def test_a_passage_does_not_take_what_it_cannot_pass_on() -> None:
    index = make(4, disk_chunks=8, keep=False, max_writes=1)
    steps = index.prepare_store(refs_of(48))
    assert len(steps) == 1
    assert index.counters.refused == index.counters.writes_dropped == 2
    check_invariants(index)
    index.complete_store(steps, set())
    index.complete_write(steps[0].ref.prefix_key, Place.DISK, stored=False)
    check_invariants(index)
    assert (len(index), index.slots_in_use) == (0, 0)


def test_a_chunk_after_whole_ones_needs_a_slot_too() -> None:
    for num_slots, found_tokens in ((3, 40), (2, 32), (1, 16)):
        index = make(num_slots, disk_chunks=4)
        index.adopt((ref, FULL_BYTES) for ref in refs_of(40))
        assert known_tokens(index, 40) == found_tokens


def test_a_chunk_whose_length_is_another_is_not_found() -> None:
    index = make(disk_chunks=4)
    first, second = refs_of(32)
    index.adopt([(first, FULL_BYTES), (second._replace(num_blocks=2), FULL_BYTES)])
    assert known_tokens(index, 32) == 16


def test_adopting_without_a_disk_is_nothing() -> None:
    index = make()
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    assert len(index) == 0


def test_survivors_go_in_the_order_in_which_they_came() -> None:
    index = make(2, disk_chunks=3)
    index.adopt((refs_of(16, seed)[0], FULL_BYTES) for seed in range(3))
    store(index, 16, seed=3)
    assert index.take_removals() == refs_of(16, 0)


# A disk that does not answer


def test_what_did_not_arrive_is_not_lost() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    steps = index.prepare_load(refs_of(32))
    index.complete_load(steps, keys(steps), set())
    assert (known_tokens(index, 32), index.slots_in_use, uses_of(index)) == (32, 0, 0)
    assert (index.take_removals(), index.counters.failed_loads, index.counters.lost_chunks) == ([], 2, 0)


def test_a_load_in_line_behind_one_that_failed_loses_nothing_either() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    first, second = index.prepare_load(refs_of(16)), index.prepare_load(refs_of(16))
    index.complete_load([*first, *second], keys(first), set())
    assert (known_tokens(index, 16), index.counters.lost_chunks, uses_of(index)) == (16, 0, 0)


def test_a_slot_without_its_chunk_is_forgotten() -> None:
    index = make(4, disk_chunks=4)
    store(index, 32)
    steps = index.prepare_load(refs_of(32))
    index.complete_load(steps, keys(steps[1:]), set())
    assert (known_tokens(index, 32), index.counters.lost_chunks) == (16, 1)
    assert index.why_missing(hasher_of(32), 16, 32) is MissReason.LOST
    assert keys(index.take_removals()) == keys(steps[1:])


def test_slots_of_failed_reads_are_taken_last() -> None:
    index = make(3, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    (step,) = index.prepare_load(refs_of(16))
    index.complete_load([step], keys([step]), set())
    assert [other.slot for other in index.prepare_store(refs_of(48, 1))][-1] == step.slot


def test_nothing_is_promised_that_only_a_silent_disk_has() -> None:
    index = make(3, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    load(index, 16)
    index.set_tiers(TierState(disk_answers=False))
    assert known_tokens(index, 32) == 16
    assert len(index.prepare_store(refs_of(16, 1))) == 1  # writes continue, as one of them will be the first to succeed
    index.set_tiers(TierState())
    assert known_tokens(index, 32) == 32


@pytest.mark.parametrize("disk_answers", [True, False])
def test_what_could_not_be_read_is_stored_again(*, disk_answers: bool) -> None:
    """Computed again because the disk failed, it replaces the old chunk in memory, and by a new write."""
    index = make(2, disk_chunks=4)
    store(index, CHUNK)
    store(index, 2 * CHUNK, seed=1)  # takes both slots, so the first chunk is only on disk now
    index.set_tiers(TierState(disk_answers=disk_answers))
    if disk_answers:
        steps = index.prepare_load(refs_of(CHUNK))
        index.complete_load(steps, keys(steps), set())
    (step,) = index.prepare_store(refs_of(CHUNK))
    assert step.gather
    assert bool(step.targets)
    assert index.take_removals() == refs_of(CHUNK)
    index.complete_store([step], set())
    assert known_tokens(index, CHUNK) == CHUNK
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)


# Writes that were dropped


def test_a_write_that_was_dropped_is_planned_again() -> None:
    index = make(4, disk_chunks=4, max_writes=1)
    first, second = store(index, 32)
    assert (bool(first.targets), bool(second.targets)) == (True, False)
    (step,) = index.prepare_store(refs_of(32))
    assert step == StoreStep(second.ref, second.slot, (Place.DISK,), gather=False, trail=second.trail)
    assert index.prepare_store(refs_of(32)) == []  # on its way
    index.complete_store([step], keys([step]))  # nothing was copied: the chunk is unchanged
    assert known_tokens(index, 32) == 32
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)
    assert (index.disk_used_bytes, uses_of(index), index.counters.writes_retried) == (2 * FULL_BYTES, 0, 1)
    assert index.prepare_store(refs_of(32)) == []


def test_what_a_codec_made_smaller_leaves_room() -> None:
    index = make(8, disk_chunks=2)
    steps = store(index, 32, write=False)
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=True, size_bytes=FULL_BYTES // 2)
    assert index.disk_used_bytes == FULL_BYTES
    store(index, 16, seed=1)
    check_invariants(index)
    assert index.counters.evicted_disk == 0
    assert index.disk_used_bytes == 2 * FULL_BYTES


def test_what_could_not_be_sent_is_sent_when_it_is_offered_again() -> None:
    index = ChunkIndex(4, remote=RemoteView(60.0), max_sends=2)
    (step,) = index.prepare_store(refs_of(16))
    assert step.targets == (Place.REMOTE,)
    index.complete_store([step], set())
    index.complete_write(step.ref.prefix_key, Place.REMOTE, stored=False)
    (again,) = index.prepare_store(refs_of(16))
    assert (again.targets, again.gather) == ((Place.REMOTE,), False)
    index.complete_store([again], set())
    index.complete_write(again.ref.prefix_key, Place.REMOTE, stored=True)
    assert index.prepare_store(refs_of(16)) == []


# Tails


@pytest.mark.parametrize("stored", [False, True])
def test_a_tail_on_disk_waits_for_its_chunk(stored: bool) -> None:
    index = make(8, disk_chunks=8)
    store(index, 20)
    steps = store(index, 32, write=False)
    assert (index.counters.superseded_tails, index.take_removals()) == (0, [])
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=stored)
    check_invariants(index)
    assert index.counters.superseded_tails == stored
    assert index.take_removals() == refs_of(20)[1:] * stored


@pytest.mark.parametrize(("take_turns", "used"), [(False, [0, 0, 0, 0]), (True, [0, 1, 2, 0])])
def test_slots_that_a_device_may_still_read_are_used_last(used: list[int], *, take_turns: bool) -> None:
    """A store into a slot that a device still reads has to wait, but the host's caches hold the last slot used."""
    index = ChunkIndex(
        3,
        keep_in_memory=False,
        disk_capacity_bytes=10 * FULL_BYTES,
        stored_bytes=stored_bytes,
        slots_take_turns=take_turns,
    )
    assert [step.slot for seed in range(4) for step in store(index, CHUNK, seed)] == used


def test_of_chunks_that_share_as_many_blocks_one_in_memory_is_taken() -> None:
    index = make(1, disk_chunks=8)
    for seed in range(6):
        hasher = PrefixHasher(CHUNK, BLOCK)
        hasher.update([*range(12), *range(seed * 1000, seed * 1000 + 4)])
        steps = index.prepare_store(chunk_refs(hasher, with_tail=True), hasher=hasher)
        index.complete_store(steps, set())
        for step in steps:
            index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    match = index.lookup(hasher_of(12))
    assert match.num_tokens == 12
    assert index.in_memory(match.refs[-1].prefix_key)


def test_a_trail_of_another_length_is_not_taken() -> None:
    index, (whole,) = make(disk_chunks=4), refs_of(16)
    trail = b"".join(hasher_of(16).block_keys(0))
    index.adopt([(whole, FULL_BYTES)], {whole.prefix_key: trail[16:]})
    check_invariants(index)
    assert (known_tokens(index, 16), known_tokens(index, 12)) == (16, 0)


def parting(shared: int, seed: int) -> PrefixHasher:
    """Return a chunk that has so many tokens in common with all others of these."""
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update([*range(shared), *range(seed * 1000, seed * 1000 + CHUNK - shared)])
    return hasher


def adopt(index: ChunkIndex, hasher: PrefixHasher) -> None:
    """Add a chunk that the disk held at start, with its trail."""
    refs = chunk_refs(hasher, with_tail=False)
    index.adopt(((ref, FULL_BYTES) for ref in refs), trails_of(hasher, refs))


def test_a_chunk_that_is_coming_is_not_taken_for_a_part() -> None:
    """A request that used part of it would wait for the load of another request."""
    index, coming = make(4, disk_chunks=8), parting(12, 1)
    adopt(index, coming)
    assert index.lookup(parting(12, 2)).num_tokens == 12
    steps = index.prepare_load(index.lookup(coming).refs)
    assert index.lookup(parting(12, 2)).num_tokens == 0
    assert index.lookup(coming).num_tokens == 16
    index.complete_load(steps, set(), set())
    assert index.lookup(parting(12, 2)).num_tokens == 12


def test_without_a_slot_for_the_way_a_shorter_one_in_memory_is_taken() -> None:
    index, on_disk, here = make(1, disk_chunks=8), parting(12, 1), parting(8, 2)
    adopt(index, on_disk)
    index.complete_store(index.prepare_store(chunk_refs(here, with_tail=False), hasher=here), set())
    assert index.lookup(parting(12, 3)).num_tokens == 8, "the only slot is being written"
    check_invariants(index)


def test_of_what_is_on_disk_no_part_is_read_where_that_is_not_wanted() -> None:
    index, on_disk, here = make(4, disk_chunks=8), parting(12, 1), parting(8, 2)
    adopt(index, on_disk)
    index.complete_store(index.prepare_store(chunk_refs(here, with_tail=False), hasher=here), set())
    assert index.lookup(parting(12, 3)).num_tokens == 12
    assert index.lookup(parting(12, 3), reads_parts=False).num_tokens == 8
    assert index.lookup(on_disk, reads_parts=False).num_tokens == 16


@pytest.mark.parametrize("here", [0, 99, 199])
def test_a_chunk_in_memory_is_seen_however_many_on_disk_share_as_much(here: int) -> None:
    """Its position among them does not matter, and it is seen only while it is in memory."""
    index, shared = make(2, disk_chunks=400), hasher_of(8)
    trail = b"".join(shared.block_keys(0))
    parted = sorted((parting(8, seed) for seed in range(1, 201)), key=lambda hasher: hasher.block_keys(0))
    for hasher in parted:
        adopt(index, hasher)
    refs = [chunk_refs(hasher, with_tail=False)[0] for hasher in parted]
    assert index.longest(trail) == (Place.DISK, 2)
    index.complete_load(index.prepare_load(refs[here : here + 1]), set(), set())
    check_invariants(index)
    assert index.lookup(shared).refs == (refs[here],)
    assert index.longest(trail) == (Place.MEMORY, 2)
    for others in (refs[1:3], refs[3:5]):
        steps = index.prepare_load(others)
        index.complete_load(steps, keys(steps), set())
    check_invariants(index)
    assert index.longest(trail) == (Place.DISK, 2)
    index.remove(keys(refs))
    check_invariants(index)
    assert index.longest(trail) is None
