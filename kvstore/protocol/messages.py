"""The messages between the cache server and its clients. ``docs/FORMAT.md`` describes them for other languages.

Each message is one msgpack array, ``[number of its kind, fields ...]``, and may be followed by frames of payload. A
message that does not decode, or is too long, is malformed: its sender loses the connection. Decoded messages contain
only numbers, bytes and text, within limits.

Every request has a ``serial``, which its answer repeats. Payload travels in pieces, each with the xxh3_64 of its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache, reduce
from itertools import chain
from operator import or_
from typing import Annotated, Any, Final, TypeAlias, TypeVar

try:
    import msgspec
except ImportError as error:
    raise ImportError("the cache server and its clients need msgspec: pip install 'vllm-kvstore[server]'") from error

from kvstore.chunks import ChunkRef
from kvstore.errors import ProtocolError
from kvstore.keys import PREFIX_KEY_BYTES, Namespace
from kvstore.protocol.geometry import MAX_CHUNK_PARTS, Geometry
from kvstore.protocol.runs import Run

Decoded = TypeVar("Decoded")

PROTOCOL_VERSION: Final = 3
OLDEST_VERSION: Final = 1  # that is spoken: a client of it sends no message that came later
PIECE_BYTES: Final = 2 << 20  # the most that one message carries of a payload
OFFER_BYTES: Final = 8 << 20  # the most of a payload that is read at once
MAX_DESCRIPTION_BYTES: Final = 64 << 10  # of memory that a client lets the server read
MAX_REFS: Final = 4096  # in a lookup; of chunks to be moved, MAX_MOVES
MAX_MOVES: Final = 64
MAX_TRAILS: Final = 64  # in one message
WINDOW: Final = 8  # pieces under way at once, to the server
MAX_MESSAGE_BYTES: Final = 128 << 10
MAX_TRAIL_BYTES: Final = 64 << 10  # of one; together, those of a message fit into it
MAX_FRAME_BYTES: Final = PIECE_BYTES
TOKEN_BYTES: Final = 16
MAX_OPEN: Final = 4096  # hand-overs under way
MAX_FIELDS_BYTES: Final = 16 << 10  # of a namespace, as they are sent
_REF = struct.Struct(f"<{PREFIX_KEY_BYTES}sI")
REF_BYTES: Final = _REF.size

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Short: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
_Refs: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=REF_BYTES * MAX_REFS)]
_Moves: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=REF_BYTES * MAX_MOVES)]
_Leases: TypeAlias = Annotated[list[_Count], msgspec.Meta(max_length=MAX_MOVES)]
_Tokens: TypeAlias = Annotated[list[tuple[_Count, _Count]], msgspec.Meta(max_length=MAX_OPEN)]
_Trail: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=PREFIX_KEY_BYTES, max_length=MAX_TRAIL_BYTES)]
_Fields: TypeAlias = Annotated[dict[_Short, _Short | int], msgspec.Meta(max_length=64)]


class Refusal(IntEnum):
    """Why a request cannot be answered as asked."""

    NO_SESSION = 1  # say hello first: the server was restarted, or this client was silent for too long
    VERSION = 2
    TOKEN = 3  # no such connection to the unix socket
    LIMIT = 4
    CLOSING = 5
    UNKNOWN = 6  # no such namespace
    MALFORMED = 7  # not a request; whatever else comes on this connection is ignored
    FOREIGN = 8  # the server belongs to an engine with other KV
    DISK = 9  # chunks were forgotten, but not all of their files could be deleted
    NO_RIGHT = 10  # the sender's key lacks the right


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client sends."""

    serial: _Count


class Hello(Request, tag=1, frozen=True):
    """The first message: names the client's namespace, whose chunks all later requests are about.

    Attributes:
        version: of the protocol.
        fields: of the namespace.
        geometry: of its chunks.
        capacity_bytes: means nothing any more; 0.
        token: what the unix socket sent; empty for a client that does not map the pool.
    """

    version: _Count
    fields: _Fields
    geometry: Geometry
    capacity_bytes: _Count
    token: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]


