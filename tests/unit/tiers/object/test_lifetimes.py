"""Tests of times to live in object stores: chunks are read until their ends, by every engine."""

from __future__ import annotations

import math
import time
from functools import partial

import pytest
from support.diskwork import get, make_ref, make_slot, make_transfer, put
from support.object_ends import (
    END_S,
    A,
    B,
    C,
    Open,
    WatchedStore,
    at,
    names,
    objects,
    put_until,
    wait_for,
)

from kvstore.model.chunks import Outcome
from kvstore.model.lifetime import Lifetime
from kvstore.tiers.base import Transfer
from kvstore.tiers.object import journal, log
from kvstore.tiers.object.inventory import ObjectInventory
from kvstore.tiers.object.names import parse_place


def test_ends_are_told(open_tier: Open, store: WatchedStore) -> None:
    """Exactly, to the engine that stored the chunk, to others, and after a restart; bytes are read as ever."""
    one, other = open_tier(), open_tier()
    assert one.keeps_lifetimes
    put_until(one, A, END_S)
    put(one, B)
    assert objects(store) == {A: END_S, B: 0}
    wait_for(other, [END_S, True, False])
    one.close()
    for tier in (other, open_tier()):
        assert tier.contains([A, B, C]) == [END_S, True, False]
        assert [get(tier, ref) for ref in (A, B)] == [Outcome.HIT] * 2
        assert tier.get_layers([Transfer(A, make_slot())], range(1, 3)) == [Outcome.HIT]


