"""Tails of conversations that vLLM's scheduler has sent to a remote tier: none stays that a longer chunk holds."""

from __future__ import annotations

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import one_after_the_other
from support.remote import FakeServer

from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixHasher

TURNS = 5


def refs_of(tokens: list[int]) -> set[ChunkRef]:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(tokens)
    return set(chunk_refs(hasher, with_tail=True))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("turn", [BLOCK + 1, CHUNK + BLOCK])
def test_a_conversation_leaves_its_chunks_and_one_tail(ranks: int, turn: int) -> None:
    server = FakeServer()
    with one_after_the_other(Setup(server=server, ranks=ranks)) as build:
        vllm = build()
        for number in range(1, TURNS + 1):
            prompt = list(range(number * turn))
            vllm.ask(f"turn {number}", prompt)
            vllm.settle()
        sent = len(server.puts)
        for number in range(1, TURNS):
            vllm.forget_local()
            vllm.ask(f"again {number}", list(range(number * turn)))
            vllm.settle()
        assert len(server.puts) == sent, "an earlier turn was sent again"
        for held in server.chunks.values():
            assert set(held) == refs_of(prompt)
        vllm.forget_local()
        vllm.assert_nothing_leaked()
        stranger = build()
        for number in range(1, TURNS + 1):
            stranger.forget_local()
            stranger.ask(f"stranger {number}", [*range(number * turn), 254])
            assert stranger.loaded_tokens[f"stranger {number}"] == number * turn // BLOCK * BLOCK
