"""The chunk format of disk, Redis, wire and packs. ``docs/FORMAT.md`` describes it byte by byte.

A chunk is a valid safetensors file: a header padded with spaces to a multiple of 4096 bytes, then the payload as the U8
tensor ``kv``, then zeros as the U8 tensor ``_pad`` up to a multiple of 4096. So one vectored call moves header and
payload between a file and a slab slot, with direct I/O.

Layout, key and length determine every byte of the header except the checksums, and the payload determines those. A
reader builds the header that it expects and compares: it trusts no length or offset that it has read. It parses the
header only to name the reason for a difference.

With a codec, ``kv`` holds the encoded layers, one after the other. The header also has their lengths, and the checksums
are those of the encoded layers. A reader parses lengths and checksums, checks that the lengths fit the file, and builds
the rest. An encrypted chunk is one with a codec, whose name ends with ``aes-gcm``, and its header has the seal
(``kvstore.format.sealing``).

Everything here is a pure function and thread-safe.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import xxhash

from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.model.keys import PREFIX_KEY_BYTES, ChunkKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.model.lifetime import LAST_END_S

FORMAT_VERSION = "1"
_LENGTH = struct.Struct("<Q")
_FIXED_HEADER_BYTES = 1024  # more than a header needs without its checksums
CHECKSUM_DIGITS = 16
_LENGTH_DIGITS = 8
_SEALED = "aes-gcm"
TAG_BYTES = 16  # of a sealed layer
_SMALL_LAYER_BYTES: Final = 256 << 10
_STEP_BYTES: Final = 64 << 10  # the most that xxhash takes without releasing the GIL
_KEPT_BYTES: Final = 1 << 20  # hashed before the GIL is released
ANY_CODEC = f"any+{_SEALED}"
"""A codec whose headers and files are as long as any can be."""
_SEAL = re.compile("[ -~]{1,100}")
_END = re.compile(rb'"until_s":"(([1-9][0-9]{0,9})-[0-9a-f]{16})"')
MAX_END_S: Final = (1 << 32) - 1  # in a header
END_BYTES: Final = _FIXED_HEADER_BYTES
_NAME = re.compile(rf"([0-9a-f]{{{2 * PREFIX_KEY_BYTES}}})-([1-9][0-9]{{0,8}})(?:-([1-9][0-9]{{0,11}}))?\.safetensors")


class Damage(StrEnum):
    """Reasons why bytes are not the expected chunk."""

    SIZE = "wrong size"
    NOT_A_CHUNK = "not a chunk file"
    VERSION = "another format version"
    NAMESPACE = "another namespace"
    KEY = "another key"
    LENGTH = "another number of tokens or blocks"
    CHECKSUM = "checksum does not match"
    CODEC = "cannot be decoded"
    SEAL = "not sealed, or sealed with another key than those of encryption_keys"
    HEADER = "header inconsistent"


# In order of importance: in another format version, the other fields mean nothing.
_REASONS = (
    ("format_version", Damage.VERSION),
    ("namespace", Damage.NAMESPACE),
    ("prefix_key", Damage.KEY),
    ("blocks", Damage.LENGTH),
    ("tokens", Damage.LENGTH),
    ("xxh3_64", Damage.CHECKSUM),
)


class Encoding(NamedTuple):
    """Encoding of a payload: the codec, the stored length of each layer, and the seal if it is encrypted."""

    codec: str
    layer_bytes: tuple[int, ...]
    seal: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(self.layer_bytes)

    def ranges(self) -> list[tuple[int, int]]:
        """Return begin and end of every layer, counted from the end of the header."""
        return list(pairwise(accumulate(self.layer_bytes, initial=0)))


class ChunkName(NamedTuple):
    """Meaning of a file's name: a chunk, and the end of its time to live in seconds since 1970, if it has one."""

    ref: ChunkRef
    until_s: int | None = None


def chunk_name(ref: ChunkRef, until_s: int | None = None) -> str:
    """Return the path of a chunk's file inside the folder of its namespace."""
    key = ref.prefix_key.hex()
    end = "" if until_s is None else f"-{until_s}"
    return f"{key[:2]}/{key}-{ref.num_blocks}{end}.safetensors"


