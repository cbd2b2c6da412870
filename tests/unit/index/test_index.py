"""The index: every transition of a chunk, seen from outside. ``test_index_machine`` makes them in random orders."""

from __future__ import annotations

import pytest
from support.index import FULL_BYTES, hasher_of, keys, known_tokens, load, make, refs_of, store
from support.invariants import check_invariants
from support.uses import uses_of

from kvstore.index.plans import NO_MATCH, LoadStep, Match, Place

# Store


def test_a_chunk_is_found_only_after_its_store_is_complete() -> None:
    index = make()
    assert index.lookup(hasher_of(40)) == NO_MATCH
    steps = index.prepare_store(refs_of(40))
    assert [step.ref.num_blocks for step in steps] == [4, 4, 2]
    assert len({step.slot for step in steps}) == 3
    assert not any(bool(step.targets) for step in steps)
    assert (known_tokens(index, 40), uses_of(index), index.slots_in_use) == (0, 3, 3)
    index.complete_store(steps, set())
    assert (known_tokens(index, 40), uses_of(index), index.slots_in_use) == (40, 0, 3)
    assert index.lookup(hasher_of(40)) == Match(tuple(refs_of(40)), 40)
    assert index.counters.stored == 3
    assert all(index.in_memory(step.ref.prefix_key) for step in steps)


def test_a_failed_store_leaves_nothing_behind() -> None:
    index = make(disk_chunks=4)
    steps = index.prepare_store(refs_of(48))
    index.complete_store(steps, {steps[1].ref.prefix_key})
    assert known_tokens(index, 48) == 16
    assert index.take_removals() == [steps[1].ref]
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=step is not steps[1])
    check_invariants(index)
    assert (len(index), uses_of(index), index.disk_used_bytes) == (2, 0, 2 * FULL_BYTES)
    assert index.counters.failed_stores == index.counters.writes_failed == 1
    assert keys(index.prepare_store(refs_of(48))) == keys([steps[1]])  # it can be stored again


def test_known_chunks_are_not_stored_again() -> None:
    index = make()
    steps = index.prepare_store(refs_of(16))
    assert index.prepare_store(refs_of(16)) == []  # on its way
    index.complete_store(steps, set())
    assert index.prepare_store(refs_of(16)) == []
    assert index.counters.known == 2


def test_a_forgotten_chunk_cannot_come_back_before_its_last_use_has_ended() -> None:
    index = make(disk_chunks=4)
    (step,) = store(index, 16, write=False)
    assert index.remove(keys([step])) == 1
    assert index.remove(keys([step])) == 0
    assert index.prepare_store(refs_of(16)) == []
    assert index.counters.refused == 1
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=False)
    assert (len(index), index.slots_in_use, index.disk_used_bytes) == (0, 0, 0)
    assert len(index.prepare_store(refs_of(16))) == 1


def test_a_pool_smaller_than_a_request_keeps_its_front() -> None:
    index = make(3)
    store(index, 16, seed=1)
    steps = index.prepare_store(refs_of(100))
    assert keys(steps) == keys(refs_of(100)[:3])
    index.complete_store(steps, set())
    assert known_tokens(index, 100) == 48
    assert known_tokens(index, 16, seed=1) == 0
    more = index.prepare_store(refs_of(100)[3:], [ref.prefix_key for ref in refs_of(100)[:3]])
    assert more == []
    assert known_tokens(index, 100) == 48


def test_a_chunk_goes_before_the_prefix_it_hangs_on() -> None:
    """This holds even if the chain grew chunk by chunk, as in chunked prefill."""
    index = make(4)
    for end in (16, 32, 48):
        refs = refs_of(end)
        steps = index.prepare_store(refs[-1:], [ref.prefix_key for ref in refs[:-1]])
        index.complete_store(steps, set())
    store(index, 16, seed=1)
    for number, left in enumerate((32, 16, 0), start=2):
        store(index, 16, seed=number)
        assert known_tokens(index, 48) == left


def test_a_chain_loaded_from_disk_goes_from_its_end_too() -> None:
    index = make(4, disk_chunks=16)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(48))
    load(index, 48)
    store(index, 16, seed=1)
    store(index, 16, seed=2)
    first, second, third = refs_of(48)
    assert [index.in_memory(ref.prefix_key) for ref in (first, second, third)] == [True, True, False]


def test_the_least_recently_used_chain_goes_first() -> None:
    index = make(3)
    for seed in range(3):
        store(index, 16, seed)
    load(index, 16, 0)
    store(index, 16, seed=3)
    assert [known_tokens(index, 16, seed) for seed in range(4)] == [16, 0, 16, 16]
    assert index.counters.evicted_memory == 1


# Tails


