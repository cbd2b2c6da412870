"""The index replayed: with and without block ends, in memory and above a disk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.invariants import check_invariants

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place
from kvstore.model.keys import PrefixHasher
from kvstore.tools.replay import Replay

PROMPT = list(range(70))


def named(tokens: Sequence[int]) -> PrefixHasher:
    hasher = PrefixHasher(32, 4)
    hasher.update(tokens)
    return hasher


def ask(replay: Replay, tokens: Sequence[int]) -> int:
    found = replay.ask(named(tokens))
    assert sum(tokens for _, tokens in found.parts) == found.num_tokens
    check_invariants(replay.index)
    return found.num_tokens


@pytest.mark.parametrize("block_ends", [False, True])
def test_what_is_found(block_ends: bool) -> None:
    replay = Replay(ChunkIndex(8), block_ends=block_ends)
    assert ask(replay, PROMPT) == 0
    assert ask(replay, [*PROMPT[:68], 1, 2]) == 68, "two chunks, and a tail of a block"
    assert ask(replay, [*PROMPT[:60], 1, 2]) == (60 if block_ends else 32)
    assert ask(replay, [*PROMPT, *range(100, 126)]) == 68
    assert ask(replay, [*PROMPT[:68], 1, 2]) == (68 if block_ends else 64), "the chunk has superseded the tail"


@pytest.mark.parametrize("block_ends", [False, True])
def test_a_part_of_a_chunk_is_a_use_of_it(block_ends: bool) -> None:
    replay = Replay(ChunkIndex(3, cache_policy="LRU"), block_ends=block_ends)
    for tokens in (PROMPT[:32], PROMPT[36:68], [*PROMPT[:20], *range(100, 112)], range(200, 232)):
        ask(replay, tokens)
    assert ask(replay, PROMPT[:32]) == (32 if block_ends else 0)


@pytest.mark.parametrize("block_ends", [False, True])
def test_what_memory_lost_is_on_disk(block_ends: bool) -> None:
    index = ChunkIndex(3, disk_capacity_bytes=100, stored_bytes=lambda _: 1, max_writes=100, cache_policy="LRU")
    replay = Replay(index, block_ends=block_ends)
    for tokens in (PROMPT, range(100, 196), [*PROMPT, *range(100, 126)]):
        ask(replay, tokens)
    found = replay.ask(named(range(100, 196)))
    assert found.parts == [(Place.DISK, 32)] * 3
    assert index.disk_used_bytes == 6, "the tail went when its chunk was there"
