"""How a checkpoint is stored: in parts, each of which every tier takes for an ordinary chunk.

A part's payload is its blocks, one group after the other, each as ``layout`` has it, and zeros up to whole blocks of a
chunk. Its key names the tokens before the checkpoint, which blocks it holds, and how many parts there are: a checkpoint
cut in another way is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from kvstore.checkpoints.groups import Groups, Row, cut
from kvstore.chunks import ChunkRef
from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.layout import KVLayout

_KNOWN_CUTS: Final = 4096  # a window is whole from some token on, and cut alike from there


class _Cut(NamedTuple):
    """A part of any checkpoint at one token: what its key is made of, its length in blocks of a chunk, its rows."""

    label: bytes
    num_blocks: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a model, as all its ranks store them. Thread-safe.

    Attributes:
        ranks: the groups of each rank; alike but for their bytes.
        layouts: of a chunk on each rank.
        interval_tokens: how often a checkpoint is stored, besides where prompts end or part; 0 for no more than that.
    """

    ranks: tuple[Groups, ...]
    layouts: tuple[KVLayout, ...]
    interval_tokens: int = 0

    @property
    def groups(self) -> Groups:
        """Those of the first rank."""
        return self.ranks[0]

    def rows(self, end_tokens: int) -> list[tuple[Row, ...]]:
        """The blocks of each part of a checkpoint at a token.

        Raises:
            LayoutError: a block does not fit into a chunk.
        """
        return [one.rows for one in _cuts(self.ranks, self.layouts, end_tokens)]

    def refs(self, prefix_key: PrefixKey, end_tokens: int) -> Iterator[ChunkRef]:
        """The chunks that the parts of a checkpoint are stored as, each made when it is asked for."""
        for label, num_blocks, _ in _cuts(self.ranks, self.layouts, end_tokens):
            yield ChunkRef(_part_key(prefix_key, label), num_blocks)

    def is_wanted(self, begin_tokens: int, end_tokens: int, marks: Sequence[int]) -> bool:
        """Whether a checkpoint is worth its room at the end of a chunk, the tokens from ``begin_tokens`` on.

        ``marks`` are where the prompt ends, and where others parted from it. One that is no larger than a chunk always
        is.
        """
        if end_tokens in marks:
            return True
        if self.interval_tokens and end_tokens // self.interval_tokens > begin_tokens // self.interval_tokens:
            return True
        layout = self.layouts[0]
        is_small = self.groups.checkpoint_bytes(end_tokens) <= layout.payload_bytes(layout.blocks_per_chunk)
        return is_small and bool(self.groups.full)


def _part_key(prefix_key: PrefixKey, label: bytes) -> PrefixKey:
    return hashlib.sha256(b"kvstore/checkpoint/1\0" + prefix_key + label).digest()[:PREFIX_KEY_BYTES]


@lru_cache(_KNOWN_CUTS)
def _cuts(ranks: tuple[Groups, ...], layouts: tuple[KVLayout, ...], end_tokens: int) -> tuple[_Cut, ...]:
    room_bytes = [layout.payload_bytes(layout.blocks_per_chunk) for layout in layouts]
    parts = cut(ranks[0].rows_at(end_tokens), ranks, room_bytes)
    cuts = []
    for number, rows in enumerate(parts):
        runs = [(group, len(list(run))) for group, run in groupby(row.group for row in rows)]
        label = f"{number}/{len(parts)} {runs}".encode()
        num_blocks = max(
            -(-sum(rank.groups[row.group].block_bytes for row in rows) // layout.block_bytes)
            for rank, layout in zip(ranks, layouts, strict=True)
        )
        cuts.append(_Cut(label, num_blocks, rows))
    return tuple(cuts)
