"""A chunk in Redis: its keys, and its transfer over one connection. ``docs/FORMAT.md`` describes it.

- The payload is stored in parts of about 1 MiB, whose names are derived from the chunk's. A small commit value next to
  them is the header of a chunk file. A hash tag keeps all of them on one node of a cluster.
- ``ChunkIO`` stores raw payloads; ``CodedIO`` stores them through a codec, in fewer parts.
- Parts are written under temporary names, which expire, and renamed together with the commit in one transaction, so
  that a chunk is stored whole or not at all, and is all of the last writer.
- Commit and parts begin with the id of the write that made them. Readers ask for them one after the other; if the
  chunk is replaced meanwhile, ids or checksums do not agree, and the commit has changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from redis.exceptions import ExecAbortError, OutOfMemoryError, ResponseError

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Encoding
from kvstore.format.codecs import Codec
from kvstore.format.coding import ChunkCoder, Image, is_foreign
from kvstore.memory.scratch import Scratch
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime, rest_ms
from kvstore.tiers.redis.connection import Buffer, RedisConnection, Reply, pack
from kvstore.tiers.redis.names import Home

WRITE_ID_BYTES = 8
# A value of 1 MiB and its header would take 1.25 MiB of jemalloc's size classes; this takes 1 MiB.
PART_BYTES = (1 << 20) - 4096
UNCOMMITTED_TTL_S = 600  # after which the parts of a writer that was killed before its commit expire
_WINDOW = 3  # parts requested ahead, so that the server copies one while another is on the wire
_NOWHERE = memoryview(bytearray())
_UNUSABLE = b""  # in place of a commit of another type


class Outgoing(NamedTuple):
    """Chunk to be stored.

    Attributes:
        ref: key and length of the chunk.
        data: content of its parts.
        header: of its commit, without trailing spaces; None if it is derived from the sent data.
        until_s: the end of its time to live, in seconds since 1970; None for that of the whole tier.
    """

    ref: ChunkRef
    data: ByteArray
    header: bytes | None
    until_s: float | None = None


class Incoming(NamedTuple):
    """Destination of a chunk.

    Attributes:
        ref: key and length of the chunk.
        payload: for its KV.
        data: for the content of its parts; the payload itself, or a buffer to decode from.
    """

    ref: ChunkRef
    payload: ByteArray
    data: ByteArray


@dataclass(frozen=True)
class Fetched:
    """Result of fetching a chunk.

    Attributes:
        commit: its value before the parts were read, or None.
        has_parts: True if any part exists, with or without a commit.
        is_whole: True if every part exists, has the right length, and is of the write that the commit names.
        is_evicted: True if a part is missing.
        size_bytes: of all its values together, if it is whole.
        layer_sums: the checksums of the data, if it is whole and was read directly into the payload.
    """

    commit: bytes | None
    has_parts: bool
    is_whole: bool
    is_evicted: bool
    size_bytes: int
    layer_sums: str


def num_parts(data_bytes: int) -> int:
    """Return the number of parts for ``data_bytes``."""
    return -(-data_bytes // PART_BYTES)


def split(data: ByteArray) -> list[memoryview]:
    """Split data into parts, as views."""
    return [data.data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]


class ChunkIO:
    """Transfer of chunks of one layout over a connection. Thread-safe; a connection belongs to one thread.

    Args:
        layout: the geometry of the chunks.
        ttl_s: lifetime of all chunks in seconds, or None.
    """

    codec_name = "none"

    def __init__(self, layout: KVLayout, ttl_s: int | None) -> None:
        self._layout = layout
        self._ttl_s = ttl_s

    def max_parts(self, num_blocks: int) -> int:
        """Return the maximum number of a payload's parts, which is that without a codec."""
        return num_parts(self._layout.payload_bytes(num_blocks))

    def keys(self, home: Home, ref: ChunkRef) -> list[bytes]:
        """Return all keys that a chunk may have, the commit key first."""
        return home.keys(ref, self.max_parts(ref.num_blocks))

    @contextmanager
    def outgoing(self, home: Home, ref: ChunkRef, payload: ByteArray) -> Iterator[Outgoing]:  # noqa: ARG002 - a codec's
        """Yield a chunk in its stored form.

        Raises:
            TierError: all buffers of the codec were in use for too long.
        """
        yield Outgoing(ref, payload, None)

    @contextmanager
    def incoming(self, ref: ChunkRef, payload: ByteArray) -> Iterator[Incoming]:
        """Yield a destination for a chunk. Take it before a connection, so that a wait for it holds no connection.

        Raises:
            TierError: all buffers of the codec were in use for too long.
        """
        yield Incoming(ref, payload, payload)

    def store(self, connection: RedisConnection, home: Home, chunk: Outgoing) -> int | ResponseError:
        """Write a chunk, in the place of an older one.

        Returns:
            The bytes of all its values; or the server's error, and then no value of this write stays.

        Raises:
            ResponseError: the server refused for a reason that concerns more than this chunk.
        """
        write_id = secrets.token_bytes(WRITE_ID_BYTES)
        fresh = _fresh_keys(home, chunk, write_id)
        parts = split(chunk.data)
        sums = chunkfile.RunningSums(self._layout, chunk.ref.num_blocks)
        passing = sums.over(parts) if chunk.header is None else parts
        connection.send(_set_commands(fresh, write_id, passing, self._ttl_s or UNCOMMITTED_TTL_S))
        header = chunk.header or self._header(home, chunk.ref, sums.text())
        failure = first_error([connection.reader.reply() for _ in fresh])
        if failure is not None:
            return self._give_up(connection, failure, fresh)
        value = write_id + header
        failure = self.commit(connection, home, chunk, value, fresh)
        return len(value) + WRITE_ID_BYTES * len(fresh) + len(chunk.data) if failure is None else failure

    def _header(self, home: Home, ref: ChunkRef, layer_sums: str) -> bytes:
        key = ChunkKey(home.namespace_id, ref.prefix_key)
        return chunkfile.build_header(self._layout, key, ref.num_blocks, layer_sums).rstrip()

    def commit(
        self, connection: RedisConnection, home: Home, chunk: Outgoing, value: bytes, fresh: list[bytes]
    ) -> ResponseError | None:
        """Turn uploaded parts into the chunk, in the place of an older one. Returns the server's error, if any."""
        keys = self.keys(home, chunk.ref)
        *queued, done = connection.ask(self._commit_commands(fresh, keys, value, chunk.until_s))
        failure = first_error([*queued, *(done if isinstance(done, list) else [done])])
        if failure is None:
            return None
        return self._give_up(connection, failure, fresh if isinstance(failure, OutOfMemoryError) else [*fresh, *keys])

    def _give_up(self, connection: RedisConnection, failure: ResponseError, keys: list[bytes]) -> ResponseError:
        """Delete written keys after an error of this chunk alone: no memory, or parts lost before the commit.

        Raises:
            ResponseError: the error concerns more than this chunk.
        """
        if not isinstance(failure, OutOfMemoryError) and "no such key" not in str(failure):
            raise failure
        connection.call("UNLINK", *keys)
        return failure

    def _commit_commands(
        self, fresh: list[bytes], keys: list[bytes], value: bytes, until_s: float | None
    ) -> list[bytes]:
        """Return one transaction that gives the parts their names and writes the commit."""
        commands = [pack("MULTI")]
        for name, final in zip(fresh, keys[1:], strict=False):
            commands.append(pack("RENAME", name, final))
            if not self._ttl_s or until_s is not None:
                commands.append(_expiry_command(final, until_s))
        if spare := keys[1 + len(fresh) :]:  # an older chunk may have more parts
            commands.append(pack("UNLINK", *spare))
        expiry = ("PX", rest_ms(until_s)) if until_s is not None else ("EX", self._ttl_s) if self._ttl_s else ()
        return [*commands, pack("SET", keys[0], value, *expiry), pack("EXEC")]

    def limit_commands(self, home: Home, lifetime: Lifetime) -> list[bytes]:
        """Return the commands that change the time to live of a chunk, of its commit last, which no part precedes."""
        return [_expiry_command(key, lifetime.until_s) for key in reversed(self.keys(home, lifetime.ref))]

    def fetch(self, connection: RedisConnection, home: Home, chunk: Incoming) -> Fetched:
        """Read the existing parts of a chunk into ``chunk.data``. ``is_sound`` verifies them.

        Raises:
            ResponseError: the server refused.
        """
        commands = [pack("GET", key) for key in self.keys(home, chunk.ref)]
        asked, read = min(1 + _WINDOW, len(commands)), 1
        connection.send([b"".join(commands[:asked])])
        commit = _commit(connection.reader.reply())
        views = self._views(home, chunk, commit)
        sums = chunkfile.RunningSums(self._layout, chunk.ref.num_blocks)
        is_whole, is_evicted, has_parts = commit is not None and bool(views), False, False
        while read < asked:
            is_needed = read <= len(views)  # with a codec, there may be fewer than were requested
            write_id = connection.reader.value_into(WRITE_ID_BYTES, views[read - 1] if is_needed else _NOWHERE)
            read += 1
            has_parts = has_parts or write_id is not None
            if is_needed:
                is_evicted = is_evicted or write_id is None
                is_whole = is_whole and commit is not None and write_id == commit[:WRITE_ID_BYTES]
                if is_whole and asked <= len(views):
                    connection.send([commands[asked]])
                    asked += 1
                if is_whole and chunk.data is chunk.payload:
                    sums.add(views[read - 2])
        size_bytes = len(commit or b"") + sum(WRITE_ID_BYTES + len(view) for view in views)
        return Fetched(commit, has_parts, is_whole, is_evicted, size_bytes, sums.text())

    def _views(self, home: Home, chunk: Incoming, commit: bytes | None) -> list[memoryview]:  # noqa: ARG002 - with a codec it says
        """Return views for the parts; none if the commit is not that of a chunk."""
        return split(chunk.data)

    def is_sound(self, home: Home, chunk: Incoming, found: Fetched) -> bool:
        """Tell if key, length and checksums of a fetched chunk agree. Only then ``chunk.payload`` holds the KV."""
        said = (found.commit or b"")[WRITE_ID_BYTES:]
        return found.is_whole and said == self._header(home, chunk.ref, found.layer_sums)

    def is_foreign(self, commit: bytes) -> bool:
        """Tell if the chunk was encoded with a codec that this tier does not read."""
        return is_foreign(commit[WRITE_ID_BYTES:], self.codec_name)

    def discard(self, connection: RedisConnection, home: Home, ref: ChunkRef, commit: bytes | None) -> bool:
        """Remove a chunk if its commit is unchanged (None: still missing). Returns True if it was unchanged.

        Raises:
            ResponseError: the server refused.
        """
        keys = self.keys(home, ref)
        now = _commit(connection.ask([pack("WATCH", keys[0]), pack("GET", keys[0])])[1])
        if now != commit:
            connection.call("UNWATCH")
            return False
        replies = connection.ask([pack("MULTI"), pack("UNLINK", *keys), pack("EXEC")])
        failure = first_error(replies)
        if isinstance(failure, OutOfMemoryError):
            connection.call("UNLINK", *keys)
        elif failure is not None:
            raise failure
        return failure is not None or replies[-1] is not None

    def remove_command(self, home: Home, ref: ChunkRef) -> bytes:
        """Return the command that removes a chunk."""
        return pack("UNLINK", *self.keys(home, ref))


