"""Names of chunks for all parts of the library, and the outcomes of moving them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import partial
from itertools import repeat
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey

ByteArray = npt.NDArray[np.uint8]


class Outcome(Enum):
    """Outcome of moving one chunk of a batch."""

    HIT = "hit"  # get: the buffer holds the payload, verified
    MISS = "miss"  # get: not stored here
    CORRUPT = "corrupt"  # get: stored here, but damaged or foreign; it has been removed
    STORED = "stored"  # put: can be found from now on
    FULL = "full"  # put: no room; nothing was written
    FAILED = "failed"  # the storage refused this one chunk; others may work


class ChunkRef(NamedTuple):
    """A chunk within a namespace: its key, and its length in blocks."""

    prefix_key: PrefixKey
    num_blocks: int

    def blocks_from(self, first_block: int) -> range:
        """Return its block numbers, given that of its first block."""
        return range(first_block, first_block + self.num_blocks)


_new_ref = partial(tuple.__new__, ChunkRef)  # in C, without the arguments' names


def refs_of(keys: Iterable[PrefixKey], num_blocks: int) -> list[ChunkRef]:
    """Return chunks of one length, faster than by a call of ``ChunkRef`` for each."""
    return list(map(_new_ref, zip(keys, repeat(num_blocks))))


def chunk_of(trail: bytes) -> ChunkRef:
    """Return the chunk of a trail, which is the concatenation of the keys at its blocks' ends."""
    return ChunkRef(trail[-PREFIX_KEY_BYTES:], len(trail) // PREFIX_KEY_BYTES)


def is_trail_of(trail: bytes, ref: ChunkRef) -> bool:
    """Tell if ``trail`` may be the trail of a chunk: it has the right length and ends with the chunk's key."""
    return len(trail) == ref.num_blocks * PREFIX_KEY_BYTES and trail.endswith(ref.prefix_key)


Asked: TypeAlias = ChunkRef | bytes
"""A question to a remote tier: for a chunk, if it is there; for a trail, which chunks share blocks with it."""

Presence: TypeAlias = bool | float
"""True if a chunk is there and False if not; if it has a time to live, the end of that time."""

Answer: TypeAlias = Presence | tuple[bytes, ...] | None
"""Presence of a chunk; for a trail, the trails of chunks that may share blocks with it. None if unknown."""


def end_of(answer: Answer) -> float | None:
    """Return the end of the time to live of a chunk that an answer says is there; None for no end."""
    return answer if isinstance(answer, float) else None


def in_all(parts: Iterable[Presence]) -> Presence:
    """Return the presence of a chunk that needs all of these parts."""
    present = list(parts)
    if not all(present):
        return False
    return min((end for end in present if end is not True), default=True)


def in_any(places: Iterable[Presence]) -> Presence:
    """Return the presence of a chunk that is in any of these places."""
    present = [end for end in places if end]
    return True if True in present else max(present, default=False)
