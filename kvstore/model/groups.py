"""KV cache groups of a model: what a layer of each keeps, and which blocks the model needs to continue at a token.

A group of full attention keeps all tokens; its KV is stored in *chunks*, and is additive. Other groups keep the last
window, or one state. The blocks of these that a model needs to continue at token N are the *checkpoint* at N. A hit of
N tokens takes all chunks up to N and the checkpoint at N. A model whose only group is full needs no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from kvstore.model.errors import LayoutError


class GroupKind(Enum):
    """GroupKind of KV or state that the layers of a group keep."""

    FULL = "full"  # the KV of all tokens
    WINDOW = "window"  # the KV of the last tokens
    LOCAL = "local"  # the KV of the tokens since the last multiple of an attention chunk
    STATE = "state"  # one state of Mamba, linear attention or a convolution


@dataclass(frozen=True)
class Group:
    """One KV cache group, on one rank.

    Attributes:
        kind: kind of KV or state that its layers keep.
        block_tokens: tokens in one of its blocks.
        block_bytes: bytes of one block in all its layers on this rank.
        span_tokens: for a window, the tokens before the next one that it attends to; for local attention, its chunk.
    """

    kind: GroupKind
    block_tokens: int
    block_bytes: int
    span_tokens: int = 0

    def blocks_at(self, end_tokens: int) -> range:
        """Return the positions, in a request's block table, of the blocks needed to continue at a token.

        ``end_tokens`` is a multiple of ``block_tokens``.
        """
        end = end_tokens // self.block_tokens
        match self.kind:
            case GroupKind.FULL:
                return range(end)
            case GroupKind.WINDOW:
                return range(max(0, end_tokens - self.span_tokens) // self.block_tokens, end)
            case GroupKind.LOCAL:
                return range(end_tokens // self.span_tokens * self.span_tokens // self.block_tokens, end)
            case GroupKind.STATE:
                return range(max(0, end - 1), end)


class Row(NamedTuple):
    """One block of a checkpoint: the number of its group, and its position in that group's block table."""

    group: int
    position: int


class Run(NamedTuple):
    """Blocks of one group in a checkpoint, numbered within that group's blocks: ``begin`` to before ``end``."""

    group: int
    begin: int
    end: int


@dataclass(frozen=True)
class Groups:
    """All groups of a model whose KV is kept, on one rank; a group's number is its index here."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("this model has no KV cache that could be stored")

    @property
    def needs_checkpoints(self) -> bool:
        """True if any group keeps less than all tokens."""
        return bool(self.partial)

    @cached_property
    def full(self) -> tuple[int, ...]:
        """Numbers of the groups whose KV is stored in chunks."""
        return tuple(number for number, group in enumerate(self.groups) if group.kind is GroupKind.FULL)

    @cached_property
    def partial(self) -> tuple[int, ...]:
        """Numbers of the groups that are stored in checkpoints."""
        return tuple(number for number, group in enumerate(self.groups) if group.kind is not GroupKind.FULL)

    @cached_property
    def has_states(self) -> bool:
        """True if a group keeps one state; then a step may leave less than a checkpoint needs."""
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @cached_property
    def block_tokens(self) -> int:
        """The tokens after which a block of every group ends."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def checkpoint_bytes(self, end_tokens: int) -> int:
        """Return the bytes of the checkpoint at a token."""
        groups = (self.groups[number] for number in self.partial)
        return sum(group.block_bytes * len(group.blocks_at(end_tokens)) for group in groups)

    def bytes_of(self, runs: Iterable[Run]) -> int:
        """Return the bytes of some of the blocks of a checkpoint."""
        return sum(self.groups[run.group].block_bytes * (run.end - run.begin) for run in runs)


def cut(counts: Sequence[tuple[int, int]], ranks: Sequence[Groups], room_bytes: Sequence[int]) -> list[tuple[Run, ...]]:
    """Cut a checkpoint into parts, each of which fits into ``room_bytes`` of its rank, on every rank.

    ``counts`` lists the groups, each with its number of blocks in the checkpoint.

    Raises:
        LayoutError: a single block is larger than that.
    """
    parts: list[list[Run]] = []
    left = [0] * len(ranks)
    for number, count in counts:
        sizes = [rank.groups[number].block_bytes for rank in ranks]
        if any(size > room for size, room in zip(sizes, room_bytes, strict=True)):
            raise LayoutError(
                f"a block of KV cache group {number} has {max(sizes)} bytes, more than the {min(room_bytes)} of a "
                "chunk: set chunk_size higher"
            )
        begin = 0
        while begin < count:
            taken = min([count - begin, *(room // size for room, size in zip(left, sizes, strict=True) if size)])
            if not parts or not taken:
                parts.append([])
                left = list(room_bytes)
                continue
            parts[-1].append(Run(number, begin, begin + taken))
            left = [room - size * taken for room, size in zip(left, sizes, strict=True)]
            begin += taken
    return [tuple(part) for part in parts]
