"""Prompts that begin alike and part anywhere, inside chunks and inside blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from support.rig import BLOCK, CHUNK, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine import CacheEngine
    from support.rig import Rig

STEMS = [tokens_of(stem, 3 * CHUNK) for stem in (1, 2, 3)]
# A prompt begins with one stem, parts from it anywhere and goes on with another one, which others may share in turn.
PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 3 * CHUNK), st.integers(0, 2), st.integers(0, 2 * CHUNK)).map(
    lambda drawn: [*STEMS[drawn[0]][: drawn[1]], *STEMS[drawn[2]][: drawn[3]]]
)
FLUSH_S = 30.0


def shared_tokens(prompt: Sequence[int], stored: Sequence[Sequence[int]]) -> int:
    """The longest prefix, in whole blocks, that a prompt shares with any of those stored."""
    longest = 0
    for other in stored:
        common = next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
        common = min(len(prompt), len(other)) if common is None else common
        longest = max(longest, min(common, len(other)) // BLOCK * BLOCK)
    return longest


def check_strangers(rig: Rig, open_engine: Callable[[], CacheEngine], prompts: Sequence[list[int]]) -> None:
    """Each prompt comes to an engine that has only what others stored elsewhere: it finds all they have in common."""
    stored: list[list[int]] = []
    for prompt in prompts:
        with open_engine() as engine:
            expected = shared_tokens(prompt, stored)
            assert engine.lookup(prompt) == expected
            assert rig.retrieve(engine, prompt) == expected
            assert engine.lookup(prompt) == expected
            rig.store(engine, prompt)
            assert engine.flush(FLUSH_S)
            assert engine.lookup(prompt) == len(prompt) // BLOCK * BLOCK
        stored.append(prompt)