def test_lookup_takes_the_longest_tail() -> None:
    index = make(8)
    for tokens in (20, 24):
        store(index, tokens)
    assert known_tokens(index, 31) == 24
    assert known_tokens(index, 23) == 20
    assert known_tokens(index, 19) == 16
    assert known_tokens(index, 24) == 24


def test_a_tail_goes_when_its_chunk_is_stored() -> None:
    index = make(8, disk_chunks=8)
    for tokens in (20, 24):
        store(index, tokens)
    store(index, 32)
    assert keys(index.take_removals()) == keys([refs_of(20)[1], refs_of(24)[1]])
    assert index.counters.superseded_tails == 2
    assert known_tokens(index, 32) == 32
    assert known_tokens(index, 24) == 24, "the chunk leads to its blocks"
    assert known_tokens(index, 20) == 20
    assert (len(index), index.disk_used_bytes) == (2, 2 * FULL_BYTES)


def test_a_tail_that_is_gone_is_not_superseded() -> None:
    index = make()
    store(index, 20)
    index.remove(keys(refs_of(20)[1:]))
    store(index, 32)
    assert (index.counters.superseded_tails, index.take_removals()) == (0, [])


@pytest.mark.parametrize("stored", [False, True])
def test_a_tail_stays_until_its_chunk_can_be_found(stored: bool) -> None:
    """The chunk's write ended before its store, which may fail."""
    index = make(8, disk_chunks=8)
    store(index, 8)
    (step,) = index.prepare_store(refs_of(16), hasher=hasher_of(16))
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert known_tokens(index, 16) == 8
    index.complete_store([step], set() if stored else keys([step]))
    assert known_tokens(index, 16) == (16 if stored else 8)
    assert index.counters.superseded_tails == stored


def test_a_chunk_that_was_removed_while_it_was_stored_replaces_no_tail() -> None:
    index = make(8)
    store(index, 8)
    (step,) = index.prepare_store(refs_of(16), hasher=hasher_of(16))
    index.remove(keys([step]))
    index.complete_store([step], set())
    assert known_tokens(index, 16) == 8
    assert index.counters.superseded_tails == 0


# Load


def test_loading_from_memory_moves_nothing() -> None:
    index = make()
    stored = store(index, 24)
    steps = index.prepare_load(index.lookup(hasher_of(24)).refs)
    assert steps == [LoadStep(step.ref, step.slot, Place.MEMORY) for step in stored]
    assert uses_of(index) == 2
    index.complete_load(steps, set(), set())
    check_invariants(index)
    assert uses_of(index) == 0


def test_loading_from_disk_promotes() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    assert known_tokens(index, 32) == 32
    assert index.slots_in_use == 0
    assert [step.source for step in load(index, 32)] == [Place.DISK, Place.DISK]
    assert [step.source for step in load(index, 32)] == [Place.MEMORY, Place.MEMORY]
    assert (index.slots_in_use, index.disk_used_bytes) == (2, 2 * FULL_BYTES)


def test_a_load_that_no_request_uses_yet_is_no_use() -> None:
    index = make(2, disk_chunks=4, cache_policy="LFU")
    prefetched, used, other = (refs_of(16, family) for family in range(3))
    index.adopt((ref, FULL_BYTES) for ref in (*prefetched, *used, *other))
    for _ in range(3):
        index.complete_load(index.prepare_load(prefetched, is_use=False), set(), set())
    for _ in range(2):
        index.complete_load(index.prepare_load(used), set(), set())
    index.complete_load(index.prepare_load(other), set(), set())
    assert [index.in_memory(ref.prefix_key) for ref in (*prefetched, *used)] == [False, True]


def test_a_second_load_waits_in_line_behind_the_first() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    refs = index.lookup(hasher_of(16)).refs
    first, second = index.prepare_load(refs), index.prepare_load(refs)
    assert [(s.slot, s.source) for s in (*first, *second)] == [(0, Place.DISK), (0, Place.MEMORY)]
    index.complete_load(first, set(), set())
    check_invariants(index)
    index.complete_load(second, set(), set())
    check_invariants(index)
    assert uses_of(index) == 0


def test_both_loads_of_a_missing_file_fail_and_it_is_announced_once() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    refs = index.lookup(hasher_of(16)).refs
    first, second = index.prepare_load(refs), index.prepare_load(refs)
    index.complete_load([*first, *second], keys(refs), keys(refs))
    assert index.take_removals() == list(refs)
    check_invariants(index)
    assert (len(index), uses_of(index), index.disk_used_bytes) == (0, 0, 0)
    assert index.counters.failed_loads == 2