def parse_chunk_name(shard: str, name: str) -> ChunkName | None:
    """Return the meaning of a file's ``name`` in the folder ``shard``, or None if it is no chunk's name."""
    match = _NAME.fullmatch(name)
    if match is None or not name.startswith(shard) or int(match[3] or 0) > LAST_END_S:
        return None
    return ChunkName(ChunkRef(bytes.fromhex(match[1]), int(match[2])), int(match[3]) if match[3] else None)


def sealed_name(codec: str) -> str:
    """Return the name in headers of a codec whose output is encrypted."""
    return _SEALED if codec == "none" else f"{codec}+{_SEALED}"


def plain_name(codec: str) -> str:
    """Return the codec of a name in a header, without the encryption."""
    return codec.removesuffix(_SEALED).rstrip("+") or "none" if is_sealed(codec) else codec


def is_sealed(codec: str) -> bool:
    """Tell if chunks with this name of a codec are encrypted."""
    return codec.endswith(_SEALED)


def header_bytes(layout: KVLayout, codec: str = "none") -> int:
    """Return the length of the header, a multiple of 4096: 4096 up to 192 layers, or up to 128 with a codec."""
    digits = CHECKSUM_DIGITS if codec == "none" else CHECKSUM_DIGITS + _LENGTH_DIGITS
    return round_up(_FIXED_HEADER_BYTES + digits * layout.num_layers, ALIGNMENT_BYTES)


def body_bytes(layout: KVLayout, num_blocks: int) -> int:
    """Return the bytes after the header: the payload and its padding."""
    return round_up(layout.payload_bytes(num_blocks), ALIGNMENT_BYTES)


def file_bytes(layout: KVLayout, num_blocks: int, codec: str = "none") -> int:
    """Return the file size of a chunk of ``num_blocks`` blocks; with a codec, the largest possible one."""
    tags_bytes = TAG_BYTES * layout.num_layers if is_sealed(codec) else 0
    body = round_up(layout.payload_bytes(num_blocks) + tags_bytes, ALIGNMENT_BYTES)
    return header_bytes(layout, codec) + body


def checksums(layout: KVLayout, num_blocks: int, payload: ByteArray, layers: range | None = None) -> str:
    """Return the xxh3_64 of every layer, or of the given ``layers``, as 16 hex digits each, concatenated.

    ``payload`` may be longer than the chunk (a slab slot). The GIL is released while a large layer is hashed. Of small
    layers it is released once per MiB, as to take it back from other threads costs more than to hash one of them.
    """
    view, kept_bytes, sums = payload.data, 0, []
    for begin, end in layout.layer_ranges(num_blocks, layers):
        kept_bytes += end - begin
        if _STEP_BYTES < end - begin <= _SMALL_LAYER_BYTES and kept_bytes <= _KEPT_BYTES:
            layer = xxhash.xxh3_64()
            for at in range(begin, end, _STEP_BYTES):
                layer.update(view[at : min(at + _STEP_BYTES, end)])
            sums.append(layer.hexdigest())
        else:
            kept_bytes = 0
            sums.append(xxhash.xxh3_64_hexdigest(view[begin:end]))
    return "".join(sums)


class RunningSums:
    """Incremental ``checksums`` of a payload that is added in pieces, in order. Belongs to one thread.

    A piece that was just received, or is about to be sent, is hashed while it is in the processor's cache.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self._ends = iter([end for _, end in layout.layer_ranges(num_blocks)])
        self._end = next(self._ends, 0)  # of the current layer
        self._done_bytes = 0
        self._layer = xxhash.xxh3_64()
        self._sums: list[str] = []

    def add(self, piece: memoryview) -> None:
        """Add the next bytes of the payload. The GIL is released while a large piece is hashed."""
        while len(piece) and self._done_bytes < self._end:
            step = min(len(piece), self._end - self._done_bytes)
            self._layer.update(piece[:step])
            self._done_bytes += step
            piece = piece[step:]
            if self._done_bytes == self._end:
                self._sums.append(self._layer.hexdigest())
                self._layer.reset()
                self._end = next(self._ends, 0)

    def over(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Add pieces, and yield each of them after it was added."""
        for piece in pieces:
            self.add(piece)
            yield piece

    def text(self) -> str:
        """Return the checksums of the layers that are complete."""
        return "".join(self._sums)


