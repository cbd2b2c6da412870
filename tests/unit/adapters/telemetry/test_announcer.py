"""Events for routers. `tests/unit/adapters/glue/test_adapter_model.py` checks that they are true after any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_parts import BLOCK, CHUNK, FakeRequest, Setup
from support.fake_vllm import FakeVllm, one_after_the_other

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.adapters.vllm.telemetry.announcer import Removed, Stored, _PlaceEvents
from kvstore.index.plans import Place

PROMPT = list(range(2 * CHUNK + 2 * BLOCK + 1))  # two chunks, a tail of two blocks, one token
BLOCKS_PER_CHUNK = CHUNK // BLOCK

Build = Callable[..., FakeVllm]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, one after the other."""
    with one_after_the_other(Setup()) as build:
        yield build


def events_of(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> list[Stored | Removed]:
    """Return a list that gets all later announcements."""
    heard: list[Stored | Removed] = []
    monkeypatch.setattr(vllm.heard, "hear", heard.extend)
    return heard


def stored_hashes(events: list[Stored | Removed], place: Place) -> list[bytes]:
    return [
        name for event in events if isinstance(event, Stored) and event.place is place for name in event.blocks.hashes
    ]


def test_each_chunk_is_announced_with_its_blocks(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = build(folder=tmp_path)
    events = events_of(vllm, monkeypatch)
    request = vllm.ask("first", PROMPT)
    vllm.settle()
    for place in (Place.MEMORY, Place.DISK):
        chunks = [event.blocks for event in events if isinstance(event, Stored) and event.place is place]
        chunks.sort(key=lambda blocks: blocks.token_ids[0])
        assert [len(blocks.hashes) for blocks in chunks] == [BLOCKS_PER_CHUNK, BLOCKS_PER_CHUNK, 2]
        assert [name for blocks in chunks for name in blocks.hashes] == request.block_hashes[:10]
        assert [token for blocks in chunks for token in blocks.token_ids] == PROMPT[:-1]
        assert [blocks.parent for blocks in chunks] == [
            None,
            request.block_hashes[BLOCKS_PER_CHUNK - 1],
            request.block_hashes[2 * BLOCKS_PER_CHUNK - 1],
        ]
    assert not [event for event in events if isinstance(event, Removed)]


def test_a_tail_that_grows_is_neither_said_again_nor_taken_back(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = build()
    events = events_of(vllm, monkeypatch)
    vllm.ask("first", PROMPT)
    known = len(events)
    longer = vllm.ask("longer", [*PROMPT, *range(CHUNK)])
    vllm.settle()
    assert vllm.index.counters.superseded_tails == 1
    grown = next(event for event in events[known:] if isinstance(event, Stored))
    assert grown.blocks.hashes == tuple(longer.block_hashes[10:12])
    assert grown.blocks.parent == longer.block_hashes[9]
    assert list(grown.blocks.token_ids) == longer.all_token_ids[10 * BLOCK : 12 * BLOCK]
    assert not [event for event in events if isinstance(event, Removed)]


def test_what_is_evicted_is_taken_back(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = build(slots=3)
    events = events_of(vllm, monkeypatch)
    first = vllm.ask("first", PROMPT)
    for number in range(3):
        vllm.ask(f"other {number}", [token + number + 100 for token in PROMPT])
        vllm.ask(f"other {number} again", [token + number + 100 for token in PROMPT])
    vllm.settle()
    gone = [name for event in events if isinstance(event, Removed) for name in event.hashes]
    assert vllm.index.counters.evicted_memory > 0
    assert set(gone) & set(first.block_hashes)
    assert len(stored_hashes(events, Place.MEMORY)) > len(gone)


def test_survivors_on_disk_are_announced_when_they_are_used(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT)
    vllm.settle()
    vllm = build(folder=tmp_path)
    events = events_of(vllm, monkeypatch)
    vllm.step()
    assert not events
    request = vllm.ask("again", PROMPT)
    vllm.settle()
    for place in (Place.MEMORY, Place.DISK):
        assert sorted(stored_hashes(events, place)) == sorted(request.block_hashes[:10])


def test_new_weights_take_everything_back(build: Build, tmp_path: Path) -> None:
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert all(vllm.heard.blocks.values())
    vllm.reset(preempt=True)
    vllm.settle()
    assert not any(vllm.heard.blocks.values())


def test_tags_are_not_for_routers(build: Build) -> None:
    vllm = build()
    vllm.ask("red", PROMPT, params=RequestParams(tags=(("team", "red"),)))
    assert len(vllm.index) == 3
    assert not vllm.heard.blocks[Place.MEMORY]


def test_nothing_is_said_of_a_request_without_hashes(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRequest, "block_hashes", [])
    vllm = build()
    vllm.ask("first", PROMPT)
    assert len(vllm.index) == 3
    assert not vllm.heard.blocks[Place.MEMORY]


class CountedBlock(bytes):
    """Hash of a block that counts how often it is read."""

    looks = 0

    def __hash__(self) -> int:
        CountedBlock.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedBlock.looks += 1
        return super().__eq__(other)


def test_what_an_event_costs_does_not_depend_on_how_many_chunks_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts with the same system prompt begin alike, and the scheduler's thread must not walk over them."""
    monkeypatch.setattr(CountedBlock, "looks", 0)
    system = tuple(CountedBlock(b"system %d" % number) for number in range(BLOCKS_PER_CHUNK - 1))
    at_place, looks = _PlaceEvents(), []
    for number in range(2_000):
        before = CountedBlock.looks
        hashes = (*system, CountedBlock(b"own %d" % number))
        assert at_place.add(b"key %d" % number, hashes) == (len(system) if number else 0)
        looks.append(CountedBlock.looks - before)
    assert max(looks) <= 8 * BLOCKS_PER_CHUNK
    for number in range(2_000):
        before = CountedBlock.looks
        own = CountedBlock(b"own %d" % number)
        gone = at_place.remove(b"key %d" % number, (*system, own))
        assert gone == ([own] if number < 1_999 else [*system, own])
        assert CountedBlock.looks - before <= 8 * BLOCKS_PER_CHUNK + 2 * len(gone)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)), max_size=30), st.randoms())
def test_a_block_is_said_by_the_first_chunk_that_has_it_and_taken_back_with_the_last(
    chunks: list[tuple[int, int, int]], random: Random
) -> None:
    """Chunks have any length, branch anywhere, and come in any order."""
    at_place = _PlaceEvents()
    here: dict[bytes, tuple[bytes, ...]] = {}
    for number, (length, first, second) in enumerate(chunks):
        words = [b"all", b"%d" % first, b"%d %d" % (first, second), b"%d %d end" % (first, second)]
        key, hashes = b"%d" % number, tuple(words[:length])
        said = {name for other in here.values() for name in other}
        assert at_place.add(key, hashes) == sum(name in said for name in hashes)
        here[key] = hashes
        if random.random() < 0.5:
            gone_key = random.choice(sorted(here))
            gone_hashes = here.pop(gone_key)
            left = {name for other in here.values() for name in other}
            assert at_place.remove(gone_key, gone_hashes) == [name for name in gone_hashes if name not in left]
