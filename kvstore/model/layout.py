"""Layout of a chunk's payload: the geometry of one worker's KV, in bytes.

A payload is layer-major, ``[layer][plane][block][page bytes]``: each block of each layer is copied as opaque bytes in
the physical order of the attention backend. A *plane* is one dense region that a block occupies in a layer: one where K
and V share a block, two where they are separate. This module does not use tensors; ``paged`` derives a layout from
them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from kvstore.model.errors import LayoutError

ALIGNMENT_BYTES = 4096


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class KVLayout:
    """The geometry of the KV that one worker holds.

    Attributes:
        page_bytes: for each layer, in order, bytes of one block in one plane.
        planes: dense regions a block occupies in each layer (1 or 2).
        block_tokens: tokens in a block of the serving engine.
        chunk_tokens: tokens in a full chunk; a multiple of ``block_tokens``.
        physical: describes the order of bytes inside a page; compared, never parsed.
        element: element type of all pages: ``bf16``, ``f16``, ``f32``, ``f8``, or ``opaque`` for anything else. Only
            codecs use it, and ``page_axes``: a payload stays opaque bytes, and ``physical`` tells layouts apart.
        page_axes: shape of a page as ``[a, tokens, b]`` elements, where each pair of a and b is a channel; None if not
            known.
    """

    page_bytes: tuple[int, ...]
    planes: int
    block_tokens: int
    chunk_tokens: int
    physical: str = "opaque"
    element: str = "opaque"
    page_axes: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        numbers = (*self.page_bytes, self.planes, self.block_tokens, self.chunk_tokens, *(self.page_axes or ()))
        if not all(type(number) is int for number in numbers):
            raise LayoutError(f"the numbers of a layout must be integers, not {numbers}")
        if type(self.physical) is not str or type(self.element) is not str:
            raise LayoutError(f"physical and element must be strings, not {self.physical!r} and {self.element!r}")
        if not self.page_bytes or min(self.page_bytes) <= 0:
            raise LayoutError(f"a layout needs at least one layer and positive page sizes, not {self.page_bytes}")
        if self.block_tokens <= 0 or self.chunk_tokens <= 0 or self.chunk_tokens % self.block_tokens:
            fitting = round_up(max(self.chunk_tokens, 1), max(self.block_tokens, 1))
            raise LayoutError(
                f"chunk_size {self.chunk_tokens} is not a multiple of the block size {self.block_tokens}: "
                f"set chunk_size to a multiple of it, such as {fitting}"
            )
        if self.planes <= 0:
            raise LayoutError(f"a block occupies 1 or 2 regions in each layer, not {self.planes}")
        if self.page_axes is not None and min(self.page_axes) <= 0:  # codecs divide by them
            raise LayoutError(f"the axes of a page must be positive, not {self.page_axes}")

    def to_json(self) -> str:
        """Return all fields as JSON, for tools that read chunks without the engine that stored them."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> KVLayout:
        """Read a layout from the text of ``to_json``.

        Raises:
            LayoutError: the text is something else.
        """
        try:
            read = json.loads(text).items()
            fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in read}
            return cls(**fields)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise LayoutError(f"not the JSON of a layout: {error}") from error

    @cached_property
    def num_layers(self) -> int:
        """Layers held by this worker."""
        return len(self.page_bytes)

    @cached_property
    def blocks_per_chunk(self) -> int:
        """Blocks in a full chunk."""
        return self.chunk_tokens // self.block_tokens

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and planes."""
        return self.planes * sum(self.page_bytes)

    @cached_property
    def _layer_starts(self) -> tuple[int, ...]:
        """For one block, the bytes of all layers before each layer; the last entry is the total."""
        return tuple(accumulate((self.planes * size for size in self.page_bytes), initial=0))

    def payload_bytes(self, num_blocks: int) -> int:
        """Return the bytes of a chunk of ``num_blocks`` blocks."""
        return num_blocks * self.block_bytes

    def layer_range(self, layer: int, num_blocks: int) -> tuple[int, int]:
        """Return begin and end of ``layer`` in the payload of a chunk of ``num_blocks`` blocks."""
        return self._layer_starts[layer] * num_blocks, self._layer_starts[layer + 1] * num_blocks

    def layer_ranges(self, num_blocks: int, layers: range | None = None) -> list[tuple[int, int]]:
        """Return ``layer_range`` of every layer, or of the given ``layers``."""
        wanted = range(self.num_layers) if layers is None else layers  # which may be empty
        return [self.layer_range(layer, num_blocks) for layer in wanted]

    def front_ranges(self, num_blocks: int, front_blocks: int) -> list[tuple[int, int]]:
        """Return begin and end of the leading blocks in the payload of a chunk, for each plane of each layer.

        Concatenated, these bytes are the payload of a chunk of ``front_blocks`` blocks.
        """
        ranges = []
        for layer, page_bytes in enumerate(self.page_bytes):
            first, end = self.layer_range(layer, num_blocks)
            begins = range(first, end, page_bytes * num_blocks)
            ranges += [(begin, begin + page_bytes * front_blocks) for begin in begins]
        return ranges

    def layer_groups(self, least_bytes: int) -> list[range]:
        """Return the layers in groups, in order; in a full chunk each but the last has at least ``least_bytes``."""
        groups, first = [], 0
        for layer in range(self.num_layers):
            end_bytes = self.layer_range(layer, self.blocks_per_chunk)[1]
            is_enough = end_bytes - self.layer_range(first, self.blocks_per_chunk)[0] >= least_bytes
            if is_enough or layer + 1 == self.num_layers:
                groups.append(range(first, layer + 1))
                first = layer + 1
        return groups

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slab slot: a full chunk, rounded up so that direct I/O can use it."""
        return round_up(self.payload_bytes(self.blocks_per_chunk), ALIGNMENT_BYTES)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits, equal only for layouts in which a block's bytes have the same meaning."""
        facts = f"{self.page_bytes}|{self.planes}|{self.block_tokens}|{self.physical}"
        return hashlib.sha256(facts.encode()).hexdigest()[:16]
