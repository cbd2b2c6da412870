"""What the cache server and its clients say to each other. ``docs/FORMAT.md`` describes it for other languages.

Each message is one msgpack array, ``[number of its kind, fields ...]``, and may be followed by frames of payload. What
does not decode, or is longer than allowed, is malformed: whoever sent it loses its connection. Nothing that is decoded
here is anything but numbers, bytes and text within limits.

Every request has a ``serial``, which its answer repeats. Payload travels in pieces, each with the xxh3_64 of its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Final, TypeAlias

try:
    import msgspec
except ImportError as error:
    raise ImportError("the cache server and its clients need msgspec: pip install 'vllm-kvstore[server]'") from error

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import LayoutError, ProtocolError
from kvstore.keys import PREFIX_KEY_BYTES, Namespace
from kvstore.layout import KVLayout
from kvstore.protocol.runs import Run

PROTOCOL_VERSION: Final = 1
PIECE_BYTES: Final = 2 << 20  # the most that one message carries of a payload
MAX_REFS: Final = 4096  # in a question; of chunks to be moved, MAX_MOVES
MAX_MOVES: Final = 64
WINDOW: Final = 8  # pieces under way at once, to the server
MAX_MESSAGE_BYTES: Final = 128 << 10
MAX_FRAME_BYTES: Final = PIECE_BYTES
TOKEN_BYTES: Final = 16
MAX_FIELDS_BYTES: Final = 16 << 10  # of a namespace, as they are sent
_MAX_LAYERS: Final = 1024
_MAX_CHUNK_PARTS: Final = 1 << 18  # blocks of a chunk, times layers: so long are the tables of whoever stores them
_REF = struct.Struct(f"<{PREFIX_KEY_BYTES}sI")
REF_BYTES: Final = _REF.size

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Short: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
_Refs: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=REF_BYTES * MAX_REFS)]
_Moves: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=REF_BYTES * MAX_MOVES)]
_Leases: TypeAlias = Annotated[list[_Count], msgspec.Meta(max_length=MAX_MOVES)]
_Fields: TypeAlias = Annotated[dict[_Short, _Short | int], msgspec.Meta(max_length=64)]


_Axis: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]


class Refusal(IntEnum):
    """Why a request cannot be answered as asked."""

    NO_SESSION = 1  # say hello first: the server was started anew, or this client was silent for too long
    VERSION = 2
    TOKEN = 3  # no such connection to the unix socket
    LIMIT = 4
    CLOSING = 5
    UNKNOWN = 6  # no such namespace
    MALFORMED = 7  # the request was none; nothing more is listened to on this connection
    FOREIGN = 8  # the server belongs to an engine with other KV
    NO_OPERATOR = 10  # this is for those only who run the server
    DISK = 9  # chunks were forgotten, and the disk has not let go of all of their files


class Geometry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A ``KVLayout`` on its way."""

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
        """A layout, to be sent."""
        return cls(
            tuple(layout.page_bytes),
            layout.planes,
            layout.block_tokens,
            layout.chunk_tokens,
            layout.physical,
            layout.element,
            layout.page_axes,
        )

    def layout(self) -> KVLayout:
        """The layout that was sent.

        Raises:
            ProtocolError: there can be none like it.
        """
        try:
            layout = KVLayout(**msgspec.structs.asdict(self))
        except LayoutError as error:
            raise ProtocolError(str(error)) from error
        if layout.blocks_per_chunk * layout.num_layers > _MAX_CHUNK_PARTS:
            raise ProtocolError(f"chunks of {layout.blocks_per_chunk} blocks of {layout.num_layers} layers")
        return layout


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    serial: _Count


class Hello(_Request, tag=1, frozen=True):
    """The first message: who is there, and whose chunks it is about.

    Attributes:
        version: of the protocol.
        fields: of the namespace.
        geometry: of its chunks.
        capacity_bytes: beyond so much in the namespace this client wants to hear ``FULL``; 0 leaves it to the server.
        token: what the unix socket gave; empty for a client that does not map the pool.
    """

    version: _Count
    fields: _Fields
    geometry: Geometry
    capacity_bytes: _Count
    token: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]


class Lookup(_Request, tag=2, frozen=True):
    """Which chunks are there? ``Held``."""

    refs: _Refs


class Reserve(_Request, tag=3, frozen=True):
    """Places to write chunks to. ``Granted``."""

    refs: _Moves


class Commit(_Request, tag=4, frozen=True):
    """What was written to these places is whole, or (not ``is_whole``) will never be. ``Done``, with outcomes."""

    leases: _Leases
    is_whole: bool


class Acquire(_Request, tag=5, frozen=True):
    """Places to read chunks from. ``Granted``."""

    refs: _Moves


class Release(_Request, tag=6, frozen=True):
    """These places were read. No answer."""

    leases: _Leases


class Piece(_Request, tag=7, frozen=True):
    """A part of a payload, in the frame behind. ``Done``, with one outcome."""

    lease: _Count
    offset_bytes: _Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Fetch(_Request, tag=8, frozen=True):
    """A part of a payload is wanted. ``Data``."""

    lease: _Count
    offset_bytes: _Count
    num_bytes: Annotated[int, msgspec.Meta(gt=0, le=PIECE_BYTES)]


class Remove(_Request, tag=9, frozen=True):
    """Forget chunks. ``Done``."""

    refs: _Refs


class Clear(_Request, tag=10, frozen=True):
    """Forget all chunks of the namespace. ``Done``."""


class Scan(_Request, tag=11, frozen=True):
    """All chunks, the longest untouched first, from number ``first`` on. ``Listing``."""

    first: _Count


class Ping(_Request, tag=12, frozen=True):
    """Is anybody there? ``Report``. Needs no hello, as all that follows."""


