"""Prompts that share stems and part inside chunks, and what of one is known when others are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from support.rig import BLOCK, CHUNK, tokens_of

STEMS = [tokens_of(stem, 3 * CHUNK) for stem in (1, 2, 3)]
# A prompt begins with one stem, parts from it anywhere and goes on with another one, which others may share in turn.
PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 3 * CHUNK), st.integers(0, 2), st.integers(0, 2 * CHUNK)).map(
    lambda drawn: [*STEMS[drawn[0]][: drawn[1]], *STEMS[drawn[2]][: drawn[3]]]
)


def shared_tokens(prompt: Sequence[int], stored: Iterable[Sequence[int]]) -> int:
    """The longest prefix, in whole blocks, that a prompt shares with any of those stored."""
    longest = 0
    for other in stored:
        common = next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
        common = min(len(prompt), len(other)) if common is None else common
        longest = max(longest, min(common, len(other)) // BLOCK * BLOCK)
    return longest