def encode_header(layout: KVLayout, key: ChunkKey, num_blocks: int, payload: ByteArray) -> bytes:
    """Return the header of a chunk without a codec, with checksums. ``payload`` may be longer than the chunk."""
    return build_header(layout, key, num_blocks, checksums(layout, num_blocks, payload))


def build_header(
    layout: KVLayout,
    key: ChunkKey,
    num_blocks: int,
    layer_sums: str,
    *,
    encoding: Encoding | None = None,
    end_s: int | None = None,
) -> bytes:
    """Return the header of a chunk with known ``checksums``, and with its ``encoding``, if it has one.

    ``end_s`` is the end of its time to live in seconds since 1970, where names do not tell it.
    """
    payload_bytes = encoding.total_bytes if encoding else layout.payload_bytes(num_blocks)
    end_bytes = round_up(payload_bytes, ALIGNMENT_BYTES)
    metadata = {
        "format_version": FORMAT_VERSION,
        "namespace": key.namespace_id.hex(),
        "prefix_key": key.prefix_key.hex(),
        "tokens": str(num_blocks * layout.block_tokens),
        "blocks": str(num_blocks),
        "codec": encoding.codec if encoding else "none",
    }
    if end_s is not None:
        metadata["until_s"] = _end_text(key, end_s)
    if encoding:
        metadata["layer_bytes"] = "".join(f"{length:0{_LENGTH_DIGITS}x}" for length in encoding.layer_bytes)
        if encoding.seal:
            metadata["seal"] = encoding.seal
    metadata["xxh3_64"] = layer_sums
    entries: dict[str, object] = {"__metadata__": metadata, "kv": _tensor(0, payload_bytes)}
    if payload_bytes < end_bytes:  # safetensors requires that every byte belongs to a tensor
        entries["_pad"] = _tensor(payload_bytes, end_bytes)
    json_bytes = header_bytes(layout, metadata["codec"]) - _LENGTH.size
    return _LENGTH.pack(json_bytes) + json.dumps(entries, separators=(",", ":")).encode().ljust(json_bytes)


def verify(
    layout: KVLayout, key: ChunkKey, num_blocks: int, header: ByteArray | bytes, payload: ByteArray
) -> Damage | None:
    """Return None if ``header`` and ``payload`` are the chunk ``key`` of ``num_blocks`` blocks, else the damage.

    Never raises, for any bytes. ``payload`` may be longer than the chunk (a slab slot); the padding after it is not
    checked, as it is never read.
    """
    if len(header) != header_bytes(layout) or len(payload) < layout.payload_bytes(num_blocks):
        return Damage.SIZE
    return compare(layout, key, num_blocks, header, checksums(layout, num_blocks, payload))


def compare(
    layout: KVLayout,
    key: ChunkKey,
    num_blocks: int,
    header: ByteArray | bytes,
    layer_sums: str,
    *,
    encoding: Encoding | None = None,
    layers: range | None = None,
) -> Damage | None:
    """Verify a payload with known ``checksums``, and with its ``encoding``, if it has one; see ``verify``.

    With ``layers``, ``layer_sums`` covers only these, and the header's checksums of the other layers are accepted.
    """
    found = bytes(header)
    if layers is not None:
        stated = (_metadata(found) or {}).get("xxh3_64")
        if isinstance(stated, str) and len(stated) == layout.num_layers * CHECKSUM_DIGITS:
            begin, end = layers.start * CHECKSUM_DIGITS, layers.stop * CHECKSUM_DIGITS
            layer_sums = stated[:begin] + layer_sums + stated[end:]
    expected = build_header(layout, key, num_blocks, layer_sums, encoding=encoding)
    if found != expected and (end_s := end_of(found, key)) is not None:
        expected = build_header(layout, key, num_blocks, layer_sums, encoding=encoding, end_s=end_s)
    return None if found == expected else _diagnose(found, expected)


