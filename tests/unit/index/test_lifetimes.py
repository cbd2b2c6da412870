"""Times to live of chunks on disk, and what the disk is told of them."""

from __future__ import annotations

import pytest
from support.index import FULL_BYTES, keys, known_tokens, refs_of, store, stored_bytes
from support.invariants import check_invariants

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, StoreStep
from kvstore.model.lifetime import Lifetime

(REF,) = refs_of(16)


def make(*, keeps_lifetimes: bool = True) -> ChunkIndex:
    return ChunkIndex(
        4,
        disk_capacity_bytes=8 * FULL_BYTES,
        stored_bytes=stored_bytes,
        max_writes=8,
        disk_keeps_lifetimes=keeps_lifetimes,
    )


def finish(index: ChunkIndex, steps: list[StoreStep], *, stored: bool = True) -> None:
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=stored)
    check_invariants(index)


@pytest.mark.parametrize("keeps_lifetimes", [True, False])
def test_the_rest_of_its_time_goes_to_a_disk_that_keeps_it(*, keeps_lifetimes: bool) -> None:
    index = make(keeps_lifetimes=keeps_lifetimes)
    index.advance(100)
    (step,) = index.prepare_store([REF], ttl_s=5)
    assert (step.targets, step.until_s) == ((Place.DISK,) if keeps_lifetimes else (), 105)
    finish(index, [step])
    index.advance(105)
    assert known_tokens(index, 16) == 0
    assert index.take_removals() == ([REF] if keeps_lifetimes else [])


def test_a_write_that_is_tried_again_has_what_is_left() -> None:
    index = make()
    finish(index, index.prepare_store([REF], ttl_s=5), stored=False)
    index.advance(3)
    (step,) = index.prepare_store([REF], ttl_s=1)
    assert (step.gather, step.targets, step.until_s) == (False, (Place.DISK,), 5)
    finish(index, [step])


@pytest.mark.parametrize(("ttl_s", "until_s"), [(1, None), (9, 9.0), (None, None)])
def test_longer_times_are_told_once(ttl_s: float | None, until_s: float | None) -> None:
    index = make()
    finish(index, index.prepare_store([REF], ttl_s=5))
    assert index.prepare_store([REF], ttl_s=ttl_s) == []
    assert index.take_lifetimes() == ([] if ttl_s == 1 else [Lifetime(REF, until_s)])
    assert index.take_lifetimes() == []


@pytest.mark.parametrize("stored", [True, False])
def test_what_is_told_before_a_write_has_begun_is_told_again_after_it(*, stored: bool) -> None:
    index = make()
    steps = index.prepare_store([REF], ttl_s=5)
    index.prepare_store([REF])
    told = [Lifetime(REF, None)]
    assert (index.take_lifetimes(), index.take_lifetimes()) == (told, [])
    finish(index, steps, stored=stored)
    assert (index.take_lifetimes(), index.take_lifetimes()) == (told if stored else [], [])


def test_nothing_is_told_of_what_is_gone() -> None:
    index = make()
    store(index, 16)
    finish(index, index.prepare_store(refs_of(32)[1:], ttl_s=5))
    index.prepare_store(refs_of(32)[1:], ttl_s=9)
    index.remove(keys(refs_of(32)))
    assert index.take_lifetimes() == []


def test_survivors_have_the_earliest_end_that_was_noted() -> None:
    index = make()
    refs = refs_of(48)
    index.adopt((ref, FULL_BYTES) for ref in refs)
    index.limit(Lifetime(ref, until_s) for until_s in (7.0, 5.0, 6.0) for ref in refs[:1])
    index.limit([Lifetime(refs[1], -3.0), Lifetime(refs_of(16, seed=9)[0], 1.0)])
    index.advance(0)
    assert index.take_removals() == [refs[1]]
    index.advance(5)
    assert index.take_removals() == [refs[0]]
    assert refs[2].prefix_key in index
    assert index.take_lifetimes() == []
    check_invariants(index)
