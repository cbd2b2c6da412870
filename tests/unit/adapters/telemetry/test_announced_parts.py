"""Router events of chunks whose blocks no request has in full, or that hold blocks of other chunks that are dropped."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_parts import BLOCK, CHUNK, FakeRequest, Setup
from support.fake_vllm import FakeVllm, one_after_the_other
from support.schedules import schedules

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.index.plans import Place

FIRST = list(range(2 * CHUNK + 1))

SKIPS = RequestParams(skip_load=True)

Build = Callable[..., FakeVllm]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, one after the other."""
    with one_after_the_other(Setup()) as build:
        yield build


def parting(shared_blocks: int, seed: int, more_blocks: int) -> list[int]:
    """Return a prompt that has so many blocks in common with the first one, and one token more than whole blocks."""
    begin = 60 * (seed + 1)
    return [*FIRST[: shared_blocks * BLOCK], *range(begin, begin + more_blocks * BLOCK + 1)]


def announced(vllm: FakeVllm, request: FakeRequest) -> dict[Place, int]:
    """Count a request's announced blocks in each place."""
    vllm.settle()
    vllm.assert_nothing_leaked()
    return {place: sum(name in there for name in request.block_hashes) for place, there in vllm.heard.blocks.items()}


def test_blocks_that_another_chunk_still_has_are_not_taken_back(build: Build, tmp_path: Path) -> None:
    """It was on disk at start, and its blocks were unknown."""
    build(folder=tmp_path).ask("first", FIRST)
    vllm = build(folder=tmp_path)
    other = vllm.ask("other", parting(3, 1, 1), params=SKIPS)
    assert announced(vllm, other) == {Place.MEMORY: 4, Place.DISK: 4}
    vllm.index.remove([key for key, chunk in vllm.index._chunks.items() if chunk.in_memory])
    assert announced(vllm, other) == {Place.MEMORY: 0, Place.DISK: 3}
    first = vllm.ask("first", FIRST)
    assert announced(vllm, first) == {Place.MEMORY: 8, Place.DISK: 8}


def test_a_tail_that_a_chunk_holds_is_announced_as_a_part_of_that(build: Build, tmp_path: Path) -> None:
    """Only its first block was known."""
    build(folder=tmp_path).ask("first", FIRST)
    vllm = build(folder=tmp_path)
    assert announced(vllm, vllm.ask("other", parting(1, 1, 0))) == {Place.MEMORY: 1, Place.DISK: 1}
    tail = vllm.ask("tail", FIRST[: 3 * BLOCK + 1], params=SKIPS)
    assert announced(vllm, tail) == {Place.MEMORY: 3, Place.DISK: 3}


def test_a_trail_that_was_known_once_still_leads_to_heirs(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may leave, and come back from a tier that has no trail of it."""
    build(folder=tmp_path).ask("first", FIRST)
    vllm = build(folder=tmp_path)
    other = vllm.ask("other", parting(3, 1, 1), params=SKIPS)
    assert announced(vllm, other) == {Place.MEMORY: 4, Place.DISK: 4}
    take_changes = vllm.index.take_changes
    monkeypatch.setattr(vllm.index, "take_changes", lambda: dict.fromkeys(take_changes(), b""))
    vllm.index.remove([key for key, chunk in vllm.index._chunks.items() if chunk.in_memory])
    assert announced(vllm, other) == {Place.MEMORY: 0, Place.DISK: 3}


PROMPTS = st.builds(parting, st.integers(1, 8), st.integers(1, 2), st.integers(0, 5))
ASKS = st.tuples(st.just("ask"), PROMPTS, st.booleans())
OTHERS = st.tuples(st.sampled_from(["restart", "clear", "remove", "remove"]), st.builds(list[int]), st.booleans())
ACTIONS = st.lists(ASKS | ASKS | OTHERS, min_size=2, max_size=10)


@schedules(20)
@given(actions=ACTIONS, slots=st.integers(2, 6), disk_chunks=st.integers(3, 12), local_cpu=st.booleans())
def test_what_is_announced_can_be_found_and_what_is_taken_back_cannot(
    actions: list[tuple[str, list[int], bool]], slots: int, disk_chunks: int, *, local_cpu: bool
) -> None:
    """This holds after any prompts that part inside chunks, hits, evictions, removals, clears and restarts."""
    with tempfile.TemporaryDirectory() as name, one_after_the_other(Setup()) as build:
        setup = {"folder": Path(name), "slots": slots, "disk_chunks": disk_chunks, "local_cpu": local_cpu}
        build(**setup).ask("first", FIRST)
        vllm = build(**setup)
        for number, (action, prompt, flag) in enumerate(actions):
            if action == "ask":
                vllm.forget_local()
                vllm.ask(f"request {number}", prompt, params=SKIPS if flag else RequestParams())
            elif action == "restart":
                vllm.settle()
                vllm = build(**setup)
            elif action == "clear":
                vllm.scheduler.clear()
            elif action == "remove":
                vllm.index.remove(
                    [key for key, chunk in vllm.index._chunks.items() if chunk.in_memory or not flag][::2]
                )
            vllm.settle()
            vllm.assert_nothing_leaked()
