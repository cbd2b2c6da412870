"""Helpers for tests of a running cache server: tiers, bare connections, contents, and checks for afterwards."""

from __future__ import annotations

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.contexts import Context, close_context, open_context
from kvstore.protocol.payload import Geometry
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server
from support.cache_server import ServerThread
from support.redis_server import wait_for

A, B = make_ref(1), make_ref(2)
BIG = KVLayout(page_bytes=(1 << 20,), planes=1, block_tokens=16, chunk_tokens=64)
WAIT_S = 20.0


def open_tier(url: str, layout: KVLayout = EVEN, namespace: Namespace = MINE, **options: object) -> ServerTier:
    return ServerTier.open(TierSetup(namespace, layout, UNBOUNDED_BYTES, {"url": url, "timeout_s": 10.0, **options}))


def open_connection(url: str, layout: KVLayout = EVEN) -> tuple[Context, ServerConnection]:
    context = open_context()
    connection = ServerConnection(context, parse_server(url, {}))
    connection.hello(MINE, Geometry.of(layout))
    return context, connection


def check_read(tier: ServerTier, ref: ChunkRef, layout: KVLayout = EVEN, version: int = 0) -> Outcome:
    buffer = make_buffer(layout.slot_bytes)
    (outcome,) = tier.get([Transfer(ref, buffer)])
    if outcome is Outcome.HIT:
        payload = make_payload(layout, ref, version)
        assert buffer[: len(payload)].tobytes() == payload
    return outcome


def works(tier: Tier) -> bool:
    try:
        return tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
    except TierError:
        return False


def check_quiet(server: ServerThread) -> None:
    """Check that no client holds anything, and that every page belongs to a chunk."""
    wait_for("leases end", lambda: server.hub.sessions.num_leases == 0)
    chunks = [chunk for space in server.hub.stock.spaces.values() for chunk in space.chunks.values()]
    assert server.hub.sessions.leased_bytes == 0
    assert server.hub.pool.used_bytes == sum(chunk.size_bytes for chunk in chunks if chunk.runs)
    assert sum(space.used_bytes for space in server.hub.stock.spaces.values()) == sum(c.size_bytes for c in chunks)


def settle(server: ServerThread) -> None:
    """Wait until the disk has everything."""
    service = server.hub.service
    wait_for("nothing is on its way to disk", lambda: not service.writes.is_changing_files)


class Raw:
    """A client that sends whatever a test wants."""

    def __init__(self, server: ServerThread) -> None:
        self.context = open_context()  # which a test that fails leaks, and nothing waits for
        self.connection = ServerConnection(self.context, parse_server(server.url, {"timeout_s": 10.0}))

    def hello(self, fields: dict[str, str | int], geometry: Geometry) -> messages.Welcome:
        return self.connection.hello(Namespace(fields), geometry)

    def close(self) -> None:
        self.connection.close()
        close_context(self.context)


def scan(connection: ServerConnection) -> list[ChunkRef]:
    """Return every chunk of the connection's namespace, the least recently used first."""
    refs: dict[ChunkRef, None] = {}
    first = 0
    while True:
        listing = connection.ask(messages.Scan(connection.new_serial(), first), messages.Listing)
        refs.update(dict.fromkeys(messages.unpack_refs(listing.refs)))
        first += len(listing.refs) // messages.REF_BYTES
        if first >= listing.total or not listing.refs:
            return list(refs)


def used_bytes(connection: ServerConnection) -> int:
    """Read the bytes that the connection's namespace takes at the server now."""
    behind_the_last = 1 << 40
    return connection.ask(messages.Scan(connection.new_serial(), behind_the_last), messages.Listing).usage.used_bytes
