"""Messages between the cache server and its clients. ``docs/FORMAT.md`` describes them for other languages.

Each message is one msgpack array, ``[number of its kind, fields ...]``, and may be followed by frames of payload. A
message that does not decode, or is too long, is malformed, and its sender loses the connection. Decoded messages
contain only numbers, bytes and text, within limits.

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

from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ProtocolError
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.model.quotas import OWNER_BYTES
from kvstore.protocol.payload import MAX_CHUNK_PARTS, Geometry, Run

Decoded = TypeVar("Decoded")

PROTOCOL_VERSION: Final = 6
OLDEST_VERSION: Final = 1  # the oldest that is supported; its clients send no messages of later versions
ENDS_VERSION: Final = 4  # the first whose clients hear of times to live
PIECE_BYTES: Final = 2 << 20  # the most payload in one message
OFFER_BYTES: Final = 8 << 20  # the most payload in one read through a channel
MAX_DESCRIPTION_BYTES: Final = 64 << 10  # of a description of a client's memory
MAX_REFS: Final = 4096  # in a lookup; of chunks to be moved, MAX_MOVES
MAX_MOVES: Final = 64
MAX_TRAILS: Final = 64  # in one message
WINDOW: Final = 8  # pieces to the server that are under way at once
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
_Rest: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # milliseconds
_Fields: TypeAlias = Annotated[dict[_Short, _Short | int], msgspec.Meta(max_length=64)]


class Refusal(IntEnum):
    """Reasons why a request is refused."""

    NO_SESSION = 1  # say hello first, because the server was restarted or this client was silent for too long
    VERSION = 2
    TOKEN = 3  # no such connection to the unix socket
    LIMIT = 4
    CLOSING = 5
    UNKNOWN = 6  # no such namespace
    MALFORMED = 7  # not a request; all later messages of this connection are ignored
    FOREIGN = 8  # the server belongs to an engine with other KV
    DISK = 9  # chunks were forgotten, but not all of their files could be deleted
    NO_RIGHT = 10  # the sender's key lacks the right


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages that a client sends."""

    serial: _Count


class Hello(Request, tag=1, frozen=True):
    """First message of a client, which names the namespace that all later requests are about.

    Attributes:
        version: version of the protocol.
        fields: fields of the namespace.
        geometry: geometry of its chunks.
        capacity_bytes: unused; 0.
        token: the token from the unix socket; empty for a client that does not map the pool.
    """

    version: _Count
    fields: _Fields
    geometry: Geometry
    capacity_bytes: _Count
    token: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]


class Lookup(Request, tag=2, frozen=True):
    """Query for which chunks are held, for a prompt that uses them. Answered by ``Held`` or ``Lasting``."""

    refs: _Refs


class Ask(Request, tag=28, frozen=True):
    """As ``Lookup``, but no use, by a client that may send these chunks. Since version 6."""

    refs: _Refs


class Reserve(Request, tag=3, frozen=True):
    """Request for pages to write chunks to. Answered by ``Granted``."""

    refs: _Moves


class ReserveFor(Request, tag=27, frozen=True):
    """As ``Reserve``, for chunks of an owner, which count against its quota if it has one. Since version 5."""

    refs: _Moves
    owner: Annotated[bytes, msgspec.Meta(min_length=OWNER_BYTES, max_length=OWNER_BYTES)]


class Commit(Request, tag=4, frozen=True):
    """End of writes: the chunks are whole, or (not ``is_whole``) never will be. Answered by ``Done``, with outcomes."""

    leases: _Leases
    is_whole: bool


class Acquire(Request, tag=5, frozen=True):
    """Request for pages to read chunks from. Answered by ``Granted``."""

    refs: _Moves


class Release(Request, tag=6, frozen=True):
    """End of reads. No answer."""

    leases: _Leases


