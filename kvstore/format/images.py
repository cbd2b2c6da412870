"""Description and checks of chunk files of any codec, without decoding them and so without the codec's package.

An *image* is the content of a chunk file. The checks are those of a reader, see ``docs/FORMAT.md``. Everything here is
a pure function and thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.codecs import STORED_NAMES
from kvstore.model.chunks import ByteArray
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up

_ANY_PAGE_BYTES = 1 << 40  # longer than any layer: only the file bounds the lengths then
MAX_HEADER_BYTES = 1 << 20  # of any chunk


class Facts(NamedTuple):
    """Fields of a chunk file's header, unverified.

    Attributes:
        header_bytes: length of the header, after which the payload begins.
        payload_bytes: as stored, without padding.
        layer_bytes: of each layer as stored; None without a codec, where the layout determines them.
        key_id: of the key that encrypted it; None without encryption.
    """

    format_version: str
    namespace: str
    prefix_key: str
    tokens: int
    blocks: int
    codec: str
    num_layers: int
    header_bytes: int
    payload_bytes: int
    layer_bytes: tuple[int, ...] | None
    key_id: str | None = None

    @property
    def image_bytes(self) -> int:
        """Size of a file with this header."""
        return self.header_bytes + round_up(self.payload_bytes, ALIGNMENT_BYTES)


def read_facts(begin: bytes) -> Facts | None:
    """Read the header of a chunk file from its first bytes; None if they are no chunk's header.

    The first ``MAX_HEADER_BYTES`` are enough.
    """
    header_bytes = 8 + int.from_bytes(begin[:8], "little")
    if not 8 < header_bytes <= min(len(begin), MAX_HEADER_BYTES):
        return None
    try:
        entries = chunkfile.parse(begin[:header_bytes])
        said, (start, end) = entries["__metadata__"], entries["kv"]["data_offsets"]
        lengths = said.get("layer_bytes")
        facts = Facts(
            str(said["format_version"]),
            str(said["namespace"]),
            str(said["prefix_key"]),
            int(said["tokens"]),
            int(said["blocks"]),
            str(said["codec"]),
            len(said["xxh3_64"]) // chunkfile.CHECKSUM_DIGITS,
            header_bytes,
            int(end) - int(start),
            chunkfile.parse_lengths(lengths) if lengths is not None else None,
            str(said["seal"]).partition(" ")[0] if "seal" in said else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # Python's JSON has infinite numbers
        return None
    return facts if facts.blocks > 0 and facts.num_layers > 0 and facts.payload_bytes > 0 else None


def infer_layout(found: Iterable[Facts]) -> KVLayout | None:
    """Return the layout of most chunks, assuming that all layers have one size; None if there are no chunks.

    For storage without a note. The meaning of the bytes is unknown, so the fingerprint is not that of the engine.
    """
    votes: Counter[tuple[int, int, int]] = Counter()
    most_blocks = 1
    for facts in found:
        page_bytes = facts.payload_bytes // (facts.num_layers * facts.blocks) if facts.codec == "none" else 0
        votes[facts.num_layers, facts.tokens // facts.blocks, page_bytes] += 1
        most_blocks = max(most_blocks, facts.blocks)
    if not votes:
        return None
    (num_layers, block_tokens, _), _ = votes.most_common(1)[0]
    sizes = [vote for vote, _ in votes.most_common() if vote[:2] == (num_layers, block_tokens) and vote[2]]
    page_bytes = sizes[0][2] if sizes else _ANY_PAGE_BYTES  # headers of encoded chunks lack raw sizes
    block_tokens = max(1, block_tokens)
    return KVLayout((page_bytes,) * num_layers, 1, block_tokens, most_blocks * block_tokens, "inferred")


def check_image(layout: KVLayout, key: ChunkKey, num_blocks: int, image: ByteArray) -> Damage | None:
    """Return None if ``image`` is the chunk ``key`` of ``num_blocks`` blocks, in any codec, else its damage.

    With a codec, the checksums of the encoded layers must agree and the padding must be zeros; neither decoding nor
    decryption is tried.
    Never raises, for any bytes.
    """
    codec = chunkfile.codec_in(layout, image)
    begin = image[: chunkfile.header_bytes(layout, codec)]
    if codec == "none" or codec not in STORED_NAMES:
        begin = image[: chunkfile.header_bytes(layout)]
        if len(image) != chunkfile.file_bytes(layout, num_blocks):
            return _explained(layout, key, num_blocks, begin)
        return chunkfile.verify(layout, key, num_blocks, begin, image[len(begin) :])
    parsed = chunkfile.parse_encoding(layout, num_blocks, begin, codec)
    if isinstance(parsed, Damage):
        return parsed
    encoding, sums = parsed
    if encoding is None:
        return Damage.HEADER
    damage = chunkfile.compare(layout, key, num_blocks, begin, sums, encoding=encoding)
    if damage is not None:
        return damage
    body = image[len(begin) :]
    if len(body) != round_up(encoding.total_bytes, ALIGNMENT_BYTES):
        return Damage.SIZE
    found = "".join(xxhash.xxh3_64_hexdigest(body.data[start:end]) for start, end in encoding.ranges())
    if found != sums:
        return Damage.CHECKSUM
    return Damage.HEADER if body[encoding.total_bytes :].any() else None


def _explained(layout: KVLayout, key: ChunkKey, num_blocks: int, begin: ByteArray) -> Damage:
    """Return the damage of a file of a wrong size; another number of blocks is a more precise reason than the size."""
    facts = read_facts(begin.tobytes())
    if facts is None:
        return Damage.NOT_A_CHUNK if len(begin) == chunkfile.header_bytes(layout) else Damage.SIZE
    sums = "0" * chunkfile.CHECKSUM_DIGITS * layout.num_layers
    damage = chunkfile.compare(layout, key, num_blocks, begin, sums)
    return damage if damage in {Damage.VERSION, Damage.NAMESPACE, Damage.KEY, Damage.LENGTH} else Damage.SIZE
