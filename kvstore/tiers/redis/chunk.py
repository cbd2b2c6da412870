"""A chunk in Redis: its keys, and how it gets there and back over one connection. ``docs/FORMAT.md`` describes it.

- The payload lies in parts of about 1 MiB, under names that follow from the chunk's own. A small commit value beside
  them is the header of a chunk file. A hash tag keeps all of them on one node of a cluster.
- What is here stores payloads as they are; ``_redis_coded.py`` does it through a codec, in fewer parts.
- Parts are written under names of their own, which expire, and renamed together with the commit in one transaction:
  a chunk is there whole or not at all, and whoever writes last wins whole.
- Commit and parts begin with the id of the write that made them. Readers ask for them one after the other; if the
  chunk is replaced meanwhile, ids or checksums do not agree, and the commit is not the same any more.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from redis.exceptions import ExecAbortError, OutOfMemoryError, ResponseError

from kvstore.chunks import ChunkRef
from kvstore.format import chunkfile
from kvstore.format.codecs import CODEC_NAMES
from kvstore.keys import ChunkKey
from kvstore.tiers.redis.ledger import WRITE_ID_BYTES
from kvstore.tiers.redis.wire import Buffer, Link, Reply, pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.chunks import ByteArray
    from kvstore.layout import KVLayout
    from kvstore.tiers.redis.ledger import WriteId

# A value of 1 MiB and its header would take 1.25 MiB of jemalloc's size classes; this takes 1 MiB.
PART_BYTES = (1 << 20) - 4096
UNCOMMITTED_TTL_S = 600  # after that a part expires whose writer was killed before it committed
PREFIX = b"kvs:{"
_WINDOW = 3  # parts asked for ahead: the server copies one while another is on the wire
_BLANK_KEY = ChunkKey(bytes(8), bytes(16))
_NOWHERE = memoryview(bytearray())
_UNUSABLE = b""  # stands for a commit of another type


def commit_key(tag: bytes) -> bytes:
    """The key that says that the chunk with this tag is there."""
    return PREFIX + tag + b"}:c"


def exists_command(tag: bytes) -> bytes:
    """Ask whether the chunk with this tag is there. Of these a lookup sends one a chunk."""
    key = commit_key(tag)
    return b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key)


@dataclass(frozen=True)
class Home:
    """Where the chunks of a namespace are at present. Another epoch is another place: what was in the old one is gone.

    Attributes:
        namespace_id: whose chunks.
        epoch: 16 hex digits, or empty as long as it is not known.
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
        """The hash tag of a chunk: what decides on its node."""
        return b"%b%b:%d" % (self._stem, ref.prefix_key.hex().encode(), ref.num_blocks)

    def keys(self, ref: ChunkRef, num_parts: int) -> list[bytes]:
        """All keys of a chunk, the commit key first."""
        stem = PREFIX + self.tag(ref) + b"}:"
        return [commit_key(self.tag(ref)), *(stem + b"%d" % part for part in range(num_parts))]

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
        size_bytes: of all its values together.
        header: of its commit, without trailing spaces; None if it follows from what is sent.
    """

    ref: ChunkRef
    data: ByteArray
    size_bytes: int
    header: bytes | None


class Incoming(NamedTuple):
    """Where a chunk is to go.

    Attributes:
        ref: which one.
        payload: for its KV.
        data: for what is in its parts: the same, or a buffer for what is to be decoded.
    """

    ref: ChunkRef
    payload: ByteArray
    data: ByteArray


@dataclass(frozen=True)
class Fetched:
    """What a look for a chunk has found.

    Attributes:
        commit: as it was before the parts were read, or None.
        is_whole: whether every part is there, of the right length, and of the write that the commit names.
        is_evicted: whether a part is not there at all.
        size_bytes: of all its values together, if it is whole.
        layer_sums: the checksums of what was read, if it is whole and was read to where it belongs.
    """

    commit: bytes | None
    is_whole: bool = False
    is_evicted: bool = False
    size_bytes: int = 0
    layer_sums: str = ""


def num_parts(data_bytes: int) -> int:
    """In how many parts that much lies."""
    return -(-data_bytes // PART_BYTES)


def split(data: ByteArray) -> list[memoryview]:
    """The parts of what is to be sent or received, as views."""
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
        """In how many parts a payload lies at most: as it is."""
        return num_parts(self._layout.payload_bytes(num_blocks))

    def keys(self, home: Home, ref: ChunkRef) -> list[bytes]:
        """All keys that a chunk may have, the commit key first."""
        return home.keys(ref, self.max_parts(ref.num_blocks))

    def stored_bytes(self, num_blocks: int) -> int:
        """The length of all values of a chunk together; with a codec, the most that it can be."""
        return self.size_of(num_blocks, self._layout.payload_bytes(num_blocks))

    def size_of(self, num_blocks: int, data_bytes: int) -> int:
        """The length of all values of a chunk with so much in its parts."""
        blank = chunkfile.build_header(self._layout, _BLANK_KEY, num_blocks, self._blank_sums())
        return values_bytes(len(blank.rstrip()), data_bytes)

    @contextmanager
    def outgoing(self, home: Home, ref: ChunkRef, payload: ByteArray) -> Iterator[Outgoing]:  # noqa: ARG002 - a codec's
        """A chunk as it will be stored.

        Raises:
            TierError: all buffers for that are in use for too long.
        """
        yield Outgoing(ref, payload, self.stored_bytes(ref.num_blocks), None)

    @contextmanager
    def incoming(self, ref: ChunkRef, payload: ByteArray) -> Iterator[Incoming]:
        """A place for a chunk. Taken before a connection is, so that nobody waits for one while holding the other.

        Raises:
            TierError: all buffers for that are in use for too long.
        """
        yield Incoming(ref, payload, payload)

    def upload(self, link: Link, home: Home, write_id: WriteId, chunk: Outgoing) -> bytes | ResponseError:
        """Write the parts of a chunk under names that nobody reads.

        Returns:
            The value to ``commit`` them with; or the server's error if it has no memory, and then nothing of them is
            there.

        Raises:
            ResponseError: the server refused for another reason.
        """
        fresh, parts = _fresh_keys(home, chunk, write_id), split(chunk.data)
        sums = chunkfile.RunningSums(self._layout, chunk.ref.num_blocks)
        passing = sums.over(parts) if chunk.header is None else parts
        link.send(_set_commands(fresh, write_id, passing, self._ttl_s or UNCOMMITTED_TTL_S))
        header = chunk.header or self._header(home, chunk.ref, sums.text())
        failure = first_error([link.reader.reply() for _ in fresh])
        return write_id + header if failure is None else self._give_up(link, failure, fresh)

    def _header(self, home: Home, ref: ChunkRef, layer_sums: str) -> bytes:
        key = ChunkKey(home.namespace_id, ref.prefix_key)
        return chunkfile.build_header(self._layout, key, ref.num_blocks, layer_sums).rstrip()

    def commit(
        self, link: Link, home: Home, write_id: WriteId, chunk: Outgoing, value: bytes
    ) -> set[WriteId] | ResponseError:
        """Make parts that were uploaded the chunk, in the place of an older one.

        Returns:
            The write that it replaced, if any; or the server's error, and then nothing of this write is there.

        Raises:
            ResponseError: the server refused for a reason that concerns more than this chunk.
        """
        fresh, keys = _fresh_keys(home, chunk, write_id), self.keys(home, chunk.ref)
        *queued, done = link.ask(self._commit_commands(fresh, keys, value))
        # The first reply inside the transaction is the id, or says that the old commit was no string.
        replies = done[1:] if isinstance(done, list) else [done]
        failure = first_error([*queued, *replies])
        if failure is None:
            return ended_by(done)
        return self._give_up(link, failure, fresh if isinstance(failure, OutOfMemoryError) else [*fresh, *keys])

    def _give_up(self, link: Link, failure: ResponseError, keys: list[bytes]) -> ResponseError:
        """Delete what was written, if the error is about this chunk: no memory, or parts gone before their renaming.

        Raises:
            ResponseError: it is about more.
        """
        if not isinstance(failure, OutOfMemoryError) and "no such key" not in str(failure):
            raise failure
        link.call("UNLINK", *keys)
        return failure

    def _commit_commands(self, fresh: list[bytes], keys: list[bytes], value: bytes) -> list[bytes]:
        """One transaction, which gives the parts their names and says that the chunk is there."""
        commands = [pack("MULTI"), _ask_id(keys[0])]
        for name, final in zip(fresh, keys[1:], strict=False):
            commands.append(pack("RENAME", name, final))
            if not self._ttl_s:
                commands.append(pack("PERSIST", final))
        if spare := keys[1 + len(fresh) :]:  # an older chunk may have more parts
            commands.append(pack("UNLINK", *spare))
        expiry = ("EX", self._ttl_s) if self._ttl_s else ()
        return [*commands, pack("SET", keys[0], value, *expiry), pack("EXEC")]

    def fetch(self, link: Link, home: Home, chunk: Incoming) -> Fetched:
        """Read the parts of a chunk into ``chunk.data``, as far as they are there. ``is_sound`` tells what they are.

        Raises:
            ResponseError: the server refused.
        """
        commands = [pack("GET", key) for key in self.keys(home, chunk.ref)]
        asked, read = min(1 + _WINDOW, len(commands)), 1
        link.send([b"".join(commands[:asked])])
        commit = _commit(link.reader.reply())
        views = self._views(home, chunk, commit)
        sums = chunkfile.RunningSums(self._layout, chunk.ref.num_blocks)
        is_whole, is_evicted = commit is not None and bool(views), False
        while read < asked:
            is_needed = read <= len(views)  # with a codec, there may be less than was asked for ahead
            write_id = link.reader.value_into(WRITE_ID_BYTES, views[read - 1] if is_needed else _NOWHERE)
            read += 1
            if is_needed:
                is_evicted = is_evicted or write_id is None
                is_whole = is_whole and commit is not None and write_id == commit[:WRITE_ID_BYTES]
                if is_whole and asked <= len(views):
                    link.send([commands[asked]])
                    asked += 1
                if is_whole and chunk.data is chunk.payload:
                    sums.add(views[read - 2])
        size_bytes = len(commit or b"") + sum(WRITE_ID_BYTES + len(view) for view in views)
        return Fetched(commit, is_whole, is_evicted, size_bytes, sums.text())

    def _views(self, home: Home, chunk: Incoming, commit: bytes | None) -> list[memoryview]:  # noqa: ARG002 - with a codec it says
        """Where the parts go; none of them if the commit is not that of a chunk."""
        return split(chunk.data)

    def is_sound(self, home: Home, chunk: Incoming, found: Fetched) -> bool:
        """Whether what was fetched is the chunk that was asked for: key, length and checksums agree.

        Only then ``chunk.payload`` is its KV.
        """
        said = (found.commit or b"")[WRITE_ID_BYTES:]
        return found.is_whole and said == self._header(home, chunk.ref, found.layer_sums)

    def is_foreign(self, commit: bytes) -> bool:
        """Whether another codec has encoded the chunk, one that is not read here."""
        codec = chunkfile.codec_of(commit[WRITE_ID_BYTES:])
        return codec in CODEC_NAMES and codec not in {"none", self.codec_name}

    def discard(self, link: Link, home: Home, ref: ChunkRef, commit: bytes | None) -> bool:
        """Remove a chunk if its commit is still this one (None: still missing). Returns whether it was.

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

    def remove_commands(self, home: Home, ref: ChunkRef) -> list[bytes]:
        """Remove a chunk; the last reply is for ``ended_by``."""
        keys = self.keys(home, ref)
        return [pack("MULTI"), _ask_id(keys[0]), pack("UNLINK", *keys), pack("EXEC")]

    def forced_remove_commands(self, home: Home, ref: ChunkRef) -> list[bytes]:
        """The same for a server without memory, which takes no transaction; it does not say whose write ends."""
        return [pack("UNLINK", *self.keys(home, ref))]

    def _blank_sums(self) -> str:
        return "0" * 16 * self._layout.num_layers


