"""How every part of the library names chunks, and the outcomes of moving them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey

ByteArray = npt.NDArray[np.uint8]


class Outcome(Enum):
    """What became of one chunk of a batch."""

    HIT = "hit"  # get: the buffer holds the payload, verified
    MISS = "miss"  # get: not here
    CORRUPT = "corrupt"  # get: here, but damaged or foreign; it has been removed
    STORED = "stored"  # put: visible from now on
    FULL = "full"  # put: no room; nothing was written
    FAILED = "failed"  # the storage refused this one chunk; others may work


class ChunkRef(NamedTuple):
    """A chunk within a namespace: its key, and its length in blocks."""

    prefix_key: PrefixKey
    num_blocks: int

    def blocks_from(self, first_block: int) -> range:
        """Its blocks, if the first of them has that number."""
        return range(first_block, first_block + self.num_blocks)


def chunk_of(trail: bytes) -> ChunkRef:
    """The chunk whose trail it is: the keys at the ends of its blocks, one after the other."""
    return ChunkRef(trail[-PREFIX_KEY_BYTES:], len(trail) // PREFIX_KEY_BYTES)


def is_trail_of(trail: bytes, ref: ChunkRef) -> bool:
    """Whether it may be the trail of a chunk: as long, and ending with its key."""
    return len(trail) == ref.num_blocks * PREFIX_KEY_BYTES and trail.endswith(ref.prefix_key)


Asked: TypeAlias = ChunkRef | bytes
"""What a remote tier is asked: whether a chunk is there; or, for a trail, which chunks share blocks with it."""

Answer: TypeAlias = bool | tuple[bytes, ...] | None
"""Whether a chunk is there; for a trail, those of chunks that may share blocks with it. None: nobody could say."""