class CodedIO(ChunkIO):
    """Transfer of chunks through a codec, with fewer parts, and the length of each layer in the commit. Thread-safe.

    A chunk is encoded before a connection is taken, and decoded after it was returned. One that the codec cannot make
    smaller is stored as without a codec, and chunks without a codec are also read. It keeps one buffer for each chunk
    that moved at the same time, up to ``SCRATCH_BUFFERS``.

    Args:
        layout: the geometry of the chunks.
        ttl_s: lifetime of a chunk in seconds, or None.
        codec: opened for that layout.
        timeout_s: longest wait for one of those buffers.
    """

    def __init__(self, layout: KVLayout, ttl_s: int | None, codec: Codec, timeout_s: float) -> None:
        super().__init__(layout, ttl_s)
        self.codec_name = codec.name
        self._coder = ChunkCoder(layout, codec)
        self._scratch = Scratch(layout.slot_bytes, timeout_s)

    @contextmanager
    def outgoing(self, home: Home, ref: ChunkRef, payload: ByteArray) -> Iterator[Outgoing]:
        """See ``ChunkIO``: encodes the chunk."""
        with self._scratch.borrowed() as scratch:
            key = ChunkKey(home.namespace_id, ref.prefix_key)
            layers, sums = self._coder.encode_layers(key, ref.num_blocks, payload, scratch)
            header = self._coded_header(key, ref.num_blocks, layers, sums)
            yield Outgoing(ref, scratch[: layers.total_bytes], header)

    def _coded_header(self, key: ChunkKey, num_blocks: int, layers: Encoding, sums: str) -> bytes:
        is_smaller = layers.total_bytes < self._layout.payload_bytes(num_blocks)
        encoding = layers if is_smaller else None
        return chunkfile.build_header(self._layout, key, num_blocks, sums, encoding=encoding).rstrip()

    @contextmanager
    def incoming(self, ref: ChunkRef, payload: ByteArray) -> Iterator[Incoming]:
        """See ``ChunkIO``."""
        with self._scratch.borrowed() as scratch:
            yield Incoming(ref, payload, scratch[: len(payload)])

    def _views(self, home: Home, chunk: Incoming, commit: bytes | None) -> list[memoryview]:
        """See ``ChunkIO``: the commit has their length."""
        image = self._image(home, chunk, commit) if commit is not None else None
        return split(chunk.data[: image.size_bytes]) if image is not None else []

    def is_sound(self, home: Home, chunk: Incoming, found: Fetched) -> bool:
        """See ``ChunkIO``: decodes every layer whose checksum agrees."""
        image = self._image(home, chunk, found.commit) if found.is_whole and found.commit is not None else None
        if image is None:
            return False
        return all(image.decode(layer, chunk.payload) is None for layer in range(self._layout.num_layers))

    def _image(self, home: Home, chunk: Incoming, commit: bytes) -> Image | None:
        """Return the layers that the commit describes; None if it is not this chunk's, or of another codec."""
        text = commit[WRITE_ID_BYTES:]
        header_bytes = chunkfile.header_bytes(self._layout, chunkfile.codec_of(text) or self.codec_name)
        if len(text) > header_bytes or text != text.rstrip():
            return None
        key = ChunkKey(home.namespace_id, chunk.ref.prefix_key)
        image = self._coder.open_layers(key, chunk.ref.num_blocks, text.ljust(header_bytes), chunk.data)
        return image if isinstance(image, Image) else None


