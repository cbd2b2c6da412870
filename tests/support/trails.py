"""Chunks as paths in a tree: the contents of each of their blocks. Keys and trails follow from the paths."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PREFIX_KEY_BYTES

Path = tuple[int, ...]


def key_of(path: Sequence[int]) -> bytes:
    return hashlib.sha256(bytes(path)).digest()[:PREFIX_KEY_BYTES]


def trail_of(path: Sequence[int]) -> bytes:
    return b"".join(key_of(path[:end]) for end in range(1, len(path) + 1))


def ref_of(path: Sequence[int]) -> ChunkRef:
    return ChunkRef(key_of(path), len(path))


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def most_shared(asked: Path, there: Collection[Path], at_most: int) -> list[int]:
    """Return the largest numbers of shared blocks, by looking at all paths."""
    return sorted(filter(None, (shared_blocks(asked, path) for path in there)), reverse=True)[:at_most]
