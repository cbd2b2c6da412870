"""Parts of a hit: its chunks, with the blocks of the request that each of them fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.adapters.vllm.requests import blocks
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.index.plans import Match
from kvstore.model.chunks import ChunkRef


class Part(NamedTuple):
    """A chunk, the position of its first block in its request, and the positions of the wanted blocks.

    Attributes:
        is_own: the request has all tokens of the chunk, and not only those of its first blocks.
    """

    ref: ChunkRef
    begin: int
    start: int
    stop: int
    is_own: bool

    @property
    def known(self) -> range:
        """The positions of the chunk's blocks, as far as the request has their tokens."""
        return self.ref.blocks_from(self.begin) if self.is_own else range(self.begin, self.stop)

    @property
    def front_blocks(self) -> int:
        """Number of leading blocks of the chunk that are wanted; 0 if the request has the others, too."""
        return 0 if self.is_own else self.stop - self.begin


def overlapping(match: Match, rules: SaveRules, begin_tokens: int, num_tokens: int) -> Iterator[Part]:
    """Yield the chunks of a match that hold any of ``num_tokens`` from ``begin_tokens`` on, with those blocks."""
    first_block, end_block = begin_tokens // rules.block_tokens, -(-(begin_tokens + num_tokens) // rules.block_tokens)
    begin = match.first_chunk * rules.chunk_tokens // rules.block_tokens
    for ref in match.refs:
        end = begin + ref.num_blocks
        if begin < end_block and end > first_block:
            is_own = end * rules.block_tokens <= match.num_tokens
            yield Part(ref, begin, max(begin, first_block), min(end, end_block), is_own)
        begin = end


def with_blocks(parts: Iterable[Part], block_ids: Sequence[int]) -> Iterator[Part]:
    """Yield the parts for which a request has blocks, up to a chunk that cannot be loaded."""
    for part in parts:
        run = blocks.present_run(block_ids, part.start, part.stop)
        if run is None:
            return
        if run[0] < run[1]:
            yield part._replace(start=run[0], stop=run[1])