def _expiry_command(key: bytes, until_s: float | None) -> bytes:
    return pack("PERSIST", key) if until_s is None else pack("PEXPIRE", key, rest_ms(until_s))


def _fresh_keys(home: Home, chunk: Outgoing, write_id: bytes) -> list[bytes]:
    parts = home.keys(chunk.ref, num_parts(len(chunk.data)))[1:]
    return [b"%b:w%b" % (key, write_id.hex().encode()) for key in parts]


def _set_commands(names: Sequence[bytes], write_id: bytes, views: Iterable[memoryview], ttl_s: int) -> Iterator[Buffer]:
    """Yield SET commands for all parts, with their bytes as views of the payload."""
    tail = b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s)
    end = b""
    for name, view in zip(names, views, strict=True):
        size = len(write_id) + len(view)
        yield end + b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(name), name, size, write_id)
        yield view
        end = tail
    yield end


def _commit(reply: Reply) -> bytes | None:
    """Return the commit value: None if there is none, and empty if a value of another type is in its place."""
    if isinstance(reply, ResponseError):
        if not str(reply).startswith("WRONGTYPE"):
            raise reply
        return _UNUSABLE
    return reply if isinstance(reply, bytes) else None


def first_error(replies: Sequence[Reply]) -> ResponseError | None:
    """Return the first error among replies; EXECABORT only if it is alone, because it reports one of the others."""
    errors = [reply for reply in replies if isinstance(reply, ResponseError)]
    if not errors:
        return None
    return next((error for error in errors if not isinstance(error, ExecAbortError)), errors[0])