class Piece(Request, tag=7, frozen=True):
    """Part of a payload to store, which is in the next frame. Answered by ``Done``, with one outcome."""

    lease: _Count
    offset_bytes: _Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Attach(Request, tag=23, frozen=True):
    """Description of the client's registered memory, for the channel of that name. Since version 3.

    Answered by ``Done``, with STORED if the server can read it, else FAILED.
    """

    channel: Annotated[str, msgspec.Meta(max_length=64)]
    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)]


class Offer(Request, tag=24, frozen=True):
    """Part of a payload to store, which the server reads from the attached memory. As ``Piece``. Since version 3."""

    lease: _Count
    offset_bytes: _Count
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=OFFER_BYTES)]
    memory_offset_bytes: _Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Fetch(Request, tag=8, frozen=True):
    """Request for a part of a payload. Answered by ``Data``."""

    lease: _Count
    offset_bytes: _Count
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=PIECE_BYTES)]


class Front(Request, tag=22, frozen=True):
    """Request for a part of a chunk's leading blocks, laid out as a shorter chunk. ``Data``. Since version 2."""

    lease: _Count
    front_blocks: Annotated[int, msgspec.Meta(gt=0, le=MAX_CHUNK_PARTS)]
    offset_bytes: _Count
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=PIECE_BYTES)]


class Remove(Request, tag=9, frozen=True):
    """Order to forget chunks. Answered by ``Done``."""

    refs: _Refs


class Clear(Request, tag=10, frozen=True):
    """Order to forget all chunks of the namespace. Answered by ``Done``."""


class Scan(Request, tag=11, frozen=True):
    """Query for all chunks from number ``first`` on, the least recently used first. Answered by ``Listing``."""

    first: _Count


class Sending(Request, tag=21, frozen=True):
    """Hand-overs under way to this server, with the fields of ``Progress``. No answer. Since version 2."""

    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    following: _Count
    open: _Tokens
    lost: _Tokens = []
    beat_ms: _Count = 0  # the next one follows within this time; 0 promises nothing


class Ping(Request, tag=12, frozen=True):
    """Probe of the server. Answered by ``Report``. Needs no hello, nor do the requests below."""


class Stats(Request, tag=13, frozen=True):
    """Query for all counters. Answered by ``Report``."""


class ClearSpaces(Request, tag=14, frozen=True):
    """Order to forget all chunks of a namespace, by id, or of all (empty). Answered by ``Report``."""

    namespace: Annotated[bytes, msgspec.Meta(max_length=8)]


class Pin(Request, tag=15, frozen=True):
    """Order to pin chunks, so that they are not evicted, or (not ``is_wanted``) to unpin them. ``Report``.

    A pin ends after ``seconds``, but at the latest after the server's longest time; 0 stands for the longest time.
    """

    space: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    refs: _Refs
    is_wanted: bool
    seconds: _Count = 0


class Explain(Request, tag=16, frozen=True):
    """Query for the places of each chunk, or the reason why it is in none. Answered by ``Report``."""

    space: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    refs: _Refs


class Pins(Request, tag=17, frozen=True):
    """Query for the pins. Answered by ``Report``."""


class UnpinSpaces(Request, tag=18, frozen=True):
    """Order to unpin all chunks of a namespace, by id, or of all (empty). Answered by ``Report``."""

    namespace: Annotated[bytes, msgspec.Meta(max_length=8)]


class Describe(Request, tag=19, frozen=True):
    """The keys at the ends of the blocks of a chunk that is being written. No answer. Since version 2."""

    lease: _Count
    trail: _Trail


class Nearest(Request, tag=20, frozen=True):
    """Query for chunks that share leading blocks with each of these trails. Answered by ``Named``. Since version 2."""

    trails: Annotated[list[_Trail], msgspec.Meta(max_length=MAX_TRAILS)]


class Expire(Request, tag=25, frozen=True):
    """Rest of the time to live of a chunk that is being written. No answer. Since version 4."""

    lease: _Count
    rest_ms: _Rest


class Prolong(Request, tag=26, frozen=True):
    """Order to keep chunks for at least these times; 0 for no end. ``Done``. Since version 4."""

    refs: _Refs
    rests_ms: Annotated[list[_Rest], msgspec.Meta(max_length=MAX_REFS)]


