"""Tests of an operator's lookup and pins of a prompt at a real server, where a longer chunk holds the prompt's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support.cache_server import ServerThread, serving_ipc
from support.parting import FLUSH_S
from support.rig import BLOCK, CHUNK, Rig, tokens_of

from kvstore.engine.options import RemoteOptions
from kvstore.engine.requests import hash_tokens
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import NO_EXTRAS
from kvstore.tiers.server.operator import Found, Operator
from kvstore.tiers.server.url import parse_server

PROMPT = tokens_of(1, 2 * CHUNK)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def server(rig: Rig) -> Iterator[ServerThread]:
    """Yield a server that holds two whole chunks."""
    with serving_ipc() as server:
        with rig.open(remote=RemoteOptions(server.url, {"timeout_s": 30.0}, max_queue=64)) as engine:
            rig.store(engine, PROMPT)
            assert engine.flush(FLUSH_S)
        yield server


@pytest.fixture
def operator(server: ServerThread) -> Iterator[Operator]:
    with closing(Operator(parse_server(server.url, {"timeout_s": 30.0}))) as operator:
        yield operator


def find(operator: Operator, tokens: list[int]) -> Found:
    (found,) = operator.find(tokens, NO_EXTRAS)
    return found


def chunks_of(rig: Rig, tokens: list[int]) -> list[ChunkRef]:
    return chunk_refs(hash_tokens(rig.layout, tokens, NO_EXTRAS), with_tail=True)


@pytest.mark.parametrize("end", range(BLOCK, 2 * CHUNK + 1, BLOCK))
def test_every_prefix_is_found(rig: Rig, operator: Operator, end: int) -> None:
    found = find(operator, PROMPT[:end])
    assert found.num_tokens == end
    assert found.refs == chunks_of(rig, PROMPT)[: -(-end // CHUNK)]
    assert all(where == "memory" for where in found.chunks)


@pytest.mark.parametrize("shared", [0, BLOCK - 1, 2 * BLOCK, CHUNK, CHUNK + 2 * BLOCK + 1])
def test_a_prompt_that_parts_inside_a_chunk(operator: Operator, shared: int) -> None:
    """The prompt is found up to the point where it differs, and its next chunk is missing."""
    for more in (CHUNK, 2 * BLOCK + BLOCK // 2):
        found = find(operator, [*PROMPT[:shared], *tokens_of(2, more)])
        assert found.num_tokens == shared // BLOCK * BLOCK
        if (shared + more) // CHUNK > shared // CHUNK or shared % CHUNK >= BLOCK:
            assert found.chunks[-1] == "never_stored"


def test_a_pinned_prefix_keeps_the_chunk_that_holds_its_end(rig: Rig, server: ServerThread, operator: Operator) -> None:
    found = find(operator, PROMPT[: CHUNK + 2 * BLOCK])
    assert operator.pin(found, is_wanted=True) == 2
    assert {chunk.ref for chunk in server.hub.stock.pins} == set(chunks_of(rig, PROMPT))
    assert operator.pin(found, is_wanted=False) == 2
    assert not list(server.hub.stock.pins)


def test_an_earlier_server_is_asked_for_keys(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.operators.holder_of", lambda *_: None)
    assert find(operator, PROMPT).num_tokens == 2 * CHUNK
    assert find(operator, PROMPT[: CHUNK + 2 * BLOCK]).num_tokens == CHUNK


def test_a_tail_with_bytes_of_its_own_is_found_by_its_key(
    rig: Rig, server: ServerThread, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail of an older engine is preferred to a longer chunk that shares as much, because it has fewer bytes."""
    tail = PROMPT[: CHUNK + 2 * BLOCK]
    with rig.open(remote=RemoteOptions(server.url, {"timeout_s": 30.0}, max_queue=64)) as engine:
        monkeypatch.setattr("kvstore.tiers.server.tier.ServerTier.keeps_trails", False)
        rig.store(engine, tail)
        assert engine.flush(FLUSH_S)
    assert find(operator, tail).refs == chunks_of(rig, tail)
