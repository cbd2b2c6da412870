"""Manifests: what an engine has stored, used and removed since its last one. ``docs/FORMAT.md`` describes the bytes.

A manifest is a hint. What it says of a chunk that has been removed meanwhile ends in a miss; a chunk that no manifest
names is stored again. So a damaged one is skipped, and their order matters little.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.format.chunkfile import MAX_END_S
from kvstore.index.trails import is_trail
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.tiers.object.names import STAMP_CHARS

NAME_BYTES: Final = PREFIX_KEY_BYTES + 2
NAME_TYPE: Final = np.dtype(f"S{NAME_BYTES}")
MAX_MANIFEST_BYTES: Final = 1 << 29  # 23 million chunks
_MAGIC: Final = b"KVSLOG1\0"
_ENDS_MAGIC: Final = b"KVSLOG2\0"  # of manifests with ends, which older versions skip
_COUNTS: Final = struct.Struct("<8sIIIII")  # magic, stored, used, removed, merged, trails
_STAMP_TYPE: Final = np.dtype(f"S{STAMP_CHARS}")
_LENGTH: Final = struct.Struct("<H")
_SUM_BYTES: Final = 8
Names = npt.NDArray[np.bytes_]
Times = npt.NDArray[np.uint32]
NO_NAMES: Final[Names] = np.empty(0, NAME_TYPE)
NO_TIMES: Final[Times] = np.empty(0, np.uint32)
NO_ENDS: Final[Times] = np.empty((0, 2), np.uint32)


class Ends(NamedTuple):
    """Ends of a chunk's time to live, in seconds since 1970; 0 for none.

    Attributes:
        end_s: the end.
        written_s: the end in the chunk's header. If it is another one, the chunk is of another write, and has the end
            in its header.
    """

    end_s: int
    written_s: int

    def joined(self, other: Ends) -> Ends:
        """Return the longest time that was told of one write, in any order; of two writes the other's."""
        is_longer = self.written_s == other.written_s and (not self.end_s or 0 < other.end_s < self.end_s)
        return self if is_longer else other


ENDLESS: Final = Ends(0, 0)


def end_s_of(until_s: float | None) -> int:
    """Return an end in whole seconds, not later; 0 for none."""
    return 0 if until_s is None else int(min(max(1.0, until_s), MAX_END_S))


def name_of(ref: ChunkRef) -> bytes:
    """Return a chunk's key and length in 18 bytes, in the order of keys."""
    return ref.prefix_key + ref.num_blocks.to_bytes(2, "big")


def ref_of(name: bytes) -> ChunkRef:
    """Return the chunk with a name, which may have lost zeros at its end, as numpy removes them."""
    name = name.ljust(NAME_BYTES, b"\0")
    return ChunkRef(name[:PREFIX_KEY_BYTES], int.from_bytes(name[PREFIX_KEY_BYTES:], "big"))


@dataclass(frozen=True)
class Manifest:
    """Content of a manifest.

    Attributes:
        stored: names of the chunks that are there.
        used_s: when each was used last, in seconds since 1970.
        touched: names of chunks that were used since they were stored.
        removed: names of chunks that are gone.
        merged: stamps of the manifests that a base contains, which are not to be read after it.
        trails: keys at the ends of the blocks of stored chunks, as far as they are known.
        ends: ``Ends`` of each stored chunk; empty if none has any.
    """

    stored: Names = field(default_factory=lambda: NO_NAMES)
    used_s: Times = field(default_factory=lambda: NO_TIMES)
    touched: Names = field(default_factory=lambda: NO_NAMES)
    removed: Names = field(default_factory=lambda: NO_NAMES)
    merged: frozenset[str] = frozenset()
    trails: tuple[bytes, ...] = ()
    ends: Times = field(default_factory=lambda: NO_ENDS)

    def encode(self) -> bytes:
        """Return the bytes of the object."""
        merged = np.array([stamp.encode() for stamp in sorted(self.merged)], _STAMP_TYPE)
        counts = len(self.stored), len(self.touched), len(self.removed), len(merged), len(self.trails)
        trails = (_LENGTH.pack(len(trail) // PREFIX_KEY_BYTES) + trail for trail in self.trails)
        body = b"".join(
            (
                _COUNTS.pack(_ENDS_MAGIC if len(self.ends) else _MAGIC, *counts),
                self.stored.tobytes(),
                self.used_s.astype("<u4").tobytes(),
                self.ends.astype("<u4").tobytes(),
                self.touched.tobytes(),
                self.removed.tobytes(),
                merged.tobytes(),
                *trails,
            )
        )
        return body + xxhash.xxh3_64_digest(body)


def decode(data: bytes) -> Manifest | None:
    """Return the manifest in an object; None if it is damaged or something else. Never raises, for any bytes."""
    body = memoryview(data)[:-_SUM_BYTES]
    if len(body) < _COUNTS.size or xxhash.xxh3_64_digest(body) != data[-_SUM_BYTES:]:
        return None
    magic, stored, touched, removed, num_merged, num_trails = _COUNTS.unpack_from(body)
    num_ends = stored if magic == _ENDS_MAGIC else 0
    facts = NAME_BYTES * stored, 4 * stored, 8 * num_ends
    sizes = (*facts, NAME_BYTES * touched, NAME_BYTES * removed, STAMP_CHARS * num_merged)
    begin = _COUNTS.size
    if magic not in {_MAGIC, _ENDS_MAGIC} or begin + sum(sizes) > len(body):
        return None
    parts = []
    for size in sizes:
        parts.append(body[begin : begin + size])
        begin += size
    trails = _trails(body[begin:], num_trails)
    if trails is None:
        return None
    named = [np.frombuffer(parts[index], NAME_TYPE) for index in (0, 3, 4)]
    used_s, ends = (np.frombuffer(parts[index], "<u4").astype(np.uint32) for index in (1, 2))
    merged = (stamp.decode("ascii", "replace") for stamp in np.frombuffer(parts[5], _STAMP_TYPE).tolist())
    return Manifest(named[0], used_s, named[1], named[2], frozenset(merged), trails, ends.reshape(num_ends, 2))


def _trails(data: memoryview, num_trails: int) -> tuple[bytes, ...] | None:
    """Return the trails that fill ``data``; None if it holds anything else."""
    found, begin = [], 0
    for _ in range(num_trails):
        if begin + _LENGTH.size > len(data):
            return None
        (num_blocks,) = _LENGTH.unpack_from(data, begin)
        begin += _LENGTH.size
        trail = bytes(data[begin : begin + num_blocks * PREFIX_KEY_BYTES])
        if not is_trail(trail, num_blocks) or len(trail) != num_blocks * PREFIX_KEY_BYTES:
            return None
        found.append(trail)
        begin += len(trail)
    return tuple(found) if begin == len(data) else None
