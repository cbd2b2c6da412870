"""Geometry of chunks, as encoded in messages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final, TypeAlias

try:
    import msgspec
except ImportError as error:
    raise ImportError("the cache server and its clients need msgspec: pip install 'vllm-kvstore[server]'") from error

from kvstore.model.errors import LayoutError, ProtocolError
from kvstore.model.layout import KVLayout

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
