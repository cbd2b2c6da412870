"""Pieces of a request that can be kept or handed over: its chunks, and the checkpoints at the ends of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.adapters.vllm.requests.rows import RowMap, States, Tables
from kvstore.adapters.vllm.requests.tracker import SaveSpec
from kvstore.model.chunks import ChunkRef
from kvstore.paged.base import BlockIds


class Piece(NamedTuple):
    """A chunk, or a part of a checkpoint.

    Attributes:
        ref: its reference in the store.
        rows: its rows in the paged cache; None if the request lacks some of its blocks.
        begin: the position of its chunk's first block.
        end_tokens: the token at which its chunk ends, or of its checkpoint.
        checkpoint: for a part, all parts of its checkpoint.
    """

    ref: ChunkRef
    rows: BlockIds | None
    begin: int
    end_tokens: int
    checkpoint: tuple[ChunkRef, ...] = ()


def pieces_of(rows: RowMap, save: SaveSpec, tables: Tables, states: States) -> Iterator[Piece]:
    """Yield the pieces that a step completes, in the order of their ends, without checkpoints that lack a block."""
    block_tokens, checkpoints = rows.groups.block_tokens, rows.checkpoints
    for ref, begin in save.first_blocks().items():
        begin_tokens, end_tokens = begin * block_tokens, (begin + ref.num_blocks) * block_tokens
        if rows.has_chunks:
            yield Piece(ref, rows.of_chunk(tables, begin, ref.num_blocks), begin, end_tokens)
        if checkpoints is None or not checkpoints.is_wanted(begin_tokens, end_tokens, save.marks):
            continue
        parts = rows.checkpoint(tables, states, end_tokens)
        if parts is None:
            continue
        refs = tuple(checkpoints.refs(ref.prefix_key, end_tokens))
        for part, ids in zip(refs, parts, strict=True):
            yield Piece(part, ids, begin, end_tokens, refs)
