"""Chunks of other engines that a remote tier names: looked up, asked for, remembered, and bounded."""

from __future__ import annotations

import pytest
from support.index import BLOCK, CHUNK, hasher_of

from kvstore.index import remote_view
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, TierState
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers, RemoteView
from kvstore.index.trails import RemoteTrails
from kvstore.model.chunks import Asked, ChunkRef, chunk_of
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixHasher


def parted(shared_tokens: int, num_tokens: int = CHUNK, seed: int = 0) -> PrefixHasher:
    """Return a sequence that shares its beginning with ``hasher_of(...)`` and continues alone."""
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(
        [*range(shared_tokens), *range(10_000 * (seed + 1), 10_000 * (seed + 1) + num_tokens - shared_tokens)]
    )
    return hasher


def trail_of(hasher: PrefixHasher) -> bytes:
    return b"".join(hasher.block_keys(0))


MINE = hasher_of(CHUNK)
ASKED = trail_of(MINE)
THEIRS = trail_of(parted(2 * BLOCK))
REF = chunk_of(THEIRS)


def remote_index() -> tuple[ChunkIndex, RemoteView]:
    view = RemoteView(10.0)
    return ChunkIndex(4, remote=view), view


def answer(index: ChunkIndex, view: RemoteView, *named: bytes, there: bool = True) -> list[list[Asked]]:
    """Answer a lookup's questions until it knows. Returns the number of rounds."""
    rounds: list[list[Asked]] = []
    while questions := index.questions(MINE, index.lookup(MINE)):
        assert len(rounds) < index.question_rounds, "it asks again and again"
        rounds.append(questions)
        view.note(questions, [named if isinstance(item, bytes) else there and item == REF for item in questions], 0.0)
    return rounds


def test_a_chunk_of_others_is_named_then_asked_for_then_found() -> None:
    index, view = remote_index()
    rounds = answer(index, view, THEIRS)
    assert [ASKED in asked for asked in rounds] == [True, False]
    assert rounds[1] == [REF]
    match = index.lookup(MINE)
    assert (match.refs, match.num_tokens) == ((REF,), 2 * BLOCK)
    (step,) = index.prepare_load(match.refs, hasher=MINE)
    assert step.source is Place.REMOTE
    index.complete_load([step], set(), set())
    view.clear()
    index.set_tiers(TierState(remote_answers=False))
    again = index.lookup(parted(2 * BLOCK, seed=7))
    assert again.num_tokens == 2 * BLOCK, "from now on it is found here, by its trail"


def test_a_chunk_that_is_gone_is_not_found() -> None:
    index, view = remote_index()
    answer(index, view, THEIRS, there=False)
    assert not index.lookup(MINE).refs


def test_the_nearest_that_is_there_is_found() -> None:
    index, view = remote_index()
    gone = trail_of(parted(3 * BLOCK, seed=2))
    answer(index, view, gone, THEIRS)
    assert index.lookup(MINE).refs == (REF,)


def test_nobody_waits_for_what_another_loads() -> None:
    """As with local chunks, a request for a part would wait for all of it."""
    index, view = remote_index()
    answer(index, view, THEIRS)
    steps = index.prepare_load(index.lookup(MINE).refs)
    assert not index.lookup(MINE).refs
    index.complete_load(steps, set(), set())
    assert index.lookup(MINE).refs == (REF,)


@pytest.mark.parametrize(
    "named",
    [
        b"",
        b"junk",
        THEIRS[:-1],
        THEIRS[PREFIX_KEY_BYTES:],
        ASKED[:PREFIX_KEY_BYTES] + bytes(range(PREFIX_KEY_BYTES)) * 100,
    ],
)
def test_what_is_no_trail_leads_nowhere(named: bytes) -> None:
    """They do not have whole keys, have another beginning, or are longer than any chunk."""
    index, view = remote_index()
    view.note([ASKED], [(named,)], 0.0)
    assert index._lookup._named(ASKED, MINE.blocks_per_chunk, 0, NO_ANSWERS) == []


def test_answers_to_one_request_are_heard_without_a_view_that_holds_any() -> None:
    view, told = RemoteView(0.0), RemoteAnswers()
    index = ChunkIndex(4, remote=view)
    questions = index.questions(MINE, index.lookup(MINE), told=told)
    view.tell(told, {item: (THEIRS,) if isinstance(item, bytes) else False for item in questions}, 0.0, 0)
    assert index.questions(MINE, index.lookup(MINE, told=told), told=told) == [REF]
    view.tell(told, {REF: True}, 0.0, 0)
    assert index.lookup(MINE, told=told).refs == (REF,)
    assert index.questions(MINE, index.lookup(MINE, told=told), told=told) == []
    told = RemoteAnswers()
    told.give_up()
    assert not index.questions(MINE, index.lookup(MINE, told=told), told=told), "it is too late to ask"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_view, "MAX_TRAILS", 3)
    heard, view = RemoteTrails(3), RemoteView(10.0)
    trails = [trail_of(parted(BLOCK, seed=seed)) for seed in range(9)]
    for trail in trails:
        heard.add(ASKED, [trail, trail])
        view.note([trail], [()], 0.0)
    assert {ref for ref, _ in heard.nearest(ASKED)} == {chunk_of(trail) for trail in trails[-3:]}
    assert len(view._asked_trails) == 3
    assert [heard.trail_of(chunk_of(trail)) for trail in (trails[0], trails[-1])] == [b"", trails[-1]]
    assert heard.trail_of(ChunkRef(trails[-1][-PREFIX_KEY_BYTES:], 1)) == b"", "a chunk of another length"


def test_chunks_that_are_gone_hide_none_that_is_there() -> None:
    """Neither the number of names before nor those that the tier still gives matter."""
    index, view = remote_index()
    gone = [trail_of(parted(3 * BLOCK, seed=seed)) for seed in range(20, 90)]
    for number in range(0, len(gone), 4):
        view.note([ASKED], [tuple(gone[number : number + 4])], 0.0)
        refs = [chunk_of(trail) for trail in gone[number : number + 4]]
        view.note(refs, [False] * len(refs), 0.0)
        view.tell(RemoteAnswers(), dict.fromkeys(refs, False), 0.0, 0)
    view.note([ASKED], [(*gone[-3:], THEIRS)], 0.0)
    assert REF in index.questions(MINE, index.lookup(MINE))


def test_an_answer_from_before_a_clear_is_none() -> None:
    index, view = remote_index()
    since = view.serial
    view.clear()
    view.note([ASKED], [(THEIRS,)], 0.0, since)
    assert ASKED in index.questions(MINE, index.lookup(MINE))
