"""The index's answers, and the chunks of a token sequence that they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from kvstore.model.checkpoints import End
from kvstore.model.chunks import ChunkRef, refs_of
from kvstore.model.keys import PrefixHasher


class Match(NamedTuple):
    """The longest prefix that can be loaded.

    Attributes:
        refs: the chunks that hold it, in order, from chunk number ``first_chunk`` on. The last one may hold more.
        num_tokens: tokens from position 0 to its end.
        first_chunk: number of the chunk in which the caller's own tokens end.
        checkpoint: the parts of the checkpoint at ``num_tokens``, if the model needs one to continue there.
        chunk_tokens: tokens that the chunks alone cover, if the model needs checkpoints.
    """

    refs: tuple[ChunkRef, ...]
    num_tokens: int
    first_chunk: int = 0
    checkpoint: tuple[ChunkRef, ...] = ()
    chunk_tokens: int = 0

    def front_blocks(self, block_tokens: int, blocks_per_chunk: int) -> int:
        """Return how many leading blocks of the last chunk the match uses; 0 for all of them."""
        before = self.first_chunk * blocks_per_chunk + sum(ref.num_blocks for ref in self.refs[:-1])
        num_blocks = self.num_tokens // block_tokens - before
        return num_blocks if self.refs and num_blocks < self.refs[-1].num_blocks else 0


NO_MATCH = Match((), 0)


class Place(Enum):
    """The places of a chunk."""

    MEMORY = "memory"  # in a slot
    DISK = "disk"
    REMOTE = "remote"


class MissReason(Enum):
    """Reason why the first chunk after a match was not found."""

    NEVER_STORED = "never_stored"  # or so long ago that its key has been forgotten
    EVICTED = "evicted"  # evicted to make room
    REMOVED = "removed"  # cleared, or expired
    LOST = "lost"  # its bytes were missing or damaged
    NOT_YET = "not_yet"  # it is being stored or loaded
    TIER_DOWN = "tier_down"  # it is, or may be, in a tier that is down
    NO_CHECKPOINT = "no_checkpoint"  # it is here, but the checkpoint to continue from it is not
    NO_ROOM = "no_room"  # it is in a slower tier, and no slot is free to load it
    TOO_SHORT = "too_short"  # the hit is shorter than ``min_retrieve_tokens``
    RECOMPUTE_FASTER = "recompute_faster"  # loading it would have taken longer than computing it
    NOT_TAKEN = "not_taken"  # vLLM took less than it was offered
    VERIFIED = "verified"  # it was computed for comparison
    SWITCHED_OFF = "switched_off"  # loads are disabled, or not part of the engine's role


class TierState(NamedTuple):
    """State of the slower tiers, as far as it changes plans. A tier that does not exist answers.

    Attributes:
        disk_answers: False while chunks cannot be read from the disk. Writes continue, and fail at once until one of
            them succeeds again.
        remote_answers: False while the remote tier is neither asked nor read. Writes continue.
        remote_keeps_trails: the remote tier is known to keep the trails of chunks sent there, so tails that a longer
            chunk there holds are not sent.
        remote_keeps_lifetimes: the remote tier keeps times to live, so chunks that have one are sent there.
    """

    disk_answers: bool = True
    remote_answers: bool = True
    remote_keeps_trails: bool = False
    remote_keeps_lifetimes: bool = False

    def joined(self, other: TierState) -> TierState:
        """Return the state of the tiers of two workers together."""
        return TierState(*(ours and theirs for ours, theirs in zip(self, other, strict=True)))


class LoadStep(NamedTuple):
    """Load one chunk from its slot, or from a slower tier through that slot, into the paged cache.

    Attributes:
        holder: the longer chunk whose leading blocks are read as this chunk; None if it is read itself.
    """

    ref: ChunkRef
    slot: int
    source: Place
    holder: ChunkRef | None = None

    @property
    def read(self) -> ChunkRef:
        """The chunk requested from the source."""
        return self.holder or self.ref


class StoreStep(NamedTuple):
    """Gather one chunk into its slot unless it is there already, then write it to ``targets`` in the background.

    Attributes:
        trail: the keys at the ends of its blocks; empty if unknown.
        tenant: of its requests, see ``KeyExtras.tenant``.
        owner: the id of its owner, for notes on disk and cache servers; empty without a name.
        until_s: the end of its time to live, on the index's clock; for those who carry the plan out in seconds since
            1970. None for no end.
    """

    ref: ChunkRef
    slot: int
    targets: tuple[Place, ...]
    gather: bool = True
    trail: bytes = b""
    tenant: bytes = b""
    owner: bytes = b""
    until_s: float | None = None

    def later(self, by_s: float) -> StoreStep:
        """Return it on a clock that is so far ahead."""
        return self if self.until_s is None else self._replace(until_s=self.until_s + by_s)


@dataclass
class IndexCounters:
    """Decisions since the index was created."""

    stored: int = 0  # chunks that became readable by a store
    known: int = 0  # offered, but already here or being stored
    refused: int = 0  # offered, but no slot could be freed
    failed_stores: int = 0
    failed_loads: int = 0
    lost_chunks: int = 0  # forgotten after a load found them missing or damaged
    expired: int = 0
    evicted_memory: int = 0
    evicted_disk: int = 0
    writes_done: int = 0
    writes_failed: int = 0
    writes_dropped: int = 0  # not queued: the queue or the disk was full
    writes_retried: int = 0  # planned when a chunk that had not been written was offered again
    sends_done: int = 0  # to the remote tier
    sends_failed: int = 0
    sends_dropped: int = 0  # not queued: the queue was full
    superseded_tails: int = 0


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
    refs = refs_of(hasher.chunk_keys(), hasher.blocks_per_chunk)
    if with_tail and (keys := hasher.block_keys(len(refs))):
        refs.append(ChunkRef(keys[-1], len(keys)))
    return refs


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


def pin_name(hasher: PrefixHasher) -> str:
    """Return the name of the lease that pins the whole blocks of exactly this sequence."""
    refs = chunk_refs(hasher, with_tail=True)
    return f"pin {refs[-1].prefix_key.hex() if refs else ''}"
