"""The chunks of a token sequence: those that a store makes of it, and those that it may be known under."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from kvstore.chunks import ChunkRef
from kvstore.keys import PrefixHasher, PrefixKey


class End(NamedTuple):
    """Where a chunk of a sequence ends, or a tail: the tokens up to there, their key, the chunks up to there."""

    tokens: int
    prefix_key: PrefixKey
    num_chunks: int


def ends(
    hasher: PrefixHasher, above_tokens: int, limit_tokens: int, chunk: int = 0, tails: Iterable[ChunkRef] = ()
) -> Iterator[End]:
    """The ends between two numbers of tokens, the second included and the last first.

    They are those of whole chunks, and before them those of ``tails`` inside chunk number ``chunk``, shortest first.
    """
    size, keys = hasher.chunk_tokens, hasher.chunk_keys()
    for tail in reversed([*tails]):
        tokens = chunk * size + tail.num_blocks * hasher.block_tokens
        if above_tokens < tokens <= limit_tokens:
            yield End(tokens, tail.prefix_key, chunk + 1)
    for number in range(min(limit_tokens // size, len(keys)), above_tokens // size, -1):
        yield End(number * size, keys[number - 1], number)


def chunk_refs(hasher: PrefixHasher, *, with_tail: bool) -> list[ChunkRef]:
    """The chunks of a sequence, in order: the whole ones, and the tail's whole blocks if wanted."""
    refs = [ChunkRef(key, hasher.blocks_per_chunk) for key in hasher.chunk_keys()]
    return refs + tail_refs(hasher, len(refs))[-1:] if with_tail else refs


def tail_refs(hasher: PrefixHasher, chunk: int) -> list[ChunkRef]:
    """The tails that chunk number ``chunk`` may be stored as while it is not whole, shortest first."""
    keys = hasher.block_keys(chunk)[: hasher.blocks_per_chunk - 1]
    return [ChunkRef(key, num_blocks) for num_blocks, key in enumerate(keys, 1)]


def all_refs(hasher: PrefixHasher) -> list[ChunkRef]:
    """Every chunk that may be stored of a sequence: the whole ones, and the tails inside each."""
    refs = chunk_refs(hasher, with_tail=False)
    for chunk in range(len(refs) + 1):
        refs += tail_refs(hasher, chunk)
    return refs


def superseded_tails(hasher: PrefixHasher, keys: Collection[PrefixKey]) -> dict[PrefixKey, tuple[PrefixKey, ...]]:
    """For each whole chunk among ``keys``, the keys under which tails of it may be known."""
    return {key: tuple(hasher.block_keys(number)[:-1]) for number, key in enumerate(hasher.chunk_keys()) if key in keys}


def pin_name(hasher: PrefixHasher) -> str:
    """The lease that pins the whole blocks of exactly this sequence."""
    refs = chunk_refs(hasher, with_tail=True)
    return f"pin {refs[-1].prefix_key.hex() if refs else ''}"