class Lookup(Request, tag=2, frozen=True):
    """Which chunks are there? ``Held``."""

    refs: _Refs


class Reserve(Request, tag=3, frozen=True):
    """Asks for pages to write chunks to. ``Granted``."""

    refs: _Moves


class Commit(Request, tag=4, frozen=True):
    """Ends writes: the chunks are whole, or (not ``is_whole``) never will be. ``Done``, with outcomes."""

    leases: _Leases
    is_whole: bool


class Acquire(Request, tag=5, frozen=True):
    """Asks for pages to read chunks from. ``Granted``."""

    refs: _Moves


class Release(Request, tag=6, frozen=True):
    """Ends reads. No answer."""

    leases: _Leases


class Piece(Request, tag=7, frozen=True):
    """Stores a part of a payload, which is in the next frame. ``Done``, with one outcome."""

    lease: _Count
    offset_bytes: _Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Attach(Request, tag=23, frozen=True):
    """Describes the client's registered memory, for the channel of that name. Since version 3.

    ``Done``: STORED if it can be read here, FAILED if not.
    """

    channel: Annotated[str, msgspec.Meta(max_length=64)]
    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)]


class Offer(Request, tag=24, frozen=True):
    """Stores a part of a payload, which the server reads from the memory that was attached. As ``Piece``. Since 3."""

    lease: _Count
    offset_bytes: _Count
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=OFFER_BYTES)]
    memory_offset_bytes: _Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Fetch(Request, tag=8, frozen=True):
    """Reads a part of a payload. ``Data``."""

    lease: _Count
    offset_bytes: _Count
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=PIECE_BYTES)]


class Front(Request, tag=22, frozen=True):
    """Reads a part of what a chunk's leading blocks are as a chunk of their own. ``Data``. Since version 2."""

    lease: _Count
    front_blocks: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNK_PARTS)]
    offset_bytes: _Count
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=PIECE_BYTES)]


class Remove(Request, tag=9, frozen=True):
    """Forget chunks. ``Done``."""

    refs: _Refs


class Clear(Request, tag=10, frozen=True):
    """Forget all chunks of the namespace. ``Done``."""


class Scan(Request, tag=11, frozen=True):
    """Lists all chunks, the least recently used first, from number ``first`` on. ``Listing``."""

    first: _Count


class Sending(Request, tag=21, frozen=True):
    """Which hand-overs are under way to this server: the fields of ``Progress``. No answer. Since version 2."""

    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    following: _Count
    open: _Tokens
    lost: _Tokens = []
    beat_ms: _Count = 0  # it comes again within so long; 0 promises nothing


class Ping(Request, tag=12, frozen=True):
    """Is the server there? ``Report``. Needs no hello, nor do the requests below."""


class Stats(Request, tag=13, frozen=True):
    """Asks for all counters. ``Report``."""


class ClearSpaces(Request, tag=14, frozen=True):
    """Forget all chunks of a namespace, by id, or of all (empty). ``Report``."""

    namespace: Annotated[bytes, msgspec.Meta(max_length=8)]


class Pin(Request, tag=15, frozen=True):
    """Pins chunks, so that they are not evicted, or (not ``is_wanted``) unpins them. ``Report``.

    A pin ends after ``seconds``, but at the latest after the server's longest time, which 0 stands for.
    """

    space: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    refs: _Refs
    is_wanted: bool
    seconds: _Count = 0


class Explain(Request, tag=16, frozen=True):
    """Where is each chunk, or why is it nowhere? ``Report``."""

    space: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    refs: _Refs


class Pins(Request, tag=17, frozen=True):
    """What is pinned. ``Report``."""


class UnpinSpaces(Request, tag=18, frozen=True):
    """Unpins all chunks of a namespace, by id, or of all (empty). ``Report``."""

    namespace: Annotated[bytes, msgspec.Meta(max_length=8)]


class Describe(Request, tag=19, frozen=True):
    """Tells the keys at the ends of the blocks of a chunk that is being written. No answer. Since version 2."""

    lease: _Count
    trail: _Trail


class Nearest(Request, tag=20, frozen=True):
    """Which chunks share leading blocks with each of these trails? ``Named``. Since version 2."""

    trails: Annotated[list[_Trail], msgspec.Meta(max_length=MAX_TRAILS)]


