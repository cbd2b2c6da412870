"""One namespace at the server, and its chunks. Plain state, which ``stock.py`` changes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.catalog.trails import Trails
from kvstore.chunks import ChunkRef
from kvstore.keys import NAMESPACE_ID_BYTES, Namespace
from kvstore.layout import KVLayout
from kvstore.protocol.geometry import encode_geometry
from kvstore.protocol.messages import pack_refs
from kvstore.protocol.runs import PAGE_BYTES, Run
from kvstore.server.pool import pages_of

NO_QUOTA = 1 << 62


@dataclass(eq=False, repr=False, slots=True)
class Chunk:
    """One chunk of a namespace, in memory, on disk or both.

    Attributes:
        space: the namespace.
        ref: its name there.
        key: its name among the chunks of all namespaces.
        num_bytes: of its payload.
        size_bytes: of the pages it takes in memory; also what it counts against a quota.
        runs: where it is in memory; empty if it is not.
        disk_bytes: what it takes on disk; 0 if it is not there.
        uses: reads, loads and writes under way, while which its pages are given to nobody else.
        pin_end_s: when its pin ends; 0 if it is not pinned.
        is_whole: all of it is in memory. Not so while it is written, or read from disk.
        is_dropped: nothing knows it any more; its pages are freed with the last use.
        epoch: of its namespace, when its write began.
        sums: known checksums of parts of its payload as it is in memory, by offset and length.
        trail: the keys at the ends of its blocks; empty if they were not told.
    """

    space: Space
    ref: ChunkRef
    key: bytes = field(init=False)
    num_bytes: int = field(init=False)
    size_bytes: int = field(init=False)
    runs: tuple[Run, ...] = ()
    disk_bytes: int = 0
    uses: int = 0
    pin_end_s: int = 0
    is_whole: bool = False
    is_dropped: bool = False
    epoch: int = field(init=False)
    sums: dict[tuple[int, int], bytes] = field(default_factory=dict)
    trail: bytes = b""

    def __post_init__(self) -> None:
        self.key = self.space.key_of(self.ref)
        self.num_bytes = self.space.layout.payload_bytes(self.ref.num_blocks)
        self.size_bytes = pages_of(self.num_bytes) * PAGE_BYTES
        self.epoch = self.space.epoch

    @property
    def is_pinned(self) -> bool:
        """Whether it is kept from eviction."""
        return self.pin_end_s != 0 and not self.is_cleared

    @property
    def is_cleared(self) -> bool:
        """Tell if its namespace was cleared since its write began."""
        return self.epoch != self.space.epoch

    @property
    def is_gone(self) -> bool:
        """Tell if it cannot be found any more. From any thread."""
        return self.is_dropped or self.is_cleared


class Quota:
    """The bytes that some namespaces may hold, and do hold.

    Attributes:
        tenant: of the namespaces.
        name: under which the quota was given; empty if none was.
        limit_bytes: in memory and on disk together, each chunk counted once.
        used_bytes: of all chunks of these namespaces, those being written included.
    """

    def __init__(self, tenant: str = "", name: str = "", limit_bytes: int = NO_QUOTA) -> None:
        self.tenant = tenant
        self.name = name
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._chunks: OrderedDict[Chunk, None] = OrderedDict()  # only where there is a limit

    def touch(self, chunk: Chunk) -> None:
        """Note that a chunk was stored or read."""
        if self.limit_bytes != NO_QUOTA:
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Note that a chunk is gone."""
        self._chunks.pop(chunk, None)

    def by_age(self) -> Iterator[Chunk]:
        """The chunks of all of these namespaces, the least recently used first."""
        return iter(self._chunks)


@dataclass
class SpaceCounters:
    """What happened in a namespace since the server started."""

    lookups: int = 0
    found_chunks: int = 0  # of those looked up
    missing_chunks: int = 0
    stored_chunks: int = 0
    stored_bytes: int = 0
    read_chunks: int = 0
    read_bytes: int = 0
    loaded_chunks: int = 0  # of those read, brought from disk
    full: int = 0
    failed: int = 0
    evicted_chunks: int = 0


@dataclass
class Space:
    """A namespace.

    Attributes:
        id: 8 bytes that stand for namespace, geometry and tenant; people see the namespace's own id.
        namespace: its fields.
        layout: the geometry of its chunks.
        tenant: whose chunks these are; empty for those of all clients without one.
        quota: what it may hold together with others.
        chunks: the least recently used first.
        trails: of those of them that have one.
        stored_bytes: of those of the chunks that can be found.
        epoch: counts how often it was cleared.
        num_sessions: clients that use it now.
    """

    namespace: Namespace
    layout: KVLayout
    tenant: str = ""
    quota: Quota = field(default_factory=Quota)
    chunks: dict[ChunkRef, Chunk] = field(default_factory=dict)
    trails: Trails = field(default_factory=Trails)
    stored_bytes: int = 0
    epoch: int = 0
    num_sessions: int = 0
    counters: SpaceCounters = field(default_factory=SpaceCounters)

    def __post_init__(self) -> None:
        # With another geometry, the same names would stand for other bytes; with another tenant, for another's.
        name = self.namespace.id + encode_geometry(self.layout) + self.tenant.encode()
        self.id = hashlib.sha256(name).digest()[:NAMESPACE_ID_BYTES]
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Of all chunks, those being written included."""
        return self._used_bytes

    @used_bytes.setter
    def used_bytes(self, value: int) -> None:
        self.quota.used_bytes += value - self._used_bytes
        self._used_bytes = value

    def key_of(self, ref: ChunkRef) -> bytes:
        """The name of a chunk among those of all namespaces."""
        return self.id + pack_refs([ref])

    def has_size(self, ref: ChunkRef) -> bool:
        """Whether there can be a chunk of that many blocks."""
        return 0 < ref.num_blocks <= self.layout.blocks_per_chunk
