"""Rows of the paged cache that hold a chunk of a request, or a part of a checkpoint, by its block tables.

No vLLM types.

Positions are counted in blocks of the whole model: the number of tokens after which a block of every group ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from kvstore.adapters.vllm.requests import blocks
from kvstore.adapters.vllm.requests.blocks import NULL_BLOCK
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.groups import GroupKind, Groups, Row
from kvstore.paged.base import BlockIds
from kvstore.paged.grouped import row_of, rows_of
from kvstore.transfer.mover import as_block_ids

Tables = Sequence[Sequence[int]]
"""A request's blocks in each group that is stored."""

TablesOf = Callable[[str], Tables]
"""Returns a request's current blocks."""

States = Mapping[tuple[int, int], int]
"""Blocks that hold the state at a token, by group and token."""

StatesOf = Callable[[str], States]
"""Returns the states that a request has after a step, according to vLLM."""

NO_STATES: Final[States] = MappingProxyType({})


@dataclass(frozen=True)
class RowMap:
    """Mapping from block tables to rows.

    Attributes:
        groups: the groups of the tables.
        checkpoints: what the model needs besides chunks; None if nothing.
    """

    groups: Groups
    checkpoints: Checkpoints | None = None

    @property
    def is_grouped(self) -> bool:
        """True if rows belong to several groups, or to one that does not keep all tokens."""
        return len(self.groups.groups) > 1 or self.groups.needs_checkpoints

    @property
    def has_chunks(self) -> bool:
        """True if some group keeps all tokens."""
        return bool(self.groups.full)

    def of_chunk(self, tables: Tables, begin: int, num_blocks: int) -> BlockIds | None:
        """Return the rows of the blocks from ``begin`` on; None if the request does not have all of them."""
        runs: list[BlockIds] = []
        for number in self.groups.full:
            ratio = self._ratio(number)
            run = blocks.whole(tables[number], begin * ratio, num_blocks * ratio)
            if run is None:
                return None
            runs.append(rows_of(number, run))
        return runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else None

    def to_load(self, tables: Tables, begin: int, start: int, stop: int, num_blocks: int) -> BlockIds | None:
        """Return the rows for the blocks ``start ... stop`` of a chunk that begins at ``begin`` and has ``num_blocks``.

        The rows of its other blocks are null. None if the request lacks one of the blocks.
        """
        runs = []
        for number in self.groups.full:
            ratio = self._ratio(number)
            own = blocks.whole(tables[number], start * ratio, (stop - start) * ratio)
            if own is None:
                return None
            ids = np.full(num_blocks * ratio, NULL_BLOCK, np.int64)
            ids[(start - begin) * ratio : (stop - begin) * ratio] = own
            runs.append(rows_of(number, ids))
        return np.concatenate(runs)

    def checkpoint(self, tables: Tables, states: States, end_tokens: int) -> list[BlockIds] | None:
        """Return the rows of all parts of the checkpoint at a token; None if the request does not have all of them."""
        assert self.checkpoints is not None, "this model needs none"
        parts = []
        for rows in self.checkpoints.rows(end_tokens):
            part = self._of_part(tables, rows, states, end_tokens)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _of_part(self, tables: Tables, rows: Sequence[Row], states: States, end_tokens: int) -> BlockIds | None:
        """Return the rows of a part. Tables locate KV, but only ``states`` tell which state a block holds."""
        ids = []
        for number, position in rows:
            if self.groups.groups[number].kind is GroupKind.STATE:
                block = states.get((number, end_tokens), NULL_BLOCK)
            else:
                block = _at(tables[number], position)
            if block == NULL_BLOCK:
                return None
            ids.append(row_of(number, block))
        return as_block_ids(ids)

    def part_to_load(self, tables: Tables, rows: Sequence[Row], begin_tokens: int) -> BlockIds | None:
        """Return the rows for a part of a checkpoint, null for blocks before ``begin_tokens``, which the request has.

        None if it lacks one of the others.
        """
        ids = []
        for number, position in rows:
            is_wanted = position * self.groups.groups[number].block_tokens >= begin_tokens
            block = _at(tables[number], position) if is_wanted else NULL_BLOCK
            if is_wanted and block == NULL_BLOCK:
                return None
            ids.append(row_of(number, block))
        return as_block_ids(ids)

    def states_at(self, tables: Tables, step_tokens: tuple[int, int], offered: States) -> States:
        """Return the states that exist after a step from one token to another.

        These are the states that vLLM ``offered``, the one that the step leaves behind, and the one that it began with,
        which it has copied first and left unchanged. The last two are of use where blocks of all groups end.
        """
        if not self.groups.has_states:
            return offered
        found = {
            (number, tokens): _at(tables[number], tokens // group.block_tokens - 1)
            for tokens in step_tokens
            for number, group in enumerate(self.groups.groups)
            if group.kind is GroupKind.STATE and tokens and not tokens % self.groups.block_tokens
        }
        return {**found, **offered}

    def _ratio(self, number: int) -> int:
        return self.groups.block_tokens // self.groups.groups[number].block_tokens


def _at(table: Sequence[int], position: int) -> int:
    return table[position] if position < len(table) else NULL_BLOCK