def test_a_lost_chunk_is_forgotten_everywhere() -> None:
    index = make(4, disk_chunks=4)
    store(index, 48)
    steps = index.prepare_load(refs_of(48))
    index.complete_load(steps, keys(steps[1:2]), keys(steps[1:2]))
    assert index.take_removals() == [steps[1].ref]
    assert known_tokens(index, 48) == 16
    assert (len(index), index.disk_used_bytes) == (2, 2 * FULL_BYTES)


def test_prepare_load_ends_before_what_is_gone() -> None:
    index = make()
    store(index, 48)
    refs = index.lookup(hasher_of(48)).refs
    index.remove([refs[1].prefix_key])
    steps = index.prepare_load(refs)
    assert [step.ref for step in steps] == [refs[0]]
    index.complete_load(steps, set(), set())
    check_invariants(index)
    assert uses_of(index) == 0


def test_lookup_counts_the_slots_that_chunks_from_disk_need() -> None:
    index = make(3, disk_chunks=8)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(80))
    assert known_tokens(index, 80) == 48
    store(index, 16, seed=1, write=False)  # its write is in flight: that slot cannot be given away
    assert known_tokens(index, 80) == 32
    index.complete_write(refs_of(16, 1)[0].prefix_key, Place.DISK, stored=True)
    assert known_tokens(index, 80) == 48
    assert len(load(index, 80)) == 3
    assert known_tokens(index, 80) == 48  # the fourth would have to displace one of the first three


def test_prepare_load_gives_up_what_no_longer_fits() -> None:
    index = make(2, disk_chunks=8)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    refs = index.lookup(hasher_of(32)).refs
    held = store(index, 16, seed=1, write=False)
    steps = index.prepare_load(refs)
    assert [step.ref for step in steps] == [refs[0]]
    check_invariants(index)
    index.complete_load(steps, set(), set())
    index.complete_write(held[0].ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)
    assert uses_of(index) == 0


def test_lookup_for_a_caller_who_has_a_part() -> None:
    index = make(8)
    store(index, 40)
    index.remove([refs_of(40)[0].prefix_key])
    assert index.lookup(hasher_of(40)) == NO_MATCH
    assert index.lookup(hasher_of(40), 20) == Match(tuple(refs_of(40)[1:]), 40, 1)
    assert index.lookup(hasher_of(40), 36) == Match(tuple(refs_of(40)[2:]), 40, 2)
    assert index.lookup(hasher_of(40), 40) == NO_MATCH
    assert index.lookup(hasher_of(48), 44) == NO_MATCH  # the tail ends before


# Removal


@pytest.mark.parametrize("in_flight", [False, True])
def test_remove(in_flight: bool) -> None:
    index = make(4, disk_chunks=4)
    steps = store(index, 32, write=not in_flight)
    assert index.remove([*keys(steps), b"x" * 16]) == 2
    assert known_tokens(index, 32) == 0
    assert keys(index.take_removals()) == keys(steps)
    assert index.slots_in_use == (2 if in_flight else 0)
    for step in steps:
        if in_flight:
            index.complete_write(step.ref.prefix_key, Place.DISK, stored=False)
    check_invariants(index)
    assert (len(index), index.slots_in_use, index.disk_used_bytes, index.take_removals()) == (0, 0, 0, [])


def test_a_file_written_after_its_removal_is_announced_again() -> None:
    """The removal may have been carried out before the write began, as where plans are sent once a step."""
    index = make(4, disk_chunks=4)
    (step,) = index.prepare_store(refs_of(16))
    index.remove(keys([step]))
    assert index.take_removals() == [step.ref]
    index.complete_store([step], set())
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)
    assert index.take_removals() == [step.ref]
    assert len(index) == 0


def test_removing_what_is_being_loaded() -> None:
    index = make(4, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    steps = index.prepare_load(refs_of(32))
    index.remove(keys(steps))
    assert known_tokens(index, 32) == 0
    index.complete_load(steps, keys(steps[:1]), keys(steps[:1]))
    check_invariants(index)
    assert (len(index), index.slots_in_use, index.disk_used_bytes) == (0, 0, 0)


def test_clear_forgets_all_and_announces_what_was_on_disk() -> None:
    index = make(8, disk_chunks=8)
    store(index, 40)
    in_flight = index.prepare_store(refs_of(16, 1))
    load_steps = index.prepare_load(refs_of(40)[:1])
    assert index.clear() == 4
    assert keys(index.take_removals()) >= keys(refs_of(40)), "in case the disk cannot be cleared as a whole"
    assert known_tokens(index, 40) == 0
    index.complete_load(load_steps, set(), set())
    index.complete_store(in_flight, set())
    assert known_tokens(index, 16, 1) == 0
    index.complete_write(in_flight[0].ref.prefix_key, Place.DISK, stored=False)
    check_invariants(index)
    assert (len(index), index.slots_in_use, index.disk_used_bytes, uses_of(index)) == (0, 0, 0, 0)
