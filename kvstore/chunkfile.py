"""The one chunk format, for disk, Redis, wire and packs. ``docs/FORMAT.md`` describes it byte by byte.

A chunk is a valid safetensors file: a header padded with spaces to a multiple of 4096 bytes, then the payload as the U8
tensor ``kv``, then zeros as the U8 tensor ``_pad`` up to a multiple of 4096. So one vectored call moves header and
payload between a file and a slab slot, with direct I/O.

Layout, key and length decide every byte of the header except the checksums, and the payload decides those. A reader
therefore builds the header it expects and compares: nothing that was read is trusted, neither lengths nor offsets.
Parsing serves only to name the reason once the two differ.

Everything here is a pure function and thread-safe.
"""

from __future__ import annotations

import json
import struct
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvstore.layout import ALIGNMENT_BYTES, KVLayout, round_up

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvstore.keys import ChunkKey

    ByteArray = npt.NDArray[np.uint8]

FORMAT_VERSION = "1"
_LENGTH = struct.Struct("<Q")
_FIXED_HEADER_BYTES = 1024  # more than a header needs besides its checksums, whatever the numbers in it
_CHECKSUM_DIGITS = 16


class Damage(StrEnum):
    """Why bytes are not the chunk they were read as."""

    SIZE = "wrong size"
    NOT_A_CHUNK = "not a chunk file"
    VERSION = "another format version"
    NAMESPACE = "another namespace"
    KEY = "another key"
    LENGTH = "another number of tokens or blocks"
    CHECKSUM = "checksum does not match"
    HEADER = "header inconsistent"


# In the order in which they explain each other: a field of another format version means nothing.
_REASONS = (
    ("format_version", Damage.VERSION),
    ("namespace", Damage.NAMESPACE),
    ("prefix_key", Damage.KEY),
    ("blocks", Damage.LENGTH),
    ("tokens", Damage.LENGTH),
    ("xxh3_64", Damage.CHECKSUM),
)


def header_bytes(layout: KVLayout) -> int:
    """Where the payload begins: 4096 up to 192 layers."""
    return round_up(_FIXED_HEADER_BYTES + _CHECKSUM_DIGITS * layout.num_layers, ALIGNMENT_BYTES)


def body_bytes(layout: KVLayout, num_blocks: int) -> int:
    """Bytes behind the header: the payload and its padding."""
    return round_up(layout.payload_bytes(num_blocks), ALIGNMENT_BYTES)


def file_bytes(layout: KVLayout, num_blocks: int) -> int:
    """Bytes of the whole file of a chunk of ``num_blocks`` blocks."""
    return header_bytes(layout) + body_bytes(layout, num_blocks)


def checksums(layout: KVLayout, num_blocks: int, payload: ByteArray, layers: range | None = None) -> str:
    """The xxh3_64 of every layer, or of the ``layers`` given, 16 hex digits each, one after the other.

    ``payload`` may be longer than the chunk (a slab slot). The GIL is released while a layer is summed up.
    """
    view = payload.data
    wanted = range(layout.num_layers) if layers is None else layers
    ranges = (layout.layer_range(layer, num_blocks) for layer in wanted)
    return "".join(xxhash.xxh3_64_hexdigest(view[begin:end]) for begin, end in ranges)


def encode_header(layout: KVLayout, key: ChunkKey, num_blocks: int, payload: ByteArray) -> bytes:
    """The header of a chunk, ``header_bytes(layout)`` long, checksums included.

    ``payload`` may be longer than the chunk (a slab slot).
    """
    return build_header(layout, key, num_blocks, checksums(layout, num_blocks, payload))


def build_header(layout: KVLayout, key: ChunkKey, num_blocks: int, layer_sums: str) -> bytes:
    """The header of a chunk of which all ``checksums`` are known."""
    payload_bytes = layout.payload_bytes(num_blocks)
    end_bytes = body_bytes(layout, num_blocks)
    entries: dict[str, object] = {
        "__metadata__": {
            "format_version": FORMAT_VERSION,
            "namespace": key.namespace_id.hex(),
            "prefix_key": key.prefix_key.hex(),
            "tokens": str(num_blocks * layout.block_tokens),
            "blocks": str(num_blocks),
            "codec": "none",
            "xxh3_64": layer_sums,
        },
        "kv": _tensor(0, payload_bytes),
    }
    if payload_bytes < end_bytes:  # safetensors wants every byte of the file to belong to a tensor
        entries["_pad"] = _tensor(payload_bytes, end_bytes)
    json_bytes = header_bytes(layout) - _LENGTH.size
    return _LENGTH.pack(json_bytes) + json.dumps(entries, separators=(",", ":")).encode().ljust(json_bytes)


def verify(
    layout: KVLayout, key: ChunkKey, num_blocks: int, header: ByteArray | bytes, payload: ByteArray
) -> Damage | None:
    """Whether ``header`` and ``payload`` are the chunk ``key`` of ``num_blocks`` blocks: None, or why not.

    Never raises, whatever the bytes are. ``payload`` may be longer than the chunk (a slab slot); the padding behind
    it is not looked at, as nobody reads it.
    """
    if len(header) != header_bytes(layout) or len(payload) < layout.payload_bytes(num_blocks):
        return Damage.SIZE
    return compare(layout, key, num_blocks, header, checksums(layout, num_blocks, payload))


def compare(
    layout: KVLayout, key: ChunkKey, num_blocks: int, header: ByteArray | bytes, layer_sums: str
) -> Damage | None:
    """``verify`` for a payload of which all ``checksums`` are known."""
    found = header.tobytes() if isinstance(header, np.ndarray) else header
    expected = build_header(layout, key, num_blocks, layer_sums)
    return None if found == expected else _diagnose(found, expected)


def _tensor(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def _diagnose(found: bytes, expected: bytes) -> Damage:
    """Name the first difference between two headers that are not equal."""
    got, wanted = _metadata(found), _metadata(expected)
    if got is None or wanted is None:
        return Damage.NOT_A_CHUNK
    return next((damage for field, damage in _REASONS if got.get(field) != wanted.get(field)), Damage.HEADER)


def _metadata(header: bytes) -> dict[str, object] | None:
    """The ``__metadata__`` of a header, or None where there is none. The length in front is not used: it may lie."""
    try:
        entries = json.loads(header[_LENGTH.size :].decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or thousands of opening brackets
        return None
    metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
    return metadata if isinstance(metadata, dict) else None
