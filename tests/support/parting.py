"""Prompts that begin alike and part anywhere, inside chunks and inside blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from support.rig import BLOCK, CHUNK, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.engine import CacheEngine
    from support.rig import Rig

STEMS = [tokens_of(stem, 3 * CHUNK) for stem in (1, 2, 3)]
# A prompt begins with one stem, parts from it anywhere and continues with another, which other prompts may share.
PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 3 * CHUNK), st.integers(0, 2), st.integers(0, 2 * CHUNK)).map(
    lambda drawn: [*STEMS[drawn[0]][: drawn[1]], *STEMS[drawn[2]][: drawn[3]]]
)
FLUSH_S = 30.0


def shared_tokens(prompt: Sequence[int], stored: Sequence[Sequence[int]]) -> int:
    """Return the longest prefix, in whole blocks, that a prompt shares with any stored one."""
    longest = 0
    for other in stored:
        common = next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
        common = min(len(prompt), len(other)) if common is None else common
        longest = max(longest, min(common, len(other)) // BLOCK * BLOCK)
    return longest


def check_strangers(rig: Rig, open_engine: Callable[[], CacheEngine], prompts: Sequence[list[int]]) -> None:
    """Check that each prompt finds all it shares with the others, in an engine that has only what others stored."""
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


def check_ages(open_engine: Callable[[], CacheEngine], rig: Rig, age: Callable[[pytest.MonkeyPatch], object]) -> None:
    """Check that old and new engines find each other's chunks by key, and that new ones find block ends, too.

    Args:
        open_engine: opens an engine that has only what others stored.
        rig: the rig of the engines.
        age: lets engines behave as those before block ends.
    """
    head = tokens_of(1, CHUNK + 2 * BLOCK)
    one, other, third = ([*head, *tokens_of(number, CHUNK)] for number in (2, 3, 4))

    def run(prompt: list[int], *, is_old: bool) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if is_old:
                age(patch)
            with open_engine() as engine:
                found = rig.retrieve(engine, prompt)
                rig.store(engine, prompt)
                assert engine.flush(FLUSH_S)
                return found

    whole = len(one) // BLOCK * BLOCK
    assert [run(one, is_old=True), run(other, is_old=False)] == [0, CHUNK]
    assert [run(one, is_old=False), run(other, is_old=True)] == [whole, whole]
    assert run(third, is_old=False) == len(head), "by the trail of the second one"
