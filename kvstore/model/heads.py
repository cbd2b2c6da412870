"""KV heads of a worker and their places in its pages, so that engines of other tensor parallelism can share KV.

The stored form does not change: a reader takes its heads from the pages of workers that hold others. For that a page is
rows of heads, ``[rows, heads, bytes]``: one row if its heads come first, one for each token if its tokens do. The order
of bytes below a head is that of the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import LayoutError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout

SHARD_FIELD: Final = "shard"
LAYOUT_FIELD: Final = "layout"
"""The fields in which the namespaces of workers of engines with different tensor parallelism differ."""


def heads_of(shard: int, num_shards: int, total: int) -> range:
    """Return the KV heads of a shard of a model with ``total`` heads; with more shards than heads, some hold the same.

    Raises:
        LayoutError: the heads cannot be divided among so many shards.
    """
    if total % num_shards == 0:
        each = total // num_shards
        return range(shard * each, (shard + 1) * each)
    if num_shards % total == 0:
        head = shard // (num_shards // total)
        return range(head, head + 1)
    raise LayoutError(f"{total} KV heads cannot be divided among {num_shards} shards: name a size that divides them")


def shards_with(heads: range, num_shards: int, total: int) -> list[int]:
    """Return the fewest shards of ``num_shards`` that hold these heads together, in order.

    Raises:
        LayoutError: see ``heads_of``.
    """
    found, first = [], heads.start
    for shard in range(num_shards):
        held = heads_of(shard, num_shards, total)
        if first in held and first < heads.stop:
            found.append(shard)
            first = held.stop
    return found


class Part(NamedTuple):
    """KV held by one worker of another engine.

    Attributes:
        rank: that worker's number in its engine.
        shard: its part of the model's KV, as in its namespace.
        layout: layout of its chunks.
        heads: the KV heads in its pages.
        folders: the folders on this machine in which such a worker keeps chunks; () without a disk.
        sends_to: the rank of our worker that receives its handovers: the first of those that need it.
        num_readers: number of our workers that need it.
    """

    rank: int
    shard: str
    layout: KVLayout
    heads: range
    folders: tuple[Path, ...] = ()
    sends_to: int = 0
    num_readers: int = 1

    def namespace(self, own: Namespace) -> Namespace:
        """Return the namespace of its chunks, in the epoch of our ``own``."""
        fields = {**own.fields, SHARD_FIELD: self.shard, LAYOUT_FIELD: self.layout.fingerprint}
        return Namespace(fields)


@dataclass(frozen=True)
class Division:
    """Division of one of our workers' KV among the workers of an engine of another tensor-parallel size.

    Attributes:
        size: the tensor-parallel size of that engine.
        parts: the parts that hold our heads together.
        layout: layout of our chunks.
        heads: the KV heads in our pages.
        rows: for each layer, the rows of heads in a page.
        codec: codec with which chunks in the parts' folders may be encoded.
        encryption_keys: file with the keys of these chunks; None if they are not encrypted.

    Raises:
        LayoutError: the parts do not hold our heads, or a page does not consist of them.
    """

    size: int
    parts: tuple[Part, ...]
    layout: KVLayout
    heads: range
    rows: tuple[int, ...]
    codec: str = "none"
    encryption_keys: str | None = None

    def __post_init__(self) -> None:
        held = {head for part in self.parts for head in part.heads}
        if not held.issuperset(self.heads):
            raise LayoutError(f"workers of tensor-parallel size {self.size} do not hold the KV heads {self.heads}")
        for part in self.parts:
            theirs, ours = part.layout, self.layout
            alike = (theirs.planes, theirs.block_tokens, theirs.chunk_tokens, theirs.element)
            if alike != (ours.planes, ours.block_tokens, ours.chunk_tokens, ours.element) or (
                [size * len(self.heads) for size in theirs.page_bytes]
                != [size * len(part.heads) for size in ours.page_bytes]
            ):
                raise LayoutError(f"pages of tensor-parallel size {self.size} are not made of heads like ours")
        if len(self.rows) != self.layout.num_layers or any(
            size % (rows * len(self.heads)) for size, rows in zip(self.layout.page_bytes, self.rows, strict=True)
        ):
            raise LayoutError(f"pages of {self.layout.page_bytes} bytes are not {self.rows} rows of heads")

    @cached_property
    def part_bytes(self) -> int:
        """Bytes of the largest slot of a part."""
        return max(part.layout.slot_bytes for part in self.parts)

    def take(self, part: Part, source: ByteArray, target: ByteArray, num_blocks: int) -> None:
        """Copy our heads from a part's payload to their places in one of ours."""
        first, last = max(self.heads.start, part.heads.start), min(self.heads.stop, part.heads.stop)
        of_ours = slice(first - self.heads.start, last - self.heads.start)
        of_theirs = slice(first - part.heads.start, last - part.heads.start)
        for layer, rows in enumerate(self.rows):
            head_bytes = self.layout.page_bytes[layer] // (rows * len(self.heads))  # in one row
            theirs = source[slice(*part.layout.layer_range(layer, num_blocks))].reshape(-1, len(part.heads), head_bytes)
            ours = target[slice(*self.layout.layer_range(layer, num_blocks))].reshape(-1, len(self.heads), head_bytes)
            ours[:, of_ours] = theirs[:, of_theirs]