def parse_encoding(
    layout: KVLayout, num_blocks: int, header: ByteArray | bytes, codec: str
) -> tuple[Encoding | None, str] | Damage:
    """Return the encoding that a header states, None for ``none``, and the checksums; or the damage.

    Only ``codec`` is accepted, and ``none`` unless ``codec`` encrypts. Every length is at least one byte and at most
    that of the layer without a codec, plus the tag of an encrypted one. The caller checks that they fit the file, and
    that the rest of the header is right (``compare``).
    """
    metadata = _metadata(header)
    if metadata is None:
        return Damage.NOT_A_CHUNK
    sums, lengths = metadata.get("xxh3_64"), metadata.get("layer_bytes")
    if not _is_hex(sums, CHECKSUM_DIGITS * layout.num_layers):
        return Damage.CHECKSUM
    if metadata.get("codec") == "none" and not is_sealed(codec):
        return None, str(sums)
    if metadata.get("codec") != codec or not _is_hex(lengths, _LENGTH_DIGITS * layout.num_layers):
        return Damage.HEADER
    seal = metadata.get("seal", "")
    if not isinstance(seal, str) or bool(seal and _SEAL.fullmatch(seal)) != is_sealed(codec):
        return Damage.HEADER
    layer_bytes = parse_lengths(str(lengths))
    tag_bytes = TAG_BYTES if is_sealed(codec) else 0
    limits = (end - begin + tag_bytes for begin, end in layout.layer_ranges(num_blocks))
    if not all(0 < length <= limit for length, limit in zip(layer_bytes, limits, strict=True)):
        return Damage.HEADER
    return Encoding(codec, layer_bytes, seal), str(sums)


def codec_of(header: ByteArray | bytes) -> str | None:
    """Return the codec that a header names, without checking the rest; None if it names none."""
    codec = (_metadata(header) or {}).get("codec")
    return codec if isinstance(codec, str) else None


def end_of(header: ByteArray | bytes | bytearray, key: ChunkKey) -> int | None:
    """Return the end of the time to live in a chunk's header; None if it has none, or it is damaged.

    The first ``END_BYTES`` of a header are enough; the rest is not checked.
    """
    found = _END.search(bytes(header[:END_BYTES]))
    end_s = int(found[2]) if found else 0
    is_sound = 0 < end_s <= MAX_END_S and found is not None and found[1].decode() == _end_text(key, end_s)
    return end_s if is_sound else None


def _end_text(key: ChunkKey, end_s: int) -> str:
    """Return an end with a checksum, as nothing else in a header tells if it is damaged."""
    return f"{end_s}-{xxhash.xxh3_64_hexdigest(key.namespace_id + key.prefix_key + end_s.to_bytes(8, 'little'))}"


def seal_of(header: ByteArray | bytes) -> str:
    """Return the seal that a header names, without checking the rest; empty if it names none."""
    seal = (_metadata(header) or {}).get("seal")
    return seal if isinstance(seal, str) else ""


def codec_in(layout: KVLayout, image: ByteArray) -> str:
    """Return the codec named by a chunk file's header, which with many layers is longer with a codec; else ``none``."""
    return codec_of(image[: header_bytes(layout)]) or codec_of(image[: header_bytes(layout, ANY_CODEC)]) or "none"


def parse_lengths(digits: str) -> tuple[int, ...]:
    """Parse the ``layer_bytes`` of a header.

    Raises:
        ValueError: they are not hex digits.
    """
    return tuple(int(digits[at : at + _LENGTH_DIGITS], 16) for at in range(0, len(digits), _LENGTH_DIGITS))


def _is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value, re.ASCII) is not None


def _tensor(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def _diagnose(found: bytes, expected: bytes) -> Damage:
    """Return the most important difference between two headers that are not equal."""
    got, wanted = _metadata(found), _metadata(expected)
    if got is None or wanted is None:
        return Damage.NOT_A_CHUNK
    return next((damage for field, damage in _REASONS if got.get(field) != wanted.get(field)), Damage.HEADER)


def parse(header: ByteArray | bytes) -> dict[str, Any]:
    """Return the JSON of a header; empty if there is none. The length before it is not used, as it may be wrong."""
    try:
        entries = json.loads(bytes(header)[_LENGTH.size :].decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or thousands of opening brackets
        return {}
    return entries if isinstance(entries, dict) else {}


def _metadata(header: ByteArray | bytes) -> dict[str, object] | None:
    metadata = parse(header).get("__metadata__")
    return metadata if isinstance(metadata, dict) else None
