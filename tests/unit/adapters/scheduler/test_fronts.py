"""Leading blocks of a chunk that a remote tier sends alone; `support/fake_vllm.py` checks every byte.

They also decide if a part of a chunk is worth its load, by the bytes that are really read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm, one_after_the_other
from support.remote import FakeServer

from kvstore.adapters.vllm.telemetry.announcer import Stored
from kvstore.index.plans import Place
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixHasher

FIRST = list(range(2 * CHUNK + 1))

Build = Callable[..., FakeVllm]
WAYS: list[dict[str, Any]] = [{}, {"async_load": True}, {"layerwise": True}, {"ranks": 2}, {"stages": (2, 3)}]


def parting(shared: int, begin: int = 100) -> list[int]:
    """Return a prompt that has so many tokens in common with the first one."""
    return [*FIRST[:shared], *range(begin, begin + CHUNK)]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, one after the other."""
    with one_after_the_other(Setup()) as build:
        yield build


def filled(build: Build, **way: object) -> FakeServer:
    """Return a remote tier that has the first prompt."""
    server = FakeServer()
    vllm = build(server=server, max_write_queue=16, **way)
    vllm.ask("first", FIRST)
    vllm.settle()
    server.reads_fronts = True
    return server


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shared_blocks", [1, 2, 3])
def test_leading_blocks_come_alone(build: Build, shared_blocks: int, way: dict[str, Any]) -> None:
    """Up to half of the chunk comes alone; the chunks before are whole."""
    server = filled(build, **way)
    vllm = build(server=server, max_write_queue=16, **way)
    shared = CHUNK + shared_blocks * BLOCK
    vllm.ask("other", parting(shared))
    assert vllm.loaded_tokens["other"] == shared
    ranks = way.get("ranks", len(way.get("stages", (1,))))
    assert sorted(front for _, front in server.reads) == [0] * ranks + [shared_blocks % 3] * ranks
    vllm.forget_local()
    server.reads.clear()
    vllm.ask("third", parting(shared, 200))
    assert vllm.loaded_tokens["third"] == shared
    assert not server.reads, "what has come is in memory"
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_leading_blocks_are_announced_as_far_as_they_came(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    server = filled(build)
    vllm = build(server=server, saves=False)
    heard: list[object] = []
    monkeypatch.setattr(vllm.heard, "hear", heard.extend)
    other = vllm.ask("other", parting(CHUNK + BLOCK))
    vllm.settle()
    names = [name for event in heard if isinstance(event, Stored) for name in event.blocks.hashes]
    assert names == other.block_hashes[: CHUNK // BLOCK + 1]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_leading_blocks_that_are_gone_are_computed(build: Build, way: dict[str, Any]) -> None:
    """Their chunk was evicted after the answer, and is not asked for again at once."""
    server = filled(build, **way)
    vllm = build(server=server, saves=False, **way)
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(FIRST)
    second = ChunkRef(hasher.chunk_keys()[1], CHUNK // BLOCK)
    assert second in server.all_chunks()
    server.before_get = lambda: server.lose([second])
    vllm.ask("other", parting(CHUNK + BLOCK))
    assert (second, 1) in server.reads
    server.reads.clear()
    vllm.forget_local()
    vllm.ask("third", parting(CHUNK + BLOCK, 200))
    assert vllm.loaded_tokens["third"] == CHUNK
    assert all(ref != second for ref, _ in server.reads)
    vllm.settle()
    vllm.assert_nothing_leaked()


# What is worth a load


def measured(vllm: FakeVllm, place: Place) -> None:
    """Let a token take twice as long to compute as to load."""
    for _ in range(3):
        vllm.connected.choice.loaded({place: 256}, 0.1)
        vllm.connected.choice.computed(256, 0.2)


@pytest.mark.parametrize("reads_fronts", [True, False])
def test_a_block_at_a_remote_tier_is_worth_its_load_where_it_comes_alone(build: Build, *, reads_fronts: bool) -> None:
    server = filled(build)
    server.reads_fronts = reads_fronts
    vllm = build(server=server)
    measured(vllm, Place.REMOTE)
    vllm.ask("other", parting(CHUNK + BLOCK))
    assert vllm.loaded_tokens["other"] == (CHUNK + BLOCK if reads_fronts else CHUNK)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_block_on_disk_costs_its_chunk_and_one_in_memory_costs_itself(
    build: Build, tmp_path: Path, *, in_memory: bool
) -> None:
    vllm = build(folder=tmp_path)
    vllm.ask("first", FIRST)
    vllm.settle()
    if not in_memory:
        vllm = build(folder=tmp_path)
    for place in (Place.MEMORY, Place.DISK):
        measured(vllm, place)
    vllm.forget_local()
    vllm.ask("other", parting(BLOCK))
    assert vllm.loaded_tokens["other"] == (BLOCK if in_memory else 0)
