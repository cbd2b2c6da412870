"""Events that the index tells of its chunks: each way in which one comes, goes or is refused, with its cause."""

from __future__ import annotations

from typing import Any

from support.index import FULL_BYTES, hasher_of, refs_of, stored_bytes

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, StoreStep, TierState
from kvstore.index.remote_view import RemoteView
from kvstore.model.history import ChunkEvent, Fate


class Told:
    """An index, and what it has told."""

    def __init__(self, num_slots: int = 4, disk_chunks: int = 0, **how: Any) -> None:
        self.events: list[ChunkEvent] = []
        self.index = ChunkIndex(
            num_slots,
            disk_capacity_bytes=disk_chunks * FULL_BYTES,
            stored_bytes=stored_bytes if disk_chunks else None,
            note_event=self.events.append,
            **how,
        )

    def plan(self, num_tokens: int, seed: int = 0, **how: Any) -> list[StoreStep]:
        return self.index.prepare_store(refs_of(num_tokens, seed), hasher=hasher_of(num_tokens, seed), **how)

    def store(self, num_tokens: int, seed: int = 0, **how: Any) -> list[StoreStep]:
        """Store a sequence in memory, and leave its writes under way."""
        steps = self.plan(num_tokens, seed, **how)
        self.index.complete_store(steps, set())
        return steps

    def take(self) -> list[tuple[str, ...]]:
        """Return the kinds, places and causes since the last call."""
        events, self.events[:] = list(self.events), []
        return [tuple(filter(None, (event.fate.value, event.place, event.cause.value))) for event in events]


def test_a_chunk_that_makes_room_tells_for_which() -> None:
    told = Told(1, cache_policy="LRU")
    (first,) = told.store(16)
    (second,) = told.store(16, 1)
    assert told.events == [
        ChunkEvent(Fate.STORED, first.ref.prefix_key, first.trail[:16], "memory"),
        ChunkEvent(Fate.EVICTED, first.ref.prefix_key, first.trail[:16], "memory", newcomer=second.ref.prefix_key),
        ChunkEvent(Fate.STORED, second.ref.prefix_key, second.trail[:16], "memory"),
    ]


def test_what_memory_refuses() -> None:
    told = Told(1)
    told.plan(16)
    assert told.plan(16, 1) == []
    assert told.take() == [("refused", "memory", "in_use")]
    told = Told(2)
    told.store(48)  # its own front is in use
    assert told.take() == [("refused", "memory", "in_use"), ("stored", "memory"), ("stored", "memory")]
    told = Told(1, cache_policy="LFU")
    told.store(16)
    for _ in range(3):
        told.index.complete_load(told.index.prepare_load(told.index.lookup(hasher_of(16)).refs), set(), set())
    told.take()
    assert told.plan(16, 1) == []
    assert told.take() == [("refused", "memory", "policy")]
    told = Told(2, keep_in_memory=False)
    assert told.plan(16) == []
    assert told.take() == [("refused", "memory", "unwritten")]


def test_a_store_that_fails() -> None:
    told = Told(4, 4)
    steps = told.plan(16)
    told.index.complete_store(steps, {step.ref.prefix_key for step in steps})
    told.index.complete_write(steps[0].ref.prefix_key, Place.DISK, stored=False)
    assert told.take() == [("failed", "memory")], "of its write nothing more is told"


def test_writes_to_the_disk() -> None:
    told = Told(4, 1, max_writes=1, cache_policy="LRU", slots_take_turns=False)
    (first,) = told.store(16)
    told.store(16, 1)
    assert told.take() == [("stored", "memory"), ("refused", "disk", "queue"), ("stored", "memory")]
    told.index.complete_write(first.ref.prefix_key, Place.DISK, stored=True)
    assert told.take() == [("written", "disk")]
    (third,) = told.store(16, 2)
    assert told.take() == [("evicted", "disk"), ("stored", "memory")]
    told.index.complete_write(third.ref.prefix_key, Place.DISK, stored=False)
    assert told.take() == [("failed", "disk")]
    (fourth,) = told.store(16, 3)
    told.index.set_tiers(TierState(disk_answers=False))
    told.index.complete_write(fourth.ref.prefix_key, Place.DISK, stored=False)
    (fifth,) = told.store(16, 4)
    told.index.complete_write(fifth.ref.prefix_key, Place.DISK, stored=False, is_full=True)
    assert ("failed", "disk", "down") in (events := told.take())
    assert events[-1] == ("refused", "disk", "full")


def test_a_time_to_live() -> None:
    told = Told(4, 4)
    told.store(16, ttl_s=5.0)
    assert told.take() == [("refused", "disk", "lifetime"), ("stored", "memory")]
    told.index.advance(6.0)
    assert told.take() == [("expired",)]


def test_a_remote_tier() -> None:
    told = Told(4, remote=RemoteView(10.0), max_sends=1)
    (first,) = told.store(16)
    told.store(16, 1)
    told.index.complete_write(first.ref.prefix_key, Place.REMOTE, stored=True)
    assert told.take() == [
        ("stored", "memory"),
        ("refused", "remote", "queue"),
        ("stored", "memory"),
        ("written", "remote"),
    ]


def test_removals_of_all_chunks_are_one_event() -> None:
    told = Told(4)
    told.store(48)
    told.take()
    told.index.remove_all()
    assert told.take() == [("removed", "cleared")]
    told.store(48)
    told.take()
    told.index.clear()
    assert told.take() == [("removed", "reset")]
    (step,) = told.store(16)
    told.take()
    told.index.condemn([step.ref])
    assert told.take() == [("removed", "wrong")]


def test_loads_that_bring_a_chunk_or_not() -> None:
    told = Told(4, 8, max_writes=8)
    for seed in range(2):  # the second one drives the first one out of memory
        for step in told.store(64, seed):
            told.index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    first, second, third, _ = told.index.prepare_load(told.index.lookup(hasher_of(64)).refs)
    told.take()
    failed = {second.ref.prefix_key, third.ref.prefix_key}
    told.index.complete_load([first, second, third], failed, {third.ref.prefix_key})
    assert told.take() == [("read", "disk"), ("unread", "disk"), ("lost", "disk")]
