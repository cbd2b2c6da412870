"""Payload of chunks: its geometry in messages, its pages in a cache server's pool, and its pieces on their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypeAlias

import numpy as np
import xxhash

try:
    import msgspec
except ImportError as error:
    raise ImportError("the cache server and its clients need msgspec: pip install 'vllm-kvstore[server]'") from error

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import LayoutError, ProtocolError
from kvstore.model.layout import KVLayout

if TYPE_CHECKING:
    from typing_extensions import Buffer

PAGE_BYTES: Final = 16 << 10
Run: TypeAlias = tuple[int, int]
"""Consecutive pages: the number of the first, and their count."""

_STEP_BYTES: Final = 256 << 10  # fits into a core's own cache
_MAX_LAYERS: Final = 1024
MAX_CHUNK_PARTS: Final = 1 << 18  # blocks of a chunk times layers: the length of tables for storing it
_Short: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
_Axis: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]
_encoder = msgspec.msgpack.Encoder()


class Geometry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A ``KVLayout`` in a message."""

    page_bytes: Annotated[
        tuple[Annotated[int, msgspec.Meta(gt=0, le=1 << 32)], ...], msgspec.Meta(max_length=_MAX_LAYERS)
    ]
    planes: Annotated[int, msgspec.Meta(gt=0, le=64)]
    block_tokens: Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]
    chunk_tokens: Annotated[int, msgspec.Meta(gt=0, le=1 << 24)]
    physical: _Short
    element: Annotated[str, msgspec.Meta(max_length=32)]
    page_axes: tuple[_Axis, _Axis, _Axis] | None

    @classmethod
    def of(cls, layout: KVLayout) -> Geometry:
        """Return the geometry of a layout, to be sent."""
        return cls(**{**asdict(layout), "page_bytes": tuple(layout.page_bytes)})

    def layout(self) -> KVLayout:
        """Return the layout that was sent.

        Raises:
            ProtocolError: no layout has these fields.
        """
        try:
            layout = KVLayout(**msgspec.structs.asdict(self))
        except LayoutError as error:
            raise ProtocolError(str(error)) from error
        if layout.blocks_per_chunk * layout.num_layers > MAX_CHUNK_PARTS:
            raise ProtocolError(f"chunks of {layout.blocks_per_chunk} blocks of {layout.num_layers} layers")
        return layout


def encode_geometry(layout: KVLayout) -> bytes:
    """Encode a geometry as bytes, equal for equal layouts."""
    return _encoder.encode(Geometry.of(layout))


class Extent(NamedTuple):
    """A range of the pool's bytes."""

    begin: int
    num_bytes: int


def extents(runs: Sequence[Run], offset_bytes: int, num_bytes: int) -> list[Extent]:
    """Return the ranges of the pool for ``num_bytes`` from an offset on in the concatenated runs.

    Raises:
        ProtocolError: the runs are shorter.
    """
    found = []
    for first, pages in runs:
        run_bytes = pages * PAGE_BYTES
        if offset_bytes < run_bytes and num_bytes:
            take = min(run_bytes - offset_bytes, num_bytes)
            found.append(Extent(first * PAGE_BYTES + offset_bytes, take))
            num_bytes -= take
        offset_bytes = max(0, offset_bytes - run_bytes)
    if num_bytes:
        raise ProtocolError("a part of a chunk lies behind its end")
    return found


def checksum(parts: Iterable[Buffer]) -> bytes:
    """Return the xxh3_64 of the concatenated parts."""
    running = xxhash.xxh3_64()
    for part in parts:
        running.update(part)
    return running.digest()


def scatter(payload: ByteArray, parts: Iterable[ByteArray]) -> None:
    """Copy a payload into consecutive parts, which together have as many bytes."""
    begin = 0
    for part in parts:
        part[:] = payload[begin : begin + len(part)]
        begin += len(part)


class Placing:
    """Copies bytes to several places in turn, and computes the checksum of the copied bytes.

    It copies in steps, and computes the checksum of each while it is in the processor's cache, so that memory is read
    only once.
    """

    def __init__(self) -> None:
        self._running = xxhash.xxh3_64()

    def copy(self, source: memoryview, target: ByteArray) -> None:
        """Copy the next bytes; both arrays have the same length."""
        arrived = np.frombuffer(source, np.uint8)
        for begin in range(0, len(target), _STEP_BYTES):
            step = target[begin : begin + _STEP_BYTES]
            step[:] = arrived[begin : begin + _STEP_BYTES]
            self._running.update(step.data)

    @property
    def checksum(self) -> bytes:
        """xxh3_64 of all bytes copied so far."""
        return self._running.digest()