@pytest.mark.parametrize("ahead_s", [0.0, 1e6])
def test_what_has_ended_is_not_there(
    open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Not for a moment after its end, for no engine, though its object is."""
    one, other = open_tier(), open_tier()
    put_until(one, A, END_S)
    put_until(one, B, END_S + 1e7)
    wait_for(other, [END_S, END_S + 1e7])
    at(monkeypatch, END_S + ahead_s)
    for tier in (one, other, open_tier()):
        assert tier.contains([A, B]) == [False, END_S + 1e7]
        assert [get(tier, ref) for ref in (A, B)] == [Outcome.MISS, Outcome.HIT]
        assert tier.get_layers([Transfer(A, make_slot())], range(1)) == [Outcome.MISS]
    assert objects(store) == {A: END_S, B: END_S + 1e7}


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_read_that_lasts_beyond_the_end_is_a_miss(
    open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch, *, by_layers: bool
) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)
    into = Transfer(A, make_slot())
    with monkeypatch.context() as patch:
        store.on_read.append(partial(at, patch, END_S + 0.01))
        found = tier.get_layers([into], range(1)) if by_layers else tier.get([into])
        assert found == [Outcome.MISS]
        assert tier.counters.hits == 0


def test_a_time_becomes_longer(open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without end, also by an engine that has not stored the chunk, and over restarts; never shorter."""
    one, other = open_tier(), open_tier()
    for ref in (A, B):
        put_until(one, ref, END_S)
    put(one, C)
    wait_for(other, [END_S, END_S, True])
    before = objects(store)
    changes = [Lifetime(A, END_S + 50), Lifetime(B, None), Lifetime(C, END_S), Lifetime(make_ref(4), None)]
    other.limit(changes)
    one.limit([Lifetime(A, END_S + 1)])
    wait_for(one, [END_S + 50, True, True])
    one.limit([Lifetime(A, END_S + 1), Lifetime(B, END_S)])
    assert one.contains([A, B, C]) == [END_S + 50, True, True]
    one.close()
    other.close()
    at(monkeypatch, END_S + 40)
    tier = open_tier()
    assert tier.contains([A, B, C, make_ref(4)]) == [END_S + 50, True, True, False]
    assert [get(tier, ref) for ref in (A, B, C)] == [Outcome.HIT] * 3
    assert objects(store) == before
    at(monkeypatch, END_S + 50)
    assert tier.contains([A, B, C]) == [False, True, True]
    assert get(tier, A) is Outcome.MISS


def test_a_limit_sends_no_request(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "EVERY_S", 1000.0)
    tier = open_tier()
    put_until(tier, A, END_S)
    with monkeypatch.context() as patch:
        for of in (tier, tier._log):
            patch.setattr(of, "_store", None)
        tier.limit([Lifetime(A, END_S + 50)])
    assert tier.contains([A]) == [END_S + 50]


def test_what_ended_stays_ended(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer time that comes too late gives none."""
    tier = open_tier()
    put_until(tier, A, END_S)
    at(monkeypatch, END_S)
    tier.limit([Lifetime(A, None)])
    assert tier.contains([A]) == [False]


@pytest.mark.parametrize("restarts", [False, True])
def test_the_last_put_decides(open_tier: Open, store: WatchedStore, *, restarts: bool) -> None:
    tier = open_tier()
    for ref, until_s in ((A, END_S), (B, END_S), (C, None), (A, None), (B, END_S - 50), (C, END_S)):
        put_until(tier, ref, until_s)
        if restarts:
            tier.close()
            tier = open_tier()
    assert tier.contains([A, B, C]) == [True, END_S - 50, END_S]
    assert objects(store) == {A: 0, B: END_S - 50, C: END_S}
    assert [get(tier, ref) for ref in (A, B, C)] == [Outcome.HIT] * 3


def test_removed_chunks_leave_no_object(open_tier: Open, store: WatchedStore) -> None:
    one, other = open_tier(), open_tier()
    put_until(one, A, END_S)
    put_until(one, B, END_S)
    wait_for(other, [END_S] * 2)
    one.limit([Lifetime(A, END_S + 50)])
    other.remove([A])
    assert objects(store) == {B: END_S}
    wait_for(one, [False, END_S])
    put_until(one, A, END_S + 7)
    wait_for(other, [END_S + 7, END_S])
    other.clear()
    assert objects(store) == {}
    wait_for(one, [False, False])


def test_a_removal_during_a_put_removes_what_it_replaces(open_tier: Open, store: WatchedStore) -> None:
    """Or a sweep would find the older object."""
    tier = open_tier()
    put_until(tier, A, END_S)
    inner = tier._store.put

    def put_and_remove(name: str, body: object) -> None:
        inner(name, body)  # type: ignore[arg-type]
        if name.endswith(".safetensors"):
            tier.remove([A])

    tier._store.put = put_and_remove  # type: ignore[method-assign]
    assert tier.put([make_transfer(A)._replace(until_s=END_S + 50)]) == [Outcome.FAILED]
    assert objects(store) == {}


def test_a_damaged_object_is_removed(open_tier: Open, store: WatchedStore) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)
    (name,) = (name for name in names(store) if parse_place(name))
    path = store._root / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert get(tier, A) is Outcome.CORRUPT
    assert objects(store) == {}


@pytest.mark.parametrize("until_s", [math.inf, 1e300, 2.0**32 - 0.5, 2.0**32 + 5])
def test_ends_beyond_all_calendars(open_tier: Open, store: WatchedStore, until_s: float) -> None:
    """Chunks have the last end that fits."""
    tier = open_tier()
    put_until(tier, A, until_s)
    tier.close()
    assert objects(store) == {A: 2**32 - 1}
    tier = open_tier()
    assert tier.contains([A]) == [2**32 - 1.0]
    assert get(tier, A) is Outcome.HIT


@pytest.mark.parametrize("until_s", [-5.0, 0.0, 1.5, 1e9, math.nan])
def test_ends_in_the_past(open_tier: Open, until_s: float) -> None:
    tier = open_tier()
    put_until(tier, A, until_s)
    assert tier.contains([A]) == [False]
    assert get(tier, A) is Outcome.MISS


def test_manifests_that_become_one_keep_ends(
    open_tier: Open, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a sweep; and an engine that tells its notes again does not undo what another has made longer."""
    monkeypatch.setattr(journal, "MAX_SMALL", 3)
    one, other = open_tier(), open_tier()
    put_until(one, A, END_S)
    put_until(one, B, END_S)
    wait_for(other, [END_S, END_S])
    other.limit([Lifetime(A, END_S + 50)])
    wait_for(one, [END_S + 50, END_S])
    for number in range(10, 20):
        put_until(one, make_ref(number), END_S + number)
        wait_for(other, [END_S + number], [make_ref(number)])
    for tier in (one, other, open_tier()):
        assert tier.contains([A, B, make_ref(12)]) == [END_S + 50, END_S, END_S + 12]
    assert len([name for name in names(store) if "/log/" in name]) <= 8


def test_use_changes_no_end(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = open_tier(), open_tier()
    put_until(one, A, END_S)
    wait_for(other, [END_S])
    used_s = time.time() + log.TOUCH_EVERY_S + 100
    at(monkeypatch, used_s)
    assert get(other, A) is Outcome.HIT
    other.close()
    fresh = open_tier()
    noted_s = fresh._log.view().catalog.used_s(A)
    assert noted_s is not None
    assert noted_s >= int(used_s)
    for tier in (one, fresh):
        assert tier.contains([A]) == [END_S]


def test_tools_find_the_object(open_tier: Open, store: WatchedStore) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)
    put(tier, B)
    inventory = ObjectInventory(f"file://{store._root}", {})
    places = inventory.places()
    assert {place.ref for place in places} == {A, B}
    assert [inventory.check(place) for place in places] == [None, None]
    assert all(inventory.facts(place) for place in places)
    inventory.remove(places)
    assert objects(store) == {}
    inventory.close()
