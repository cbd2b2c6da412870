"""Tests of the ends in headers and manifests of a store of objects, of sweeps, and of older engines that share it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from support.diskwork import EVEN, get, make_transfer, put
from support.object_ends import (
    END_S,
    MAGIC,
    NEW_MAGIC,
    A,
    B,
    C,
    Open,
    WatchedStore,
    at,
    drop_manifests,
    names,
    objects,
    put_until,
    seen_by_an_older_engine,
    wait_for,
)

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.lifetime import Lifetime
from kvstore.tiers.base import Transfer
from kvstore.tiers.object import catalog as cataloguing
from kvstore.tiers.object import log
from kvstore.tiers.object import sweep as sweeping
from kvstore.tiers.object.catalog import Catalog
from kvstore.tiers.object.manifest import ENDLESS, NAME_TYPE, Ends, Manifest, decode, end_s_of, name_of, ref_of
from kvstore.tiers.object.names import parse_place
from kvstore.tiers.object.sweep import Limits, SweepReport, sweep
from kvstore.tiers.object.tier import ObjectTier

FIRST, LONGER, ALWAYS, AGAIN = Ends(50, 50), Ends(99, 50), Ends(0, 50), Ends(80, 80)


def told(*ends: Ends) -> Catalog:
    """Return a catalog that was told ends of the chunk A in this order."""
    catalog = Catalog()
    for each in ends:
        listed = np.array([each] if each != ENDLESS else [], np.uint32).reshape(-1, 2)
        catalog.apply(Manifest(np.array([name_of(A)], NAME_TYPE), np.ones(1, np.uint32), ends=listed))
    return catalog


def test_the_longest_time_of_a_write_counts_in_any_order() -> None:
    """Engines tell their notes again, after others' later ones."""
    for some, expected in (((FIRST, LONGER), LONGER), ((FIRST, LONGER, ALWAYS), ALWAYS)):
        for order in itertools.permutations(some):
            assert told(*order).ends(A) == expected
    assert told(FIRST, AGAIN).ends(A) == AGAIN, "of another write the last word counts"
    assert told(LONGER, AGAIN, FIRST).ends(A) == FIRST
    assert told(FIRST, ENDLESS).ends(A) == ENDLESS
    assert told(ENDLESS, FIRST).ends(A) == FIRST


@pytest.mark.parametrize("size", [1, 100_000], ids=["few", "many"])
def test_a_manifest_without_ends_ends_them(size: int) -> None:
    catalog = told(FIRST)
    stored = np.array([name_of(A), *(number.to_bytes(18, "big") for number in range(1, size))], NAME_TYPE)
    catalog.apply(Manifest(stored, np.ones(size, np.uint32)))
    assert catalog.presence([A], 60.0) == [True]


@pytest.mark.parametrize("most", [1, 1000], ids=["merged", "changed"])
def test_no_moment_shows_a_chunk_without_its_end(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Other threads look at the catalog whenever the one that applies lets go of the lock."""
    monkeypatch.setattr(cataloguing, "_MAX_CHANGES", most)
    catalog, seen = Catalog(), list[bool | float]()

    class Watched:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(catalog, "_lock", threading.Lock())
                seen.extend(catalog.presence([A, B], 1.0))

    names_, ends = np.array([name_of(ref) for ref in (A, B)], NAME_TYPE), np.array([FIRST, AGAIN], np.uint32)
    monkeypatch.setattr(catalog, "_lock", Watched())
    catalog.apply(Manifest(names_, np.ones(2, np.uint32), ends=ends))
    assert seen[-2:] == [50, 80]
    assert True not in seen


def test_a_sweep_adopts_nothing_that_is_gone(
    open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine removes a chunk between the listing and the look at its header."""
    tier = open_tier()
    put_until(tier, A, END_S)
    put(tier, B)
    tier.close()
    drop_manifests(store, "log")
    read = store.read

    def read_later(name: str, most_bytes: int) -> bytes | None:
        place = parse_place(name)
        if place is not None and place.ref == A:
            store.delete([name])
        return read(name, most_bytes)

    monkeypatch.setattr(store, "read", read_later)
    report = sweep(store, Limits())
    assert (report.chunks, report.found_chunks) == (1, 1)
    assert open_tier().contains([A, B]) == [False, True]


@pytest.mark.parametrize("damaged", ["end", "sum"])
def test_a_damaged_end_is_a_damaged_chunk(open_tier: Open, store: WatchedStore, damaged: str) -> None:
    """No engine believes it, and its log and its sweeps go on."""
    tier = open_tier()
    put_until(tier, A, END_S)
    tier.close()
    drop_manifests(store, "log")
    (path,) = (store._root / name for name in names(store) if parse_place(name))
    image = path.read_bytes()
    digit = image.index(b'"until_s":"') + 12 + len(str(int(END_S))) * (damaged == "sum")
    path.write_bytes(image[:digit] + (b"0" if image[digit : digit + 1] != b"0" else b"1") + image[digit + 1 :])
    report = sweep(store, Limits())  # which would remove what has ended long ago
    assert (report.found_chunks, report.removed_chunks) == (1, 0)
    tier = open_tier()
    assert get(tier, A) is Outcome.CORRUPT
    assert objects(store) == {}
    put_until(tier, A, END_S)
    wait_for(open_tier(), [END_S])


def test_a_storage_that_has_lost_all_chunks_with_ends_is_swept(open_tier: Open, store: WatchedStore) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)
    tier.close()
    store.delete([name for name in names(store) if parse_place(name)])
    put(open_tier(), B)
    report = sweep(store, Limits())
    assert (report.chunks, report.lost_chunks) == (1, 1)