Order: TypeAlias = ClearSpaces | Pin | Explain | Pins | UnpinSpaces
"""Requests of operators, about namespaces that they name."""


class Usage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a namespace takes. Of two usages, the one with the later stamp is valid."""

    stamp: int = 0
    used_bytes: int = 0


NO_USAGE: Final = Usage()


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages of the pool, if the outcome is ``HIT`` or ``STORED``: this connection's until it gives them back."""

    outcome: int
    lease: int = 0
    runs: tuple[Run, ...] = ()


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    serial: int


class Welcome(_Answer, tag=1, frozen=True):
    """To ``Hello``: the server's memory."""

    pool_bytes: int
    usage: Usage


class Held(_Answer, tag=2, frozen=True):
    """To ``Lookup``: one byte a chunk, 1 if it is there."""

    found: bytes
    usage: Usage


class Granted(_Answer, tag=3, frozen=True):
    """To ``Reserve`` and ``Acquire``: pages for each chunk, or why there are none."""

    grants: list[Grant]
    usage: Usage


class Done(_Answer, tag=4, frozen=True):
    """To many requests: outcomes, one byte each, if the request has any."""

    outcomes: bytes
    usage: Usage


class Data(_Answer, tag=5, frozen=True):
    """To ``Fetch`` and ``Front``: the frames that follow, together, are the payload."""

    checksum: bytes


class Listing(_Answer, tag=6, frozen=True):
    """To ``Scan``: chunks, and how many there are in all."""

    refs: bytes
    total: int
    usage: Usage


class Refused(_Answer, tag=7, frozen=True):
    """To any request: why it is not carried out."""

    reason: int
    message: str


class Report(_Answer, tag=8, frozen=True):
    """JSON for people, so that it may change without a new protocol."""

    body: bytes


class Named(_Answer, tag=9, frozen=True):
    """To ``Nearest``: for each trail, those of chunks, the one that shares most with it first."""

    trails: list[list[bytes]]


Answer: TypeAlias = Welcome | Held | Granted | Done | Data | Listing | Refused | Report | Named

_encoder = msgspec.msgpack.Encoder()
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(reduce(or_, Request.__subclasses__()))
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> Request:
    """What a client sent.

    Raises:
        ProtocolError: it is no request.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(data)}")
    return _decoded(_requests, data, "a message")


def decode_answer(data: bytes | memoryview) -> Answer:
    """What the server sent.

    Raises:
        ProtocolError: it is no answer.
    """
    return _decoded(_answers, data, "an answer of the cache server")


def _decoded(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes | memoryview, what: str) -> Decoded:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from error


def pack_refs(refs: Iterable[ChunkRef]) -> bytes:
    """Chunks as bytes: each its key, and its number of blocks as a little-endian uint32."""
    parts = tuple(refs)
    return _packer(len(parts)).pack(*chain.from_iterable(parts))


@lru_cache(maxsize=256)
def _packer(count: int) -> struct.Struct:
    """Packs so many chunks in one call, in a third of the time of as many calls."""
    return struct.Struct("<" + f"{PREFIX_KEY_BYTES}sI" * count)


def unpack_refs(data: bytes) -> list[ChunkRef]:
    """The reverse of ``pack_refs``.

    Raises:
        ProtocolError: these are no whole chunks.
    """
    return list(map(ChunkRef._make, unpack_pairs(data)))


def unpack_pairs(data: bytes) -> Sequence[ChunkRef]:
    """As ``unpack_refs``, but with plain tuples, which are equal to chunks and made in a third of the time.

    Raises:
        ProtocolError: these are no whole chunks.
    """
    if len(data) % REF_BYTES:
        raise ProtocolError(f"{len(data)} bytes are not a multiple of the {REF_BYTES} that name a chunk")
    pairs: list[Any] = list(_REF.iter_unpack(data))
    return pairs


def fields_bytes(namespace: Namespace) -> int:
    """The length of a namespace's fields in a message."""
    return len(_encoder.encode(dict(namespace.fields)))
