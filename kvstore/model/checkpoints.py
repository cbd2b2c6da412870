"""Storage of checkpoints in parts, each of which is an ordinary chunk to every tier.

A part's payload is its blocks, one group after the other in the order of ``layout``, padded with zeros to whole blocks
of a chunk. Its key covers the tokens before the checkpoint, the blocks it holds, and the number of parts, so a
checkpoint cut in another way is a different one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from kvstore.model.chunks import ChunkRef
from kvstore.model.groups import Groups, Row, Run, cut
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.model.layout import KVLayout

_DOMAIN: Final = b"kvstore/checkpoint/1\0"
_MOST_KNOWN: Final = 1 << 14  # ends at which a checkpoint may be: 32 sequences of 512 chunks

End = tuple[int, PrefixKey]
"""A point at which a sequence may continue: the number of tokens before it, and their key."""


class _Cut(NamedTuple):
    """One part of every checkpoint with the same number of blocks in each group.

    Attributes:
        label: the input of its key, apart from the key of the tokens before the checkpoint.
        num_blocks: its length in blocks of a chunk.
        runs: the blocks it holds.
    """

    label: bytes
    num_blocks: int
    runs: tuple[Run, ...]

    def ref(self, prefix_key: PrefixKey) -> ChunkRef:
        """Return the chunk that this part is stored as."""
        return ChunkRef(sha256(_DOMAIN + prefix_key + self.label).digest()[:PREFIX_KEY_BYTES], self.num_blocks)


@dataclass(frozen=True)
class _Known:
    """Cached results, since a lookup asks for all ends of a sequence, and vLLM repeats its lookups."""

    at: dict[int, tuple[_Cut, ...]] = field(default_factory=dict)  # by end
    of: dict[tuple[int, ...], tuple[_Cut, ...]] = field(default_factory=dict)  # by blocks of each group
    first: dict[PrefixKey, ChunkRef | None] = field(default_factory=dict)  # the first part, by the tokens before it


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a model, as all its ranks store them. Thread-safe.

    Attributes:
        ranks: the groups of each rank, which differ only in their bytes.
        layouts: layout of a chunk on each rank.
        interval_tokens: distance of stored checkpoints, in addition to those where prompts end or diverge; 0 for only
            these.
    """

    ranks: tuple[Groups, ...]
    layouts: tuple[KVLayout, ...]
    interval_tokens: int = 0
    _known: _Known = field(default_factory=_Known, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that every checkpoint can be cut.

        Raises:
            LayoutError: a block of a rank does not fit into a chunk.
        """
        self._cut((1,) * len(self.groups.partial))

    @property
    def groups(self) -> Groups:
        """Groups of the first rank."""
        return self.ranks[0]

    def rows(self, end_tokens: int) -> list[tuple[Row, ...]]:
        """Return the blocks of each part of a checkpoint at a token."""
        groups, parts = self.groups.groups, []
        for one in self._cuts(end_tokens):
            runs = ((run.group, groups[run.group].blocks_at(end_tokens)[run.begin : run.end]) for run in one.runs)
            parts.append(tuple(Row(number, position) for number, positions in runs for position in positions))
        return parts

    def refs(self, prefix_key: PrefixKey, end_tokens: int) -> Iterator[ChunkRef]:
        """Yield the chunks that the parts of a checkpoint are stored as, made on demand."""
        return (one.ref(prefix_key) for one in self._cuts(end_tokens))

    def first_refs(self, ends: Iterable[End]) -> Iterator[ChunkRef | None]:
        """Yield the first part of the checkpoint at each of these ends; None where no state is needed to continue."""
        known, cuts_at = self._known.first, self._known.at
        if len(known) > _MOST_KNOWN:
            known.clear()
        for end_tokens, prefix_key in ends:
            try:
                first = known[prefix_key]
            except KeyError:
                cuts = cuts_at.get(end_tokens) or self._cuts(end_tokens)
                first = known[prefix_key] = cuts[0].ref(prefix_key) if cuts else None
            yield first

    def is_wanted(self, begin_tokens: int, end_tokens: int, marks: Sequence[int]) -> bool:
        """Tell if a checkpoint is worth storing at the end of the chunk ``[begin_tokens, end_tokens)``.

        ``marks`` are the end of the prompt and the points where other prompts diverged from it. A checkpoint no larger
        than a chunk is always stored.
        """
        if end_tokens in marks:
            return True
        if self.interval_tokens and end_tokens // self.interval_tokens > begin_tokens // self.interval_tokens:
            return True
        return bool(self.groups.full) and self._is_small(end_tokens)

    def _is_small(self, end_tokens: int) -> bool:
        """Tell if it is no larger than a chunk, over all ranks; some ranks may have no layers of a kind."""
        checkpoint_bytes = sum(rank.checkpoint_bytes(end_tokens) for rank in self.ranks)
        chunk_bytes = sum(
            layout.payload_bytes(layout.blocks_per_chunk)
            for rank, layout in zip(self.ranks, self.layouts, strict=True)
            if any(rank.groups[number].block_bytes for number in rank.full)
        )
        return checkpoint_bytes <= chunk_bytes

    def _cuts(self, end_tokens: int) -> tuple[_Cut, ...]:
        """Return the parts of a checkpoint at a token."""
        cuts = self._known.at.get(end_tokens)
        if cuts is None:
            counts = tuple(len(self.groups.groups[number].blocks_at(end_tokens)) for number in self.groups.partial)
            cuts = self._known.of.get(counts)
            if cuts is None:
                cuts = self._known.of[counts] = self._cut(counts)
            if len(self._known.at) > _MOST_KNOWN:
                self._known.at.clear()
            self._known.at[end_tokens] = cuts
        return cuts

    def _cut(self, counts: tuple[int, ...]) -> tuple[_Cut, ...]:
        """Return the parts of a checkpoint with these numbers of blocks of the groups in ``partial``."""
        room_bytes = [layout.payload_bytes(layout.blocks_per_chunk) for layout in self.layouts]
        parts = cut(list(zip(self.groups.partial, counts, strict=True)), self.ranks, room_bytes)
        cuts = []
        for number, runs in enumerate(parts):
            label = f"{number}/{len(parts)} {[(run.group, run.end - run.begin) for run in runs]}".encode()
            sizes = (rank.bytes_of(runs) for rank in self.ranks)
            blocks = (-(-size // layout.block_bytes) for size, layout in zip(sizes, self.layouts, strict=True))
            cuts.append(_Cut(label, max(blocks), runs))
        return tuple(cuts)
