"""The chunks of a token sequence: those a store creates, and those under which it may be stored already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from kvstore.checkpoints.parts import End
from kvstore.chunks import ChunkRef
from kvstore.keys import PrefixHasher, PrefixKey


def ends(
    hasher: PrefixHasher,
    above_tokens: int,
    limit_tokens: int,
    tails: Mapping[int, Sequence[ChunkRef]] = MappingProxyType({}),
) -> list[End]:
    """Return the ends of whole chunks in ``(above_tokens, limit_tokens]``, the last first.

    They are preceded by the ends of ``tails``, given by chunk number and shortest first, returned longest first.
    """
    size, first = hasher.chunk_tokens, above_tokens // hasher.chunk_tokens
    keys = hasher.chunk_keys()[first : max(first, limit_tokens // size)]
    whole = zip(range((first + len(keys)) * size, first * size, -size), reversed(keys), strict=True)
    inside = (
        (chunk * size + tail.num_blocks * hasher.block_tokens, tail.prefix_key)
        for chunk, refs in tails.items()
        for tail in reversed(refs)
    )
    return [*(end for end in inside if above_tokens < end[0] <= limit_tokens), *whole]


def chunk_refs(hasher: PrefixHasher, *, with_tail: bool) -> list[ChunkRef]:
    """Return the chunks of a sequence, in order: the whole ones, and the tail's whole blocks if requested."""
    refs = [ChunkRef(key, hasher.blocks_per_chunk) for key in hasher.chunk_keys()]
    return refs + tail_refs(hasher, len(refs))[-1:] if with_tail else refs


def tail_refs(hasher: PrefixHasher, chunk: int) -> list[ChunkRef]:
    """Return the tails that chunk number ``chunk`` may be stored as while it is not whole, shortest first."""
    keys = hasher.block_keys(chunk)[: hasher.blocks_per_chunk - 1]
    return [ChunkRef(key, num_blocks) for num_blocks, key in enumerate(keys, 1)]


def all_refs(hasher: PrefixHasher) -> list[ChunkRef]:
    """Return every chunk of a sequence that may be stored: the whole ones, and the tails inside each."""
    refs = chunk_refs(hasher, with_tail=False)
    for chunk in range(len(refs) + 1):
        refs += tail_refs(hasher, chunk)
    return refs


def trails(hasher: PrefixHasher, refs: Iterable[ChunkRef]) -> dict[PrefixKey, bytes]:
    """Return the trails of those of the chunks that belong to the sequence, by key."""
    wanted, whole = {ref.prefix_key for ref in refs}, hasher.chunk_keys()
    if not wanted:
        return {}
    found = {key: b"".join(hasher.block_keys(number)) for number, key in enumerate(whole) if key in wanted}
    if len(found) < len(wanted):
        keys = hasher.block_keys(len(whole))
        found.update((key, b"".join(keys[:end])) for end, key in enumerate(keys, 1) if key in wanted)
    return found


def pin_name(hasher: PrefixHasher) -> str:
    """Return the name of the lease that pins the whole blocks of exactly this sequence."""
    refs = chunk_refs(hasher, with_tail=True)
    return f"pin {refs[-1].prefix_key.hex() if refs else ''}"
