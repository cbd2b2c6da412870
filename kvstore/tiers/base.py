"""The contract of a storage tier: a place outside the slab pool where chunks can live.

What every tier promises:

- *Batch first.* Each call takes several chunks and answers each with an ``Outcome``, in order.
- *Misses and "full" are values.* ``TierError`` means that the whole tier is broken; what it held counts as missing.
- *Never a wrong byte.* ``get`` answers ``HIT`` only after key, length and checksums agreed. Bytes that do not agree are
  removed, counted, and answered as ``CORRUPT``. After anything but ``HIT`` the buffer's content is undefined.
- *All or nothing.* ``get`` and ``scan`` see a chunk only once ``put`` wrote all of it, also across ``kill -9``.
- *Bounded.* ``used_bytes`` never exceeds ``capacity_bytes`` and equals what the storage really holds.
- *Thread-safe.* Any method may be called from any thread; no lock is held during I/O.

A tier decides nothing: the index says what goes in and what goes out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.keys import PrefixKey

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
    """A chunk as a tier sees it: its key within the tier's namespace, and its length in blocks."""

    prefix_key: PrefixKey
    num_blocks: int


class Transfer(NamedTuple):
    """One chunk to move.

    ``buffer`` is a uint8 array of at least the payload's bytes rounded up to 4096, starting at an address that is a
    multiple of 4096 (a slab slot). ``put`` reads the payload from it and may set the padding behind it to zero.
    """

    ref: ChunkRef
    buffer: ByteArray


@dataclass
class TierCounters:
    """Events since the tier was opened. Read without a lock: single numbers are exact, sets of them nearly so."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    stored: int = 0
    full: int = 0
    failed: int = 0
    swept: int = 0  # leftovers of a crash, or unusable files, removed at start
    bytes_read: int = 0
    bytes_written: int = 0


class Tier(ABC):
    """A storage tier for the chunks of one namespace. See the module's docstring for what it promises."""

    name: str
    capacity_bytes: int
    counters: TierCounters

    @abstractmethod
    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, with its stored bytes, the longest untouched first. Called once, before any other use."""

    @abstractmethod
    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether ``get`` would find it."""

    @abstractmethod
    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers: HIT, MISS, CORRUPT or FAILED each.

        Raises:
            TierError: the tier as a whole is broken.
        """

    @abstractmethod
    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, replacing equal ones: STORED, FULL or FAILED each.

        Raises:
            TierError: the tier as a whole is broken.
        """

    @abstractmethod
    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks; those that are not here are ignored."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every chunk of the namespace: unreachable at once, even after a crash in the middle."""

    @abstractmethod
    def stored_bytes(self, num_blocks: int) -> int:
        """What a chunk of that many blocks will occupy, by which the index keeps the tier within its bound."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes occupied now, everything included."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks. Idempotent; calls after it raise ``ClosedError``."""