def values_bytes(header_bytes: int, data_bytes: int) -> int:
    """The length of all values: the commit with its header, and the parts with what is in them."""
    return WRITE_ID_BYTES + header_bytes + WRITE_ID_BYTES * num_parts(data_bytes) + data_bytes


def _fresh_keys(home: Home, chunk: Outgoing, write_id: WriteId) -> list[bytes]:
    parts = home.keys(chunk.ref, num_parts(len(chunk.data)))[1:]
    return [b"%b:w%b" % (key, write_id.hex().encode()) for key in parts]


def _set_commands(
    names: Sequence[bytes], write_id: WriteId, views: Iterable[memoryview], ttl_s: int
) -> Iterator[Buffer]:
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
    """The commit value: None if there is none, and no bytes if there is something else in its place."""
    if isinstance(reply, ResponseError):
        if not str(reply).startswith("WRONGTYPE"):
            raise reply
        return _UNUSABLE
    return reply if isinstance(reply, bytes) else None


def _ask_id(commit_key: bytes) -> bytes:
    """The first command of a transaction that ends a write: whose?"""
    return pack("GETRANGE", commit_key, 0, WRITE_ID_BYTES - 1)


def ended_by(done: Reply) -> set[WriteId]:
    """The write that a transaction has ended, if any; nobody knows the id if its commit was no string."""
    found = done[0] if isinstance(done, list) else None
    return {found} if isinstance(found, bytes) and found else set()


def first_error(replies: Sequence[Reply]) -> ResponseError | None:
    """The first error among replies, but not the one that only says that there was another."""
    errors = [reply for reply in replies if isinstance(reply, ResponseError)]
    if not errors:
        return None
    return next((error for error in errors if not isinstance(error, ExecAbortError)), errors[0])
