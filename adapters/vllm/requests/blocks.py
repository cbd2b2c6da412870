"""Blocks as vLLM's manager lists them for a request. No vLLM types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.paged.base import BlockIds
from kvstore.transfer.mover import as_block_ids

NULL_BLOCK: Final = 0
"""Replaces a block in a table once it has left its layers' window. No request owns it."""


def are_whole(block_ids: Sequence[int], begin: int, num_blocks: int) -> bool:
    """Tell if a request has all of ``num_blocks`` blocks from ``begin`` on."""
    ids = block_ids[begin : begin + num_blocks]
    return len(ids) == num_blocks and NULL_BLOCK not in ids


def whole(block_ids: Sequence[int], begin: int, num_blocks: int) -> BlockIds | None:
    """Return these blocks; None if the request does not have all of them."""
    if not are_whole(block_ids, begin, num_blocks):
        return None
    return as_block_ids(block_ids[begin : begin + num_blocks])


def present(block_ids: Iterable[int]) -> list[int]:
    """Return the blocks that are a request's own, and not null."""
    return [block for block in block_ids if block != NULL_BLOCK]


def present_run(block_ids: Sequence[int], start: int, stop: int) -> tuple[int, int] | None:
    """Return the begin and end of a request's blocks between two positions, or None if there is a gap between them."""
    own = [position for position in range(start, stop) if block_ids[position] != NULL_BLOCK]
    if not own:
        return start, start
    return (own[0], own[-1] + 1) if own[-1] + 1 - own[0] == len(own) else None
