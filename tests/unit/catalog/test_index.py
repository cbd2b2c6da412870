"""The index: every transition of a chunk, seen from outside. ``test_index_machine`` does them in random orders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.checks import check_index

from kvstore.catalog.index import ChunkIndex
from kvstore.catalog.plans import NO_MATCH, Match, Place, StoreStep
from kvstore.catalog.remote_view import RemoteView
from kvstore.chunks import ChunkRef
from kvstore.keys import PrefixHasher
from kvstore.requests import chunk_refs, superseded_tails

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.catalog.plans import LoadStep

BLOCK, CHUNK = 4, 16
FULL_BYTES = 100


def stored_bytes(num_blocks: int) -> int:
    return 25 * num_blocks


def hasher_of(num_tokens: int, seed: int = 0) -> PrefixHasher:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(range(seed * 1000, seed * 1000 + num_tokens))
    return hasher


def refs_of(num_tokens: int, seed: int = 0) -> list[ChunkRef]:
    return chunk_refs(hasher_of(num_tokens, seed), CHUNK // BLOCK, with_tail=True)


def keys(items: Iterable[ChunkRef | StoreStep | LoadStep]) -> set[bytes]:
    return {item.prefix_key if isinstance(item, ChunkRef) else item.ref.prefix_key for item in items}


def make(num_slots: int = 4, *, disk_chunks: int = 0, keep: bool = True, max_writes: int | None = 8) -> ChunkIndex:
    return ChunkIndex(
        num_slots,
        keep_in_memory=keep,
        disk_capacity_bytes=disk_chunks * FULL_BYTES,
        stored_bytes=stored_bytes if disk_chunks else None,
        max_writes=max_writes,
    )


def store(index: ChunkIndex, num_tokens: int, seed: int = 0, *, write: bool = True) -> list[StoreStep]:
    """Store a sequence with success, its writes included."""
    steps = index.prepare_store(refs_of(num_tokens, seed))
    index.complete_store(steps, set())
    for step in steps:
        if bool(step.targets) and write:
            index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_index(index)
    return steps


def known_tokens(index: ChunkIndex, num_tokens: int, seed: int = 0) -> int:
    check_index(index)
    return index.lookup(hasher_of(num_tokens, seed)).num_tokens


def load(index: ChunkIndex, num_tokens: int, seed: int = 0) -> list[LoadStep]:
    steps = index.prepare_load(index.lookup(hasher_of(num_tokens, seed)).refs)
    index.complete_load(steps, set(), set())
    check_index(index)
    return steps


def supersede(index: ChunkIndex, hasher: PrefixHasher, steps: list[StoreStep]) -> None:
    for key, tails in superseded_tails(hasher, keys(steps)).items():
        index.supersede(key, tails)
    check_index(index)


# Store


def test_a_chunk_is_found_only_after_its_store_is_complete() -> None:
    index = make()
    assert index.lookup(hasher_of(40)) == NO_MATCH
    steps = index.prepare_store(refs_of(40))
    assert [step.ref.num_blocks for step in steps] == [4, 4, 2]
    assert len({step.slot for step in steps}) == 3
    assert not any(bool(step.targets) for step in steps)
    assert (known_tokens(index, 40), index.uses, index.slots_in_use) == (0, 3, 3)
    index.complete_store(steps, set())
    assert (known_tokens(index, 40), index.uses, index.slots_in_use) == (40, 0, 3)
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
    check_index(index)
    assert (len(index), index.uses, index.disk_used_bytes) == (2, 0, 2 * FULL_BYTES)
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
    """Also where the chain grew chunk by chunk, as it does in chunked prefill."""
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
    steps = store(index, 32)
    supersede(index, hasher_of(32), steps)
    assert keys(index.take_removals()) == keys([refs_of(20)[1], refs_of(24)[1]])
    assert index.counters.superseded_tails == 2
    assert known_tokens(index, 32) == 32
    assert known_tokens(index, 24) == 16  # less than before: a tail is only an end of a sequence
    assert (len(index), index.disk_used_bytes) == (2, 2 * FULL_BYTES)


def test_superseding_what_is_unknown_or_gone_does_nothing() -> None:
    index = make()
    index.supersede(b"x" * 16, [b"y" * 16])
    (step,) = store(index, 16)
    index.supersede(step.ref.prefix_key, [b"y" * 16])
    assert (index.counters.superseded_tails, index.take_removals()) == (0, [])


# Load


def test_loading_from_memory_moves_nothing() -> None:
    index = make()
    stored = store(index, 24)
    steps = index.prepare_load(index.lookup(hasher_of(24)).refs)
    assert steps == [(step.ref, step.slot, Place.MEMORY) for step in stored]
    assert index.uses == 2
    index.complete_load(steps, set(), set())
    check_index(index)
    assert index.uses == 0


def test_loading_from_disk_promotes() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    assert known_tokens(index, 32) == 32
    assert index.slots_in_use == 0
    assert [step.source for step in load(index, 32)] == [Place.DISK, Place.DISK]
    assert [step.source for step in load(index, 32)] == [Place.MEMORY, Place.MEMORY]
    assert (index.slots_in_use, index.disk_used_bytes) == (2, 2 * FULL_BYTES)


def test_a_second_load_waits_in_line_behind_the_first() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    refs = index.lookup(hasher_of(16)).refs
    first, second = index.prepare_load(refs), index.prepare_load(refs)
    assert [(s.slot, s.source) for s in (*first, *second)] == [(0, Place.DISK), (0, Place.MEMORY)]
    index.complete_load(first, set(), set())
    check_index(index)
    index.complete_load(second, set(), set())
    check_index(index)
    assert index.uses == 0


def test_both_loads_of_a_missing_file_fail_and_it_is_announced_once() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    refs = index.lookup(hasher_of(16)).refs
    first, second = index.prepare_load(refs), index.prepare_load(refs)
    index.complete_load([*first, *second], keys(refs), keys(refs))
    assert index.take_removals() == list(refs)
    check_index(index)
    assert (len(index), index.uses, index.disk_used_bytes) == (0, 0, 0)
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
    check_index(index)
    assert index.uses == 0


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
    check_index(index)
    index.complete_load(steps, set(), set())
    index.complete_write(held[0].ref.prefix_key, Place.DISK, stored=True)
    check_index(index)
    assert index.uses == 0


def test_lookup_for_a_caller_who_has_a_part() -> None:
    index = make(8)
    store(index, 40)
    index.remove([refs_of(40)[0].prefix_key])
    assert index.lookup(hasher_of(40)) == NO_MATCH
    assert index.lookup(hasher_of(40), 20) == Match(tuple(refs_of(40)[1:]), 40, 1)
    assert index.lookup(hasher_of(40), 36) == Match(tuple(refs_of(40)[2:]), 40, 2)
    assert index.lookup(hasher_of(40), 40) == NO_MATCH
    assert index.lookup(hasher_of(48), 44) == NO_MATCH  # the tail ends before


# Disk


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
    assert index.uses == 0


def test_the_number_of_writes_is_bounded() -> None:
    index = make(8, disk_chunks=8, max_writes=2)
    steps = index.prepare_store(refs_of(64))
    assert [bool(step.targets) for step in steps] == [True, True, False, False]
    assert index.counters.writes_dropped == 2
    check_index(index)


def test_a_chunk_larger_than_the_disk_is_only_kept_in_memory() -> None:
    index = ChunkIndex(2, disk_capacity_bytes=FULL_BYTES - 1, stored_bytes=stored_bytes)
    steps = index.prepare_store(refs_of(24))
    assert [bool(step.targets) for step in steps] == [False, True]  # the tail is smaller
    check_index(index)


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
    check_index(index)
    assert index.uses == 0


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
    check_index(index)
    index.complete_store(steps, set())
    index.complete_write(steps[0].ref.prefix_key, Place.DISK, stored=False)
    check_index(index)
    assert (len(index), index.slots_in_use) == (0, 0)


def test_adopting_without_a_disk_is_nothing() -> None:
    index = make()
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    assert len(index) == 0


def test_survivors_go_in_the_order_in_which_they_came() -> None:
    index = make(2, disk_chunks=3)
    index.adopt((refs_of(16, seed)[0], FULL_BYTES) for seed in range(3))
    store(index, 16, seed=3)
    assert index.take_removals() == refs_of(16, 0)


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
    check_index(index)
    assert (len(index), index.slots_in_use, index.disk_used_bytes, index.take_removals()) == (0, 0, 0, [])


def test_a_file_written_after_its_removal_is_announced_again() -> None:
    """The removal may have been carried out before the write began, as where plans travel once a step."""
    index = make(4, disk_chunks=4)
    (step,) = index.prepare_store(refs_of(16))
    index.remove(keys([step]))
    assert index.take_removals() == [step.ref]
    index.complete_store([step], set())
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_index(index)
    assert index.take_removals() == [step.ref]
    assert len(index) == 0


def test_removing_what_is_being_loaded() -> None:
    index = make(4, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    steps = index.prepare_load(refs_of(32))
    index.remove(keys(steps))
    assert known_tokens(index, 32) == 0
    index.complete_load(steps, keys(steps[:1]), keys(steps[:1]))
    check_index(index)
    assert (len(index), index.slots_in_use, index.disk_used_bytes) == (0, 0, 0)


def test_clear_forgets_all_and_announces_nothing() -> None:
    index = make(8, disk_chunks=8)
    store(index, 40)
    in_flight = index.prepare_store(refs_of(16, 1))
    load_steps = index.prepare_load(refs_of(40)[:1])
    assert index.clear() == 4
    assert index.take_removals() == []
    assert known_tokens(index, 40) == 0
    index.complete_load(load_steps, set(), set())
    index.complete_store(in_flight, set())
    assert known_tokens(index, 16, 1) == 0
    index.complete_write(in_flight[0].ref.prefix_key, Place.DISK, stored=False)
    check_index(index)
    assert (len(index), index.slots_in_use, index.disk_used_bytes, index.uses) == (0, 0, 0, 0)


# A disk that does not answer


def test_what_did_not_arrive_is_not_lost() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(32))
    steps = index.prepare_load(refs_of(32))
    index.complete_load(steps, keys(steps), set())
    assert (known_tokens(index, 32), index.slots_in_use, index.uses) == (32, 0, 0)
    assert (index.take_removals(), index.counters.failed_loads, index.counters.lost_chunks) == ([], 2, 0)


def test_a_load_in_line_behind_one_that_failed_loses_nothing_either() -> None:
    index = make(2, disk_chunks=4)
    index.adopt((ref, FULL_BYTES) for ref in refs_of(16))
    first, second = index.prepare_load(refs_of(16)), index.prepare_load(refs_of(16))
    index.complete_load([*first, *second], keys(first), set())
    assert (known_tokens(index, 16), index.counters.lost_chunks, index.uses) == (16, 0, 0)


def test_a_slot_without_its_chunk_is_forgotten() -> None:
    index = make(4, disk_chunks=4)
    store(index, 32)
    steps = index.prepare_load(refs_of(32))
    index.complete_load(steps, keys(steps[1:]), set())
    assert (known_tokens(index, 32), index.counters.lost_chunks) == (16, 1)
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
    index.set_disk_answers(answers=False)
    assert known_tokens(index, 32) == 16
    assert len(index.prepare_store(refs_of(16, 1))) == 1  # writes go on: one of them will be the first to succeed
    index.set_disk_answers(answers=True)
    assert known_tokens(index, 32) == 32


# Writes that were dropped


def test_a_write_that_was_dropped_is_planned_again() -> None:
    index = make(4, disk_chunks=4, max_writes=1)
    first, second = store(index, 32)
    assert (bool(first.targets), bool(second.targets)) == (True, False)
    (step,) = index.prepare_store(refs_of(32))
    assert step == StoreStep(second.ref, second.slot, (Place.DISK,), gather=False)
    assert index.prepare_store(refs_of(32)) == []  # on its way
    index.complete_store([step], keys([step]))  # nothing was copied: the chunk is what it was
    assert known_tokens(index, 32) == 32
    index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_index(index)
    assert (index.disk_used_bytes, index.uses, index.counters.writes_retried) == (2 * FULL_BYTES, 0, 1)
    assert index.prepare_store(refs_of(32)) == []


def test_what_a_codec_made_smaller_leaves_room() -> None:
    index = make(8, disk_chunks=2)
    steps = store(index, 32, write=False)
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=True, size_bytes=FULL_BYTES // 2)
    assert index.disk_used_bytes == FULL_BYTES
    store(index, 16, seed=1)
    check_index(index)
    assert index.counters.evicted_disk == 0
    assert index.disk_used_bytes == 2 * FULL_BYTES


# Tails and the disk


@pytest.mark.parametrize("stored", [False, True])
def test_a_tail_on_disk_waits_for_its_chunk(stored: bool) -> None:
    index = make(8, disk_chunks=8)
    store(index, 20)
    steps = store(index, 32, write=False)
    supersede(index, hasher_of(32), steps)
    assert (index.counters.superseded_tails, index.take_removals()) == (0, [])
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=stored)
    check_index(index)
    assert index.counters.superseded_tails == stored
    assert index.take_removals() == refs_of(20)[1:] * stored


def test_a_leased_tail_is_not_superseded() -> None:
    index = make(8)
    store(index, 20)
    assert index.lease("one", refs_of(20), 10) == 2
    supersede(index, hasher_of(32), store(index, 32))
    assert known_tokens(index, 20) == 20


# Leases and time


def test_leases_hold_at_most_half_of_the_slots() -> None:
    index = make(4)
    store(index, 64)
    assert index.lease("one", refs_of(64), 10) == 2
    assert index.lease("two", refs_of(64), 10) == 2  # the same chunks count once
    assert index.lease("three", refs_of(64)[2:], 10) == 0
    assert (index.leases, index.uses) == (2, 4)
    index.release("one")
    index.release("two")
    assert index.lease("one", refs_of(64), 10) == 2
    assert index.lease("one", refs_of(64)[2:], 10) == 2  # the new lease takes the old one's place
    check_index(index)
    index.advance(10)
    assert (index.leases, index.uses) == (0, 0)
    check_index(index)


def test_a_leased_chunk_stays_in_its_tier() -> None:
    index = make(2, disk_chunks=2)
    index.adopt((ref, FULL_BYTES) for ref in [*refs_of(16), *refs_of(16, 1)])
    index.lease("one", refs_of(16), 10)
    store(index, 16, seed=2)
    assert index.take_removals() == refs_of(16, 1)
    assert known_tokens(index, 16) == 16


def test_a_forgotten_chunk_is_no_longer_leased() -> None:
    """Or it could not come back before the lease ends, which a pin never does."""
    index = make(4, disk_chunks=4)
    store(index, 32)
    assert index.lease("one", refs_of(32), float("inf")) == 2
    steps = index.prepare_load(refs_of(32))
    index.complete_load(steps, keys(steps[:1]), keys(steps[:1]))
    check_index(index)
    assert (index.leases, index.uses) == (1, 1)
    assert keys(store(index, 32)) == keys(steps[:1])
    assert index.clear() == 2
    check_index(index)
    assert (index.leases, index.uses, index.slots_in_use) == (0, 0, 0)


def test_a_time_to_live_ends_also_in_use() -> None:
    index = make(4, disk_chunks=4)
    index.advance(100)
    steps = index.prepare_store(refs_of(32), ttl_s=5)
    assert not any(bool(step.targets) for step in steps)
    index.complete_store(steps, set())
    loads = index.prepare_load(refs_of(32)[:1])
    index.advance(104)
    index.advance(50)  # a clock does not go back
    assert known_tokens(index, 32) == 32
    index.advance(105)
    assert known_tokens(index, 32) == 0
    assert (index.counters.expired, index.slots_in_use) == (2, 1)
    index.complete_load(loads, set(), set())
    check_index(index)
    assert index.slots_in_use == 0


def test_a_time_to_live_is_not_inherited() -> None:
    index = make(4)
    index.complete_store(index.prepare_store(refs_of(16), ttl_s=5), set())
    index.remove(keys(refs_of(16)))
    store(index, 16)
    index.advance(5)
    assert (known_tokens(index, 16), index.counters.expired) == (16, 0)


def single(number: int) -> ChunkRef:
    return ChunkRef(number.to_bytes(16, "little"), CHUNK // BLOCK)


def test_times_to_live_take_memory_only_while_their_chunks_are_there() -> None:
    """A day of stores in a small pool, each with a time that ends long after its chunk has gone."""
    index = make(16)
    most = 0
    for number in range(100_000):
        index.complete_store(index.prepare_store([single(number)], ttl_s=86_400), set())
        most = max(most, index._expiries.num_entries)
    assert len(index) == 16
    assert most < 200
    index.advance(86_400)
    assert (len(index), index.counters.expired) == (0, 16)
    check_index(index)


def test_a_time_to_live_that_is_extended_again_and_again() -> None:
    index = make(4)
    for second in range(1, 10_000):
        index.advance(second)
        index.complete_store(index.prepare_store(refs_of(16), ttl_s=60), set())
    assert index._expiries.num_entries < 200
    check_index(index)
    index.complete_store(index.prepare_store(refs_of(16)), set())  # for good now
    index.advance(20_000)
    assert (known_tokens(index, 16), index.counters.expired) == (16, 0)


def test_leases_that_share_chunks_have_a_bound() -> None:
    index = make(16)
    shared = [single(number) for number in range(8)]
    index.complete_store(index.prepare_store(shared), set())
    held = [index.lease(f"lease {number}", shared, float("inf")) for number in range(50_000)]
    assert held[:32] == [8] * 32  # 16 holds for each slot
    assert not any(held[32:])
    assert index.leases == 32
    check_index(index)
    assert index.lease("lease 0", shared, float("inf")) == 8, "one that is renewed has its room"
    for view in index.lease_views():
        index.release(view.name)
    assert (index.leases, index.uses) == (0, 0)


def test_the_time_is_told_without_a_look_at_every_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    index = make(4096)
    refs = [single(number) for number in range(2048)]
    index.complete_store(index.prepare_store(refs), set())
    for number, ref in enumerate(refs):
        index.lease(f"lease {number}", [ref], 1 + number)
    released = []
    withdraw = index._leases.withdraw

    def noted(name: str) -> list[bytes]:
        released.append(name)
        return withdraw(name)

    monkeypatch.setattr(index._leases, "withdraw", noted)
    monkeypatch.setattr(index._leases, "_leases", NoWalk(index._leases._leases))
    index.advance(0.5)
    assert released == []
    index.advance(3)
    assert released == ["lease 0", "lease 1", "lease 2"]


class NoWalk(dict[str, Any]):
    """A mapping that may be asked for names only."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all leases are looked at")

    def items(self) -> Any:
        raise AssertionError("all leases are looked at")


@pytest.mark.parametrize("disk_answers", [True, False])
def test_what_could_not_be_read_is_stored_again(*, disk_answers: bool) -> None:
    """Computed again because the disk failed, it takes its old self's place: in memory, and by a new write."""
    index = make(2, disk_chunks=4)
    store(index, CHUNK)
    store(index, 2 * CHUNK, seed=1)  # takes both slots: the first chunk is only on disk now
    index.set_disk_answers(answers=disk_answers)
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
    check_index(index)


def test_a_chunk_with_a_time_to_live_does_not_supersede_a_tail_for_good() -> None:
    index = make()
    store(index, 8)  # a tail of two blocks, and nothing says for how long
    steps = index.prepare_store(refs_of(16), ttl_s=5)
    index.complete_store(steps, set())
    supersede(index, hasher_of(16), steps)
    assert known_tokens(index, 16) == 16
    index.advance(6)
    assert known_tokens(index, 16) == 8, "the tail is still there"


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
