"""A chunk in Redis: its keys, and how it gets there and back over one connection. ``docs/FORMAT.md`` describes it.

- The payload lies in parts of about 1 MiB, whose names follow from the chunk's. A small commit value beside them is the
  header of a chunk file. A hash tag keeps all of them on one node of a cluster.
- This module stores payloads as they are; ``coded.py`` stores them through a codec, in fewer parts.
- Parts are written under temporary names, which expire, and renamed together with the commit in one transaction: a
  chunk is there whole or not at all, and the last writer wins whole.
- Commit and parts begin with the id of the write that made them. Readers ask for them one after the other; if the
  chunk is replaced meanwhile, ids or checksums do not agree, and the commit has changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from redis.exceptions import ExecAbortError, OutOfMemoryError, ResponseError

from kvstore.chunks import ByteArray, ChunkRef
from kvstore.format import chunkfile
from kvstore.format.codecs import CODEC_NAMES
from kvstore.keys import ChunkKey
from kvstore.layout import KVLayout
from kvstore.tiers.redis.wire import Buffer, Link, Reply, pack

WRITE_ID_BYTES = 8
# A value of 1 MiB and its header would take 1.25 MiB of jemalloc's size classes; this takes 1 MiB.
PART_BYTES = (1 << 20) - 4096
UNCOMMITTED_TTL_S = 600  # then the parts of a writer that was killed before its commit expire
PREFIX = b"kvs:{"
_WINDOW = 3  # parts asked for ahead: the server copies one while another is on the wire
_NOWHERE = memoryview(bytearray())
_UNUSABLE = b""  # stands for a commit of another type


def commit_key(tag: bytes) -> bytes:
    """The key of the commit, whose presence means that the chunk with this tag is there."""
    return PREFIX + tag + b"}:c"


def exists_command(tag: bytes) -> bytes:
    """Ask whether the chunk with this tag is there. A lookup sends one for each chunk."""
    key = commit_key(tag)
    return b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key)


@dataclass(frozen=True)
class Home:
    """Where the chunks of a namespace are now. A new epoch is a new home: what was in the old one is unreachable.

    Attributes:
        namespace_id: whose chunks.
        epoch: 16 hex digits; empty until it is known.
    """

    namespace_id: bytes
    epoch: bytes = b""

    @cached_property
    def epoch_tag(self) -> bytes:
        """The hash tag of ``epoch_key``."""
        return self.namespace_id.hex().encode()

    @cached_property
    def epoch_key(self) -> bytes:
        """The key that holds the epoch."""
        return PREFIX + self.epoch_tag + b"}:epoch"

    @cached_property
    def pattern(self) -> bytes:
        """Matches all keys of the namespace's chunks, of any epoch."""
        return PREFIX + self.epoch_tag + b":*"

    @cached_property
    def _stem(self) -> bytes:
        return b"%b:%b:" % (self.epoch_tag, self.epoch)

    def tag(self, ref: ChunkRef) -> bytes:
        """The hash tag of a chunk, which decides its node."""
        return b"%b%b:%d" % (self._stem, ref.prefix_key.hex().encode(), ref.num_blocks)

    def keys(self, ref: ChunkRef, num_parts: int) -> list[bytes]:
        """All keys of a chunk, the commit key first."""
        stem = PREFIX + self.tag(ref) + b"}:"
        return [commit_key(self.tag(ref)), *(stem + b"%d" % part for part in range(num_parts))]

    def trails_tag(self, number: int) -> bytes:
        """The hash tag of one of the sets of trails: as that of a chunk without blocks, which all sweeps know."""
        return b"%b%02x:0" % (self._stem, number)

    def trails_key(self, number: int) -> bytes:
        """The key of one of the sets of trails."""
        return PREFIX + self.trails_tag(number) + b"}:t"

    def parse(self, key: bytes) -> tuple[ChunkRef, bytes] | None:
        """The chunk that a key of this home belongs to, and what the key is for; None for other homes."""
        try:
            namespace, epoch, prefix, rest = key.removeprefix(PREFIX).split(b":", 3)
            blocks, _, purpose = rest.partition(b"}:")
            ref = ChunkRef(bytes.fromhex(prefix.decode()), int(blocks))
        except ValueError:
            return None
        is_ours = namespace == self.namespace_id.hex().encode() and epoch == self.epoch
        return (ref, purpose) if is_ours else None


class Outgoing(NamedTuple):
    """A chunk about to be stored.

    Attributes:
        ref: which one.
        data: what goes into its parts.
        header: of its commit, without trailing spaces; None if it follows from what is sent.
    """

    ref: ChunkRef
    data: ByteArray
    header: bytes | None


class Incoming(NamedTuple):
    """Where a chunk is to go.

    Attributes:
        ref: which one.
        payload: for its KV.
        data: for what is in its parts: the same, or a buffer to decode from.
    """

    ref: ChunkRef
    payload: ByteArray
    data: ByteArray