class Stats(_Request, tag=13, frozen=True):
    """Everything counted. ``Report``."""


class ClearSpaces(_Request, tag=14, frozen=True):
    """Forget all chunks of a namespace, by id, or of all (empty). ``Report``."""

    space: Annotated[bytes, msgspec.Meta(max_length=8)]


class Pin(_Request, tag=15, frozen=True):
    """Keep chunks that are there from eviction, or (not ``is_wanted``) no longer. ``Report``.

    A pin ends after so many seconds, and after the server's longest time; 0 stands for that.
    """

    space: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    refs: _Refs
    is_wanted: bool
    seconds: _Count = 0


class Explain(_Request, tag=16, frozen=True):
    """Where is each chunk, and if nowhere, why? ``Report``."""

    space: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    refs: _Refs


class Pins(_Request, tag=17, frozen=True):
    """What is pinned. ``Report``."""


class UnpinSpaces(_Request, tag=18, frozen=True):
    """Keep no chunk of a namespace, by id, or of all (empty), from eviction. ``Report``."""

    space: Annotated[bytes, msgspec.Meta(max_length=8)]


Request: TypeAlias = (
    Hello
    | Lookup
    | Reserve
    | Commit
    | Acquire
    | Release
    | Piece
    | Fetch
    | Remove
    | Clear
    | Scan
    | Ping
    | Stats
    | ClearSpaces
    | Pin
    | Explain
    | Pins
    | UnpinSpaces
)
Order: TypeAlias = ClearSpaces | Pin | Explain | Pins | UnpinSpaces
"""What only those may send who run the server."""


class Usage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a namespace takes, as of the moment ``stamp``: of two, the later counts."""

    stamp: int = 0
    used_bytes: int = 0


NO_USAGE: Final = Usage()


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A place in the pool, if the outcome is ``HIT`` or ``STORED``: it is this connection's until it gives it back."""

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
    """To ``Reserve`` and ``Acquire``: a place for each chunk, or why there is none."""

    grants: list[Grant]
    usage: Usage


class Done(_Answer, tag=4, frozen=True):
    """Outcomes, one byte each, if the request has any."""

    outcomes: bytes
    usage: Usage


class Data(_Answer, tag=5, frozen=True):
    """To ``Fetch``: the frames behind, together, are what was wanted."""

    checksum: bytes


class Listing(_Answer, tag=6, frozen=True):
    """To ``Scan``: chunks, and how many there are in all."""

    refs: bytes
    total: int
    usage: Usage


class Refused(_Answer, tag=7, frozen=True):
    """To anything."""

    reason: int
    message: str


class Report(_Answer, tag=8, frozen=True):
    """To questions of people: JSON, so that they may change without a new protocol."""

    body: bytes


Answer: TypeAlias = Welcome | Held | Granted | Done | Data | Listing | Refused | Report

_OUTCOMES: Final = tuple(Outcome)
_NUMBERS: Final = {outcome: number for number, outcome in enumerate(_OUTCOMES)}
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def encode_geometry(layout: KVLayout) -> bytes:
    """The bytes of a geometry: the same for the same one."""
    return _encoder.encode(Geometry.of(layout))


def decode_request(data: bytes | memoryview) -> Request:
    """What a client sent.

    Raises:
        ProtocolError: no request is like that.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(data)}")
    try:
        request: Request = _requests.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error
    return request


def decode_answer(data: bytes | memoryview) -> Answer:
    """What the server sent.

    Raises:
        ProtocolError: no answer is like that.
    """
    try:
        answer: Answer = _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"an answer of the cache server cannot be read: {error}") from error
    return answer


def pack_refs(refs: Iterable[ChunkRef]) -> bytes:
    """Chunks as bytes: each its key, and its number of blocks as a little-endian uint32."""
    parts = tuple(refs)
    return _packer(len(parts)).pack(*chain.from_iterable(parts))


@lru_cache(maxsize=256)
def _packer(count: int) -> struct.Struct:
    """Packs so many chunks in one call, in a third of the time of as many calls."""
    return struct.Struct("<" + f"{PREFIX_KEY_BYTES}sI" * count)


def unpack_refs(data: bytes) -> list[ChunkRef]:
    """The other way round.

    Raises:
        ProtocolError: these are no whole chunks.
    """
    if len(data) % REF_BYTES:
        raise ProtocolError(f"{len(data)} bytes are no names of chunks of {REF_BYTES}")
    return list(map(ChunkRef._make, _REF.iter_unpack(data)))


def unpack_pairs(data: bytes) -> Sequence[ChunkRef]:
    """As ``unpack_refs``, but of plain tuples: they are equal to chunks, and made in a third of the time.

    Raises:
        ProtocolError: these are no whole chunks.
    """
    if len(data) % REF_BYTES:
        raise ProtocolError(f"{len(data)} bytes are no names of chunks of {REF_BYTES}")
    pairs: list[Any] = list(_REF.iter_unpack(data))
    return pairs


def pack_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    """Outcomes as bytes, one each: their place in the order of ``Outcome``."""
    return bytes([_NUMBERS[outcome] for outcome in outcomes])


def outcome_of(number: int) -> Outcome:
    """The other way round.

    Raises:
        ProtocolError: no outcome has this number.
    """
    if not 0 <= number < len(_OUTCOMES):
        raise ProtocolError(f"no outcome has the number {number}")
    return _OUTCOMES[number]


def number_of(outcome: Outcome) -> int:
    """An outcome as a number."""
    return _NUMBERS[outcome]


def namespace_of(fields: dict[str, str | int]) -> Namespace:
    """The namespace that was sent."""
    return Namespace(dict(fields))


def fields_bytes(fields: dict[str, str | int]) -> int:
    """How long the fields of a namespace are."""
    return len(_encoder.encode(fields))