def test_a_sweep_does_not_undo_what_engines_tell_meanwhile(
    open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest of chunks with ends is news to them."""
    running, other = open_tier(), open_tier()
    for ref in (A, B, C):
        put_until(running, ref, END_S)
    wait_for(other, [END_S] * 3)
    delete = store.delete

    def delete_late(gone: Iterable[str]) -> None:
        if other.contains([A]) != [False]:
            other.remove([A])
            other.limit([Lifetime(B, END_S + 50)])
            wait_for(running, [False, END_S + 50, END_S])
        delete(gone)

    monkeypatch.setattr(store, "delete", delete_late)
    store.write("probe/" + "0" * 16, b"")
    monkeypatch.setattr(sweeping, "_PART_STAYS_S", -10.0)
    sweep(store, Limits())
    time.sleep(0.2)
    for tier in (running, other, open_tier()):
        assert tier.contains([A, B, C]) == [False, END_S + 50, END_S]


def test_manifests_without_ends_have_the_old_bytes() -> None:
    stored = np.array([name_of(ref) for ref in (A, B)], NAME_TYPE)
    old = Manifest(stored, np.array([1, 2], np.uint32), removed=stored[:1])
    counts = b"".join(number.to_bytes(4, "little") for number in (2, 0, 1, 0, 0))
    used_s = b"".join(number.to_bytes(4, "little") for number in (1, 2))
    body = MAGIC + counts + name_of(A) + name_of(B) + used_s + name_of(A)
    assert old.encode() == body + xxhash.xxh3_64_digest(body)
    ended = replace(old, ends=np.array([FIRST, LONGER], np.uint32), touched=stored, merged=frozenset({"0" * 21}))
    whole = ended.encode()
    assert whole.startswith(NEW_MAGIC)
    for cut in range(len(whole)):
        assert decode(whole[:cut]) is None
    found = decode(whole)
    assert found is not None
    assert found.ends.tolist() == [list(FIRST), list(LONGER)]
    assert [ref_of(name) for name in found.stored.tolist()] == [A, B]
    assert (found.used_s.tolist(), len(found.touched), len(found.removed)) == ([1, 2], 2, 1)
    assert found.merged == {"0" * 21}


def test_ends_are_never_too_late() -> None:
    assert [end_s_of(until_s) for until_s in (None, 7.0, 7.9)] == [0, 7, 7]


def test_older_engines_see_only_chunks_without_ends(
    open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They and their sweeps pass over the manifests that name the others."""
    tier = open_tier()
    put_until(tier, A, END_S)
    put(tier, B)
    put_until(tier, C, END_S)
    tier.limit([Lifetime(A, None)])
    tier.close()
    assert seen_by_an_older_engine(store) == {B}
    sweep(store, Limits())
    assert seen_by_an_older_engine(store) == {B}
    assert open_tier().contains([A, B, C]) == [True, True, END_S]
    drop_manifests(store, "base", "log")
    monkeypatch.setattr(sweeping, "MANIFESTS_STAY_S", 1000.0)
    assert sweep(store, Limits()).found_chunks == 3
    assert [name for name in names(store) if "/log/" in name]
    assert seen_by_an_older_engine(store) == {B}


@pytest.mark.parametrize("by_layers", [False, True])
@pytest.mark.parametrize(
    ("said_s", "written_s"),
    [(None, END_S), (END_S, None), (END_S + 50, END_S), (END_S, END_S + 50)],
    ids=["never", "ever", "later", "earlier"],
)
def test_a_chunk_of_another_write_is_a_miss(
    open_tier: Open, store: WatchedStore, said_s: float | None, written_s: float | None, *, by_layers: bool
) -> None:
    """The log is a hint: an older sweep adopted the chunk, or an engine told its notes again. Its header is right."""
    tier = open_tier()
    put_until(tier, A, written_s)
    tier.close()
    drop_manifests(store, "log")
    one, other = open_tier(), open_tier()
    one._log.view().store(A, b"", end_s_of(said_s))
    wait_for(other, [True if said_s is None else said_s])
    assert read(one, by_layers=by_layers) == [Outcome.MISS]
    expected = True if written_s is None else written_s
    for each in (one, other, open_tier()):
        wait_for(each, [expected])
        assert read(each, by_layers=by_layers) == [Outcome.HIT]


def test_a_chunk_that_is_removed_while_it_is_read_does_not_return(open_tier: Open, store: WatchedStore) -> None:
    """The log then says nothing of it, which differs from the header that was read."""
    tier = open_tier()
    put_until(tier, A, END_S)
    store.on_read.append(lambda: tier._log.view().catalog.discard(A))
    assert get(tier, A) is Outcome.MISS
    assert tier.contains([A]) == [False]


def read(tier: ObjectTier, *, by_layers: bool) -> list[Outcome]:
    into = [Transfer(A, tier_slot())]
    return tier.get_layers(into, range(1)) if by_layers else tier.get(into)


def tier_slot() -> np.ndarray:
    return make_transfer(A).buffer.copy()


def test_a_sweep_deletes_what_has_ended(open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: one that was limited later stays beyond the end in its header."""
    tier = open_tier()
    for ref in (A, B):
        put_until(tier, ref, END_S)
    put(tier, C)
    tier.limit([Lifetime(B, END_S + 50)])
    tier.close()
    assert replace(sweep(store, Limits()), size_bytes=0, manifests=0) == SweepReport(chunks=3)
    at(monkeypatch, END_S + 10)
    running = open_tier()
    assert sweep(store, Limits(), dry_run=True).removed_chunks == 1
    assert len(objects(store)) == 3
    report = sweep(store, Limits())
    assert (report.chunks, report.removed_chunks, report.found_chunks, report.lost_chunks) == (3, 1, 0, 0)
    assert report.removed_bytes == 4096 + EVEN.payload_bytes(A.num_blocks)
    assert objects(store) == {B: END_S, C: 0}
    for tier in (running, open_tier()):
        wait_for(tier, [False, END_S + 50, True])
        assert get(tier, B) is Outcome.HIT
    at(monkeypatch, END_S + 50)
    sweep(store, Limits())
    assert objects(store) == {C: 0}


def test_sweeps_keep_ends(open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep after sweep, and with what came later."""
    tier = open_tier()
    put_until(tier, A, END_S)
    put_until(tier, B, END_S)
    tier.limit([Lifetime(A, END_S + 50), Lifetime(B, None)])
    tier.close()
    for _ in range(3):
        sweep(store, Limits())
        assert len([name for name in names(store) if "/log/" in name]) == 1, "the one with ends"
        assert len([name for name in names(store) if "/base/" in name]) == 1
        assert open_tier().contains([A, B]) == [END_S + 50, True]
    tier = open_tier()
    tier.limit([Lifetime(A, END_S + 70)])
    put_until(tier, C, END_S)
    tier.close()
    monkeypatch.setattr(sweeping, "MANIFESTS_STAY_S", 1000.0)
    sweep(store, Limits())
    for ref, until_s in ((A, END_S + 70), (B, True), (C, END_S)):
        tier = open_tier()
        assert tier.contains([ref]) == [until_s]
        assert get(tier, ref) is Outcome.HIT
    monkeypatch.setattr(sweeping, "MANIFESTS_STAY_S", -2.0)
    sweep(store, Limits(max_bytes=0))
    assert objects(store) == {}
    assert open_tier().contains([A, B, C]) == [False] * 3


def test_found_chunks_keep_their_ends(open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine was killed before it wrote its manifest: headers tell."""
    tier = open_tier()
    put_until(tier, A, END_S)
    put(tier, B)
    put_until(tier, C, END_S + 1000)
    tier.close()
    drop_manifests(store, "log")
    running = open_tier()
    assert running.contains([A, B, C]) == [False] * 3
    at(monkeypatch, END_S)
    report = sweep(store, Limits())
    assert (report.chunks, report.found_chunks, report.removed_chunks) == (3, 3, 1)
    wait_for(running, [False, True, END_S + 1000])
    for tier in (running, open_tier()):
        assert tier.contains([A, B, C]) == [False, True, END_S + 1000]
        assert [get(tier, ref) for ref in (A, B, C)] == [Outcome.MISS, Outcome.HIT, Outcome.HIT]
    assert objects(store).keys() == {B, C}


def test_a_lost_limit_ends_a_chunk_early(open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its manifest, a chunk ends as its header says."""
    tier = open_tier()
    put_until(tier, A, END_S)
    tier.limit([Lifetime(A, None)])
    tier.close()
    drop_manifests(store, "log")
    at(monkeypatch, END_S)
    assert sweep(store, Limits()).removed_chunks == 1
    assert open_tier().contains([A]) == [False]


@pytest.mark.parametrize(
    ("one_s", "other_s"),
    [(END_S, END_S + 5), (END_S + 5, END_S), (None, END_S), (END_S, None)],
    ids=["later", "earlier", "an end", "no end"],  # without times, or processes would collect other tests
)
def test_two_engines_store_a_chunk_at_once(
    open_tier: Open,
    store: WatchedStore,
    monkeypatch: pytest.MonkeyPatch,
    one_s: float | None,
    other_s: float | None,
) -> None:
    """The last object counts, whatever the last manifest says."""
    with monkeypatch.context() as patch:
        patch.setattr(log, "EVERY_S", 1000.0)  # so that they do not hear of each other
        one, other = open_tier(), open_tier()
        for tier, until_s in ((one, one_s), (other, other_s)):
            tier.check()
            put_until(tier, A, until_s)
        other.close()
        one.close()
    assert objects(store) == {A: end_s_of(other_s)}
    running = open_tier()
    get(running, A)
    expected = True if other_s is None else other_s
    wait_for(running, [expected])
    assert get(running, A) is Outcome.HIT
    running.close()
    sweep(store, Limits())
    assert open_tier().contains([A]) == [expected]


def test_a_trail_is_kept_with_an_end(open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the time becomes longer before the manifest is written, and through a sweep; not beyond its chunk."""
    trail = b"".join(bytes([number]) * 16 for number in range(1, 9))
    ref = ChunkRef(trail[-16:], 8)
    tier = open_tier()
    monkeypatch.setattr(log, "EVERY_S", 1000.0)
    tier.check()
    assert tier.put([make_transfer(ref)._replace(trail=trail, until_s=END_S)]) == [Outcome.STORED]
    tier.limit([Lifetime(ref, END_S + 50)])
    put(tier, B)
    tier.close()
    assert open_tier().nearest([trail[:32]]) == [(trail,)]
    assert seen_by_an_older_engine(store) == {B}
    sweep(store, Limits())
    assert seen_by_an_older_engine(store) == {B}
    tier = open_tier()
    assert tier.nearest([trail[:32]]) == [(trail,)]
    assert tier.contains([ref]) == [END_S + 50]
    at(monkeypatch, END_S + 50)
    assert tier.nearest([trail[:32]]) == [()]
    sweep(store, Limits())
    assert open_tier().nearest([trail[:32]]) == [()]


def test_chunks_that_ended_hide_no_others(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be more of them than a question is answered with."""
    tier, stem = open_tier(), bytes([1]) * 16
    trails = [stem + b"".join(bytes([number, last]) * 8 for last in range(1, 4)) for number in range(2, 14)]
    for number, trail in enumerate(trails):
        until_s = END_S if number else END_S + 50
        transfer = make_transfer(ChunkRef(trail[-16:], 4))._replace(trail=trail, until_s=until_s)
        assert tier.put([transfer]) == [Outcome.STORED]
    at(monkeypatch, END_S)
    assert tier.nearest([stem + bytes(16)]) == [(trails[0],)]


def test_a_limit_of_the_storage_removes_chunks_with_ends(open_tier: Open, store: WatchedStore) -> None:
    tier, running = open_tier(), open_tier()
    put_until(tier, A, END_S)
    put_until(tier, C, END_S)
    wait_for(running, [END_S, False, END_S])
    tier.close()
    report = sweep(store, Limits(max_bytes=4096 + EVEN.payload_bytes(8)))
    assert (report.removed_chunks, report.garbage_objects) == (1, 0)
    assert len(objects(store)) == 1
    wait_for(running, [ref in objects(store) and END_S for ref in (A, B, C)])