@dataclass(frozen=True)
class Fetched:
    """What one look for a chunk found.

    Attributes:
        commit: as it was before the parts were read, or None.
        has_parts: whether any part was seen, with or without a commit.
        is_whole: whether every part is there, of the right length, and of the write that the commit names.
        is_evicted: whether a part is missing.
        size_bytes: of all its values together, if it is whole.
        layer_sums: the checksums of what was read, if it is whole and was read straight into the payload.
    """

    commit: bytes | None
    has_parts: bool
    is_whole: bool
    is_evicted: bool
    size_bytes: int
    layer_sums: str


def num_parts(data_bytes: int) -> int:
    """The number of parts for that much data."""
    return -(-data_bytes // PART_BYTES)


def split(data: ByteArray) -> list[memoryview]:
    """The parts of what is sent or received, as views."""
    return [data.data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]


class ChunkIO:
    """Moves chunks of one layout over a connection. Thread-safe; a connection belongs to one thread.

    Args:
        layout: the geometry of the chunks.
        ttl_s: after how many seconds a chunk expires, or None.
    """

    codec_name = "none"

    def __init__(self, layout: KVLayout, ttl_s: int | None) -> None:
        self._layout = layout
        self._ttl_s = ttl_s

    def max_parts(self, num_blocks: int) -> int:
        """The most parts that a payload takes: without a codec."""
        return num_parts(self._layout.payload_bytes(num_blocks))

    def keys(self, home: Home, ref: ChunkRef) -> list[bytes]:
        """All keys that a chunk may have, the commit key first."""
        return home.keys(ref, self.max_parts(ref.num_blocks))

    @contextmanager
    def outgoing(self, home: Home, ref: ChunkRef, payload: ByteArray) -> Iterator[Outgoing]:  # noqa: ARG002 - a codec's
        """A chunk as it will be stored.

        Raises:
            TierError: all buffers of the codec were in use for too long.
        """
        yield Outgoing(ref, payload, None)

    @contextmanager
    def incoming(self, ref: ChunkRef, payload: ByteArray) -> Iterator[Incoming]:
        """A place for a chunk. Take it before a connection, so that nobody waits for one while holding the other.

        Raises:
            TierError: all buffers of the codec were in use for too long.
        """
        yield Incoming(ref, payload, payload)

    def store(self, link: Link, home: Home, chunk: Outgoing) -> int | ResponseError:
        """Write a chunk, in the place of an older one.

        Returns:
            The bytes of all its values; or the server's error, and then nothing of this write is there.

        Raises:
            ResponseError: the server refused for a reason that concerns more than this chunk.
        """
        write_id = secrets.token_bytes(WRITE_ID_BYTES)
        fresh = _fresh_keys(home, chunk, write_id)
        value = self.upload(link, home, chunk, write_id, fresh)
        if isinstance(value, ResponseError):
            return value
        failure = self.commit(link, home, chunk.ref, value, fresh)
        return len(value) + WRITE_ID_BYTES * len(fresh) + len(chunk.data) if failure is None else failure

    def upload(
        self, link: Link, home: Home, chunk: Outgoing, write_id: bytes, fresh: list[bytes]
    ) -> bytes | ResponseError:
        """Write the parts of a chunk under names that nobody reads. Returns the value to ``commit``, or the error."""
        parts = split(chunk.data)
        sums = chunkfile.RunningSums(self._layout, chunk.ref.num_blocks)
        passing = sums.over(parts) if chunk.header is None else parts
        link.send(_set_commands(fresh, write_id, passing, self._ttl_s or UNCOMMITTED_TTL_S))
        header = chunk.header or self._header(home, chunk.ref, sums.text())
        failure = first_error([link.reader.reply() for _ in fresh])
        return write_id + header if failure is None else self._give_up(link, failure, fresh)

    def _header(self, home: Home, ref: ChunkRef, layer_sums: str) -> bytes:
        key = ChunkKey(home.namespace_id, ref.prefix_key)
        return chunkfile.build_header(self._layout, key, ref.num_blocks, layer_sums).rstrip()

    def commit(self, link: Link, home: Home, ref: ChunkRef, value: bytes, fresh: list[bytes]) -> ResponseError | None:
        """Make parts that were uploaded the chunk, in the place of an older one. Returns the server's error, if any."""
        keys = self.keys(home, ref)
        *queued, done = link.ask(self._commit_commands(fresh, keys, value))
        failure = first_error([*queued, *(done if isinstance(done, list) else [done])])
        if failure is None:
            return None
        return self._give_up(link, failure, fresh if isinstance(failure, OutOfMemoryError) else [*fresh, *keys])

    def _give_up(self, link: Link, failure: ResponseError, keys: list[bytes]) -> ResponseError:
        """Delete what was written, if the error concerns this chunk alone: no memory, or parts lost before the commit.

        Raises:
            ResponseError: it concerns more.
        """
        if not isinstance(failure, OutOfMemoryError) and "no such key" not in str(failure):
            raise failure
        link.call("UNLINK", *keys)
        return failure

    def _commit_commands(self, fresh: list[bytes], keys: list[bytes], value: bytes) -> list[bytes]:
        """One transaction, which gives the parts their names and writes the commit."""
        commands = [pack("MULTI")]
        for name, final in zip(fresh, keys[1:], strict=False):
            commands.append(pack("RENAME", name, final))
            if not self._ttl_s:
                commands.append(pack("PERSIST", final))
        if spare := keys[1 + len(fresh) :]:  # an older chunk may have more parts
            commands.append(pack("UNLINK", *spare))
        expiry = ("EX", self._ttl_s) if self._ttl_s else ()
        return [*commands, pack("SET", keys[0], value, *expiry), pack("EXEC")]

    def fetch(self, link: Link, home: Home, chunk: Incoming) -> Fetched:
        """Read those parts of a chunk that are there into ``chunk.data``. ``is_sound`` verifies them.

        Raises:
            ResponseError: the server refused.
        """
        commands = [pack("GET", key) for key in self.keys(home, chunk.ref)]
        asked, read = min(1 + _WINDOW, len(commands)), 1
        link.send([b"".join(commands[:asked])])
        commit = _commit(link.reader.reply())
        views = self._views(home, chunk, commit)
        sums = chunkfile.RunningSums(self._layout, chunk.ref.num_blocks)
        is_whole, is_evicted, has_parts = commit is not None and bool(views), False, False
        while read < asked:
            is_needed = read <= len(views)  # with a codec, there may be less than was asked for ahead
            write_id = link.reader.value_into(WRITE_ID_BYTES, views[read - 1] if is_needed else _NOWHERE)
            read += 1
            has_parts = has_parts or write_id is not None
            if is_needed:
                is_evicted = is_evicted or write_id is None
                is_whole = is_whole and commit is not None and write_id == commit[:WRITE_ID_BYTES]
                if is_whole and asked <= len(views):
                    link.send([commands[asked]])
                    asked += 1
                if is_whole and chunk.data is chunk.payload:
                    sums.add(views[read - 2])
        size_bytes = len(commit or b"") + sum(WRITE_ID_BYTES + len(view) for view in views)
        return Fetched(commit, has_parts, is_whole, is_evicted, size_bytes, sums.text())

    def _views(self, home: Home, chunk: Incoming, commit: bytes | None) -> list[memoryview]:  # noqa: ARG002 - with a codec it says
        """Where the parts go; no views if the commit is not that of a chunk."""
        return split(chunk.data)

    def is_sound(self, home: Home, chunk: Incoming, found: Fetched) -> bool:
        """Whether key, length and checksums of what was fetched agree. Only then ``chunk.payload`` holds the KV."""
        said = (found.commit or b"")[WRITE_ID_BYTES:]
        return found.is_whole and said == self._header(home, chunk.ref, found.layer_sums)

    def is_foreign(self, commit: bytes) -> bool:
        """Whether the chunk was encoded with a codec that is not read here."""
        codec = chunkfile.codec_of(commit[WRITE_ID_BYTES:])
        return codec in CODEC_NAMES and codec not in {"none", self.codec_name}

    def discard(self, link: Link, home: Home, ref: ChunkRef, commit: bytes | None) -> bool:
        """Remove a chunk if its commit is unchanged (None: still missing). Returns whether it was.

        Raises:
            ResponseError: the server refused.
        """
        keys = self.keys(home, ref)
        now = _commit(link.ask([pack("WATCH", keys[0]), pack("GET", keys[0])])[1])
        if now != commit:
            link.call("UNWATCH")
            return False
        replies = link.ask([pack("MULTI"), pack("UNLINK", *keys), pack("EXEC")])
        failure = first_error(replies)
        if isinstance(failure, OutOfMemoryError):
            link.call("UNLINK", *keys)
        elif failure is not None:
            raise failure
        return failure is not None or replies[-1] is not None

    def remove_command(self, home: Home, ref: ChunkRef) -> bytes:
        """Remove a chunk."""
        return pack("UNLINK", *self.keys(home, ref))


def _fresh_keys(home: Home, chunk: Outgoing, write_id: bytes) -> list[bytes]:
    parts = home.keys(chunk.ref, num_parts(len(chunk.data)))[1:]
    return [b"%b:w%b" % (key, write_id.hex().encode()) for key in parts]


def _set_commands(names: Sequence[bytes], write_id: bytes, views: Iterable[memoryview], ttl_s: int) -> Iterator[Buffer]:
    """SET commands for all parts, their bytes as views of the payload."""
    tail = b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s)
    end = b""
    for name, view in zip(names, views, strict=True):
        size = len(write_id) + len(view)
        yield end + b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(name), name, size, write_id)
        yield view
        end = tail
    yield end


def _commit(reply: Reply) -> bytes | None:
    """The commit value: None if there is none, and empty if a value of another type is in its place."""
    if isinstance(reply, ResponseError):
        if not str(reply).startswith("WRONGTYPE"):
            raise reply
        return _UNUSABLE
    return reply if isinstance(reply, bytes) else None


def first_error(replies: Sequence[Reply]) -> ResponseError | None:
    """The first error among replies, but EXECABORT only if there is no other: it reports one of the others."""
    errors = [reply for reply in replies if isinstance(reply, ResponseError)]
    if not errors:
        return None
    return next((error for error in errors if not isinstance(error, ExecAbortError)), errors[0])