Order: TypeAlias = ClearSpaces | Pin | Explain | Pins | UnpinSpaces
"""Requests of operators, about namespaces that they name."""


class Usage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes that a namespace uses. Of two usages, the one with the later stamp is valid."""

    stamp: int = 0
    used_bytes: int = 0


NO_USAGE: Final = Usage()


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages of the pool, if the outcome is ``HIT`` or ``STORED``, leased to this connection until it returns them."""

    outcome: int
    lease: int = 0
    runs: tuple[Run, ...] = ()


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    serial: int


class Welcome(_Answer, tag=1, frozen=True):
    """Answer to ``Hello``: the server's memory."""

    pool_bytes: int
    usage: Usage


class Held(_Answer, tag=2, frozen=True):
    """Answer to ``Lookup``: one byte for each chunk, 1 if it is held."""

    found: bytes
    usage: Usage


class Lasting(Held, tag=10, frozen=True):
    """Answer to ``Lookup`` if a chunk found has a time to live: also the rests, 0 for no end. Since version 4."""

    rests_ms: list[int]


class Granted(_Answer, tag=3, frozen=True):
    """Answer to ``Reserve``, ``ReserveFor`` and ``Acquire``: pages for each chunk, or the reason why there are none."""

    grants: list[Grant]
    usage: Usage


class Done(_Answer, tag=4, frozen=True):
    """Answer to many requests: outcomes, one byte each, if the request has any."""

    outcomes: bytes
    usage: Usage


class Data(_Answer, tag=5, frozen=True):
    """Answer to ``Fetch`` and ``Front``: the frames that follow are the payload, concatenated."""

    checksum: bytes


class Listing(_Answer, tag=6, frozen=True):
    """Answer to ``Scan``: some chunks, and the number of all."""

    refs: bytes
    total: int
    usage: Usage


class Refused(_Answer, tag=7, frozen=True):
    """Answer to any request that is refused: the reason."""

    reason: int
    message: str


class Report(_Answer, tag=8, frozen=True):
    """Answer as JSON for people, which may change without a new version of the protocol."""

    body: bytes


class Named(_Answer, tag=9, frozen=True):
    """Answer to ``Nearest``: for each trail, trails of chunks, the one that shares most with it first."""

    trails: list[list[bytes]]


Answer: TypeAlias = Welcome | Held | Granted | Done | Data | Listing | Refused | Report | Named | Lasting

_encoder = msgspec.msgpack.Encoder()
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(reduce(or_, Request.__subclasses__()))
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """Encode a message as bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> Request:
    """Decode a message of a client.

    Raises:
        ProtocolError: it is no request.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(data)}")
    return _decoded(_requests, data, "a message")


def decode_answer(data: bytes | memoryview) -> Answer:
    """Decode a message of the server.

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
    """Pack chunks as bytes: for each its key, and its number of blocks as a little-endian uint32."""
    parts = tuple(refs)
    return _packer(len(parts)).pack(*chain.from_iterable(parts))


@lru_cache(maxsize=256)
def _packer(count: int) -> struct.Struct:
    """Return a struct that packs so many chunks in one call, in a third of the time of as many calls."""
    return struct.Struct("<" + f"{PREFIX_KEY_BYTES}sI" * count)


def unpack_refs(data: bytes) -> list[ChunkRef]:
    """Unpack chunks, the reverse of ``pack_refs``.

    Raises:
        ProtocolError: these are no whole chunks.
    """
    return list(map(ChunkRef._make, unpack_pairs(data)))


def unpack_pairs(data: bytes) -> Sequence[ChunkRef]:
    """Unpack chunks as ``unpack_refs`` does, but as plain tuples, which are equal and take a third of the time.

    Raises:
        ProtocolError: these are no whole chunks.
    """
    if len(data) % REF_BYTES:
        raise ProtocolError(f"{len(data)} bytes are not a multiple of the {REF_BYTES} that name a chunk")
    pairs: list[Any] = list(_REF.iter_unpack(data))
    return pairs
