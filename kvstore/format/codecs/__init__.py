"""Codecs for chunks that leave memory: disk, Redis, packs, wire. ``docs/codecs.md`` helps to choose one."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from kvstore.format.chunkfile import sealed_name
from kvstore.format.codecs.base import Codec
from kvstore.format.codecs.int8 import Int8Codec
from kvstore.format.codecs.lossless import Lz4Codec, SplitCodec
from kvstore.model.errors import CodecError, ConfigError
from kvstore.model.layout import KVLayout

__all__ = ["CODEC_NAMES", "STORED_NAMES", "Codec", "CodecError", "open_codec"]

_CODECS: dict[str, Callable[[KVLayout], Codec]] = {"lz4": Lz4Codec, "split": SplitCodec, "int8": Int8Codec}
CODEC_NAMES = ("none", *_CODECS)
STORED_NAMES = (*CODEC_NAMES, *map(sealed_name, CODEC_NAMES))
"""Names of codecs in headers, with those of encrypted chunks."""
_MAX_LAYER_BYTES = (1 << 32) - 1  # of a full chunk: lengths have 32 bits


def open_codec(name: str, layout: KVLayout) -> Codec:
    """Return the codec called ``name``, for the layers of ``layout``. ``none`` has no codec, and is not accepted.

    Raises:
        ConfigError: there is no such codec, it cannot work on such a layout, or the package it needs is missing.
    """
    if name not in _CODECS:
        close = get_close_matches(name, CODEC_NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"there is no codec {name!r}: {hint}known are {', '.join(CODEC_NAMES)}")
    layer_bytes = layout.blocks_per_chunk * layout.planes * max(layout.page_bytes)
    if layer_bytes > _MAX_LAYER_BYTES:
        raise ConfigError(
            f"the codec {name!r} encodes layers of up to 4 GiB a chunk, not {layer_bytes} bytes: lower chunk_size"
        )
    return _CODECS[name](layout)
