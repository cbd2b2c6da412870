"""Estate of a server: its namespaces, chunks and leases, and the descriptors that come with them.

Its records are arrays of msgpack, to which later versions may add elements with defaults: a reader ignores those that
it does not know. A change that an earlier reader would misunderstand needs another ``FORMAT``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Final

import msgspec

from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ProtocolError
from kvstore.model.keys import Namespace
from kvstore.protocol.payload import Geometry, Run
from kvstore.server.clients import IPC, OURSELVES
from kvstore.server.core import Core
from kvstore.server.sessions import Peer
from kvstore.server.spaces import Chunk, Space, SpaceCounters

FORMAT: Final = 1
OLDEST_FORMAT: Final = 1


class SpaceRecord(msgspec.Struct, array_like=True):
    """Namespace. Attributes as those of ``Space``, and the bytes of all its files."""

    fields: dict[str, str | int]
    geometry: Geometry
    tenant: str
    disk_bytes: int
    counters: dict[str, int]


class ChunkRecord(msgspec.Struct, array_like=True):
    """Chunk, or pages that a client still uses. Attributes as those of ``Chunk``.

    Attributes:
        space: number of its namespace in the estate.
        is_lost: it cannot be found: its pages are only kept for the clients that use them.
        is_unwritten: it waits for the disk.
    """

    space: int
    prefix_key: bytes
    num_blocks: int
    runs: list[Run]
    disk_bytes: int
    pin_end_s: int
    until_s: float | None
    trail: bytes
    is_lost: bool
    is_unwritten: bool
    owner: bytes = b""


class LeaseRecord(msgspec.Struct, array_like=True):
    """Lease of a client that maps the memory: its token, the chunk's number in the estate, and the kind of lease."""

    token: bytes
    chunk: int
    is_write: bool


class Estate(msgspec.Struct, array_like=True):
    """State of a server at its end. The chunks come least valuable first.

    Attributes:
        stamp: see ``Stock``.
        tokens: tokens of the clients' connections, in the order of their descriptors.
        paused_s: monotonic time since which nobody was served.
    """

    spaces: list[SpaceRecord]
    chunks: list[ChunkRecord]
    leases: list[LeaseRecord]
    tokens: list[bytes]
    stamp: int
    paused_s: float


@dataclass
class Inheritance:
    """Estate with its descriptors, which the receiver owns.

    Attributes:
        pool_fd: the memory.
        listener_fd: the unix socket that hands out the memory.
        lock_fd: lock of the disk's folder; -1 without a disk.
        connection_fds: connections of the clients to the unix socket.
    """

    estate: Estate
    pool_fd: int
    listener_fd: int
    lock_fd: int = -1
    connection_fds: list[int] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """All pages that are in use."""
        return [run for chunk in self.estate.chunks for run in chunk.runs]


def draw_up(core: Core, unwritten: Iterable[Chunk], tokens: list[bytes], paused_s: float = 0.0) -> Estate:
    """Return the estate of a server that is paused.

    Args:
        core: its state.
        unwritten: chunks that wait for the disk.
        tokens: of the clients' connections to the unix socket.
        paused_s: monotonic time since which nobody is served.
    """
    numbers: dict[bytes, int] = {}
    spaces: list[SpaceRecord] = []
    for space in core.stock.spaces.values():
        numbers[space.id] = len(spaces)
        disk_bytes = core.disk.bytes_of(space) if core.disk is not None else 0
        geometry, counters = Geometry.of(space.layout), asdict(space.counters)
        spaces.append(SpaceRecord(dict(space.namespace.fields), geometry, space.tenant, disk_bytes, counters))
    waiting = set(unwritten)
    places: dict[Chunk, int] = {}
    chunks: list[ChunkRecord] = []

    def enter(chunk: Chunk, *, is_lost: bool) -> int:
        place = places.setdefault(chunk, len(chunks))
        if place == len(chunks):
            chunks.append(_record(chunk, numbers[chunk.space.id], is_lost=is_lost, is_unwritten=chunk in waiting))
        return place

    for chunk in core.stock.by_value():
        assert chunk.is_whole or not chunk.runs, "its pages are still being read from disk"
        enter(chunk, is_lost=False)
    leases = [
        LeaseRecord(session.token, enter(lease.chunk, is_lost=True), lease.is_write)
        for session in core.sessions.mapped()
        for lease in session.leases.values()
    ]
    return Estate(spaces, chunks, leases, tokens, core.stock.stamp, paused_s)


def _record(chunk: Chunk, space: int, *, is_lost: bool, is_unwritten: bool) -> ChunkRecord:
    return ChunkRecord(
        space,
        chunk.ref.prefix_key,
        chunk.ref.num_blocks,
        list(chunk.runs),
        chunk.disk_bytes,
        chunk.pin_end_s,
        chunk.until_s,
        chunk.trail,
        is_lost,
        is_unwritten,
        chunk.owner,
    )


def settle(estate: Estate, core: Core) -> list[Chunk]:
    """Enter an estate into the empty state of a server; returns the chunks that wait for the disk.

    Raises:
        ProtocolError: it contradicts itself.
    """
    stock, sessions = core.stock, core.sessions
    spaces = [_settle_space(core, record) for record in estate.spaces]
    try:
        entered = [_settle_chunk(core, spaces[record.space], record) for record in estate.chunks]
        held: dict[bytes, list[tuple[Chunk, bool]]] = {}
        for lease in estate.leases:
            held.setdefault(lease.token, []).append((entered[lease.chunk], lease.is_write))
    except IndexError as error:
        raise ProtocolError("the estate names a namespace or a chunk that it does not have") from error
    for token, leases in held.items():
        # ZeroMQ gives out no such name, so only the end of the connection ends this session.
        peer = Peer(IPC, b"former " + token)
        session = sessions.begin(peer, OURSELVES, leases[0][0].space, token, core.now())
        for chunk, is_write in leases:
            chunk.uses += 1
            chunk.account.charge(chunk.size_bytes if is_write else 0)  # until its write fails
            sessions.lease(session, chunk, is_write=is_write)
    stock.stamp = max(stock.stamp, estate.stamp + 1)
    return [chunk for chunk, record in zip(entered, estate.chunks, strict=True) if record.is_unwritten]


def _settle_space(core: Core, record: SpaceRecord) -> Space:
    space = core.stock.spaces.enter(Namespace(record.fields), record.geometry.layout(), record.tenant)
    if space is None:
        raise ProtocolError(f"the estate has {len(core.stock.spaces) + 1} namespaces, more than a server may have")
    known = SpaceCounters.__dataclass_fields__
    space.counters = SpaceCounters(**{name: count for name, count in record.counters.items() if name in known})
    if core.disk is not None and record.disk_bytes:
        core.disk.expect(space, record.disk_bytes)
    return space


def _settle_chunk(core: Core, space: Space, record: ChunkRecord) -> Chunk:
    ref = ChunkRef(record.prefix_key, record.num_blocks)
    chunk = Chunk(space, ref, tuple(record.runs), trail=record.trail, until_s=record.until_s, owner=record.owner)
    if record.is_lost:
        chunk.is_dropped = True
        return chunk
    if ref in space.chunks:
        raise ProtocolError("the estate has a chunk twice")
    chunk.is_whole = bool(chunk.runs)
    chunk.disk_bytes = record.disk_bytes if core.disk is not None else 0
    core.stock.adopt(chunk)
    if record.pin_end_s:
        core.stock.pins.set(chunk, record.pin_end_s)
    return chunk
