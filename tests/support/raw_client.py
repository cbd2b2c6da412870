"""Requests for the contents of a cache server, which our client does not send and others may."""

from __future__ import annotations

from kvstore.model.chunks import ChunkRef
from kvstore.protocol import messages
from kvstore.tiers.server.connection import ServerConnection


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
