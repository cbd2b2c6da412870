"""Tests of conversations over real Redis, folders and cache servers: no tail is kept, or sent, that a chunk holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_server import serving_ipc, serving_tcp
from support.parting import FLUSH_S, PROMPTS, shared_tokens
from support.redis_server import RedisServer, running
from support.rig import BLOCK, CHUNK, Rig, tokens_of
from support.schedules import schedules

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import RemoteOptions
from kvstore.engine.requests import hash_tokens
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import NO_EXTRAS
from kvstore.tiers.object.inventory import ObjectInventory
from kvstore.tiers.redis.inventory import RedisInventory

TURN = CHUNK + BLOCK  # tokens of a turn, so that each turn ends at another place in a chunk


class Place:
    """A storage that several engines share.

    Args:
        url: its URL.
        held: returns the chunks that it holds.
        clear: removes all of them.
    """

    def __init__(self, url: str, held: Callable[[], set[ChunkRef]], clear: Callable[[], object]) -> None:
        self.url = url
        self.held = held
        self.clear = clear

    def open(self, rig: Rig, max_queue: int = 64, hold_s: float = 0.2) -> CacheEngine:
        remote = RemoteOptions(self.url, {"timeout_s": 30.0}, lookup_timeout_s=30.0, hold_s=hold_s, max_queue=max_queue)
        return rig.open(slots=64, remote=remote)


@contextmanager
def at_redis(folder: Path) -> Iterator[Place]:
    server = RedisServer(folder / "redis", [])
    with running(server):
        url = f"redis://127.0.0.1:{server.port}"
        inventory = RedisInventory(url, {})
        yield Place(url, lambda: {place.ref for place in inventory.places()}, server.admin().flushall)
        inventory.close()


@contextmanager
def at_server(*, is_mapped: bool) -> Iterator[Place]:
    with serving_ipc() if is_mapped else serving_tcp() as server:
        spaces = server.hub.stock.spaces

        def clear() -> None:
            for space in spaces.values():
                server.hub.stock.clear(space)

        yield Place(server.url, lambda: {ref for space in spaces.values() for ref in space.chunks}, clear)


@contextmanager
def at_folder(folder: Path) -> Iterator[Place]:
    url = f"file://{folder}/kv"
    inventory = ObjectInventory(url, {})
    yield Place(
        url, lambda: {place.ref for place in inventory.places()}, lambda: rmtree(folder / "kv", ignore_errors=True)
    )
    inventory.close()


@pytest.fixture(scope="module", params=["redis", "folder", "mapped", "framed"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param == "redis":
        with at_redis(tmp_path_factory.mktemp("redis")) as place:
            yield place
    elif request.param == "folder":
        with at_folder(tmp_path_factory.mktemp("folder")) as place:
            yield place
    else:
        with at_server(is_mapped=request.param == "mapped") as place:
            yield place


@pytest.fixture
def rig() -> Rig:
    return Rig()


def refs_of(rig: Rig, prompt: list[int]) -> list[ChunkRef]:
    return chunk_refs(hash_tokens(rig.layout, prompt, NO_EXTRAS), with_tail=True)


@pytest.mark.parametrize("moves", [False, True], ids=["one engine", "another each turn"])
@pytest.mark.parametrize("turn", [TURN, BLOCK, 2 * CHUNK + BLOCK])
def test_a_conversation_leaves_its_chunks_and_one_tail(rig: Rig, place: Place, turn: int, *, moves: bool) -> None:
    """An answer stays valid from a lookup to its store, however slow the machine: else a tail is stored again."""
    place.clear()
    engine, prompt = place.open(rig, hold_s=60.0), tokens_of(1, 2 * BLOCK)
    try:
        for number in range(6):
            prompt = [*prompt, *tokens_of(10 + number, turn)]
            rig.retrieve(engine, prompt)
            rig.store(engine, prompt)
            assert engine.flush(FLUSH_S)
            assert place.held() == set(refs_of(rig, prompt))
            if moves:
                engine.close()
                engine = place.open(rig, hold_s=60.0)
        for end in range(BLOCK, len(prompt), BLOCK):  # earlier turns again, and prefixes not requested before
            assert engine.lookup(prompt[:end]) == end
            rig.store(engine, prompt[:end])
        assert engine.flush(FLUSH_S)
        assert place.held() == set(refs_of(rig, prompt))
    finally:
        engine.close()
    with place.open(rig) as other:
        for end in range(BLOCK, len(prompt), BLOCK):
            assert rig.retrieve(other, prompt[:end]) == end


@schedules(15)
@given(prompts=st.lists(st.tuples(PROMPTS, st.integers(0, 2)), max_size=8))
def test_nothing_is_lost(place: Place, prompts: list[tuple[list[int], int]]) -> None:
    """Three engines take turns and find each other's chunks, and a new engine finds all prompts after each turn."""
    if place.url.startswith("file:"):
        pytest.skip("engines learn of each other's chunks within seconds only")
    rig, stored = Rig(), list[list[int]]()
    place.clear()
    engines = [place.open(rig) for _ in range(3)]
    try:
        for prompt, number in prompts:
            expected = shared_tokens(prompt, stored)
            assert rig.retrieve(engines[number], prompt) >= expected
            rig.store(engines[number], prompt)
            assert engines[number].flush(FLUSH_S)
            stored.append(prompt)
            with place.open(rig) as stranger:
                for other in stored:
                    assert stranger.lookup(other) == len(other) // BLOCK * BLOCK
    finally:
        for engine in engines:
            engine.close()


def test_a_chunk_whose_send_failed_is_sent_in_its_tails_stead(rig: Rig, place: Place) -> None:
    place.clear()
    prompt = tokens_of(1, 2 * CHUNK)
    with place.open(rig, max_queue=1) as engine:
        rig.store(engine, prompt)  # the second chunk finds no place in the queue
        engine.flush(FLUSH_S)
        assert len(place.held()) == 1
        assert rig.store(engine, prompt[: CHUNK + BLOCK]) == 0
        assert engine.flush(FLUSH_S)
    assert place.held() == set(refs_of(rig, prompt))


@pytest.mark.parametrize("end", [2 * BLOCK, CHUNK + 2 * BLOCK])
def test_a_prefix_that_is_cleared_is_found_in_no_chunk_of_others(rig: Rig, place: Place, end: int) -> None:
    """The tier names a few chunks at a time, and those that do not share all blocks of the prefix stay."""
    place.clear()
    head = tokens_of(1, end)
    others = [[*head, *tokens_of(10 + number, CHUNK)] for number in range(11)]
    sibling = [*head[:-BLOCK], *tokens_of(30, CHUNK)]
    with place.open(rig) as engine:
        for prompt in (*others, sibling):
            rig.store(engine, prompt)
        assert engine.flush(FLUSH_S)
    with place.open(rig) as engine:
        engine.clear(head)
        assert engine.lookup(head) == (BLOCK if end < CHUNK else 0)
    held, number = place.held(), end // CHUNK
    assert not any(held & set(refs_of(rig, prompt)[: number + 1]) for prompt in others)
    assert refs_of(rig, sibling)[number] in held
