"""Requests for the contents of a cache server, which our client does not send and others may."""

from __future__ import annotations

from kvstore.chunks import ChunkRef
from kvstore.protocol import messages
from kvstore.tiers.server.link import Link


def scan(link: Link) -> list[ChunkRef]:
    """Return every chunk of the connection's namespace, the least recently used first."""
    refs: dict[ChunkRef, None] = {}
    first = 0
    while True:
        listing = link.ask(messages.Scan(link.new_serial(), first), messages.Listing)
        refs.update(dict.fromkeys(messages.unpack_refs(listing.refs)))
        first += len(listing.refs) // messages.REF_BYTES
        if first >= listing.total or not listing.refs:
            return list(refs)


def used_bytes(link: Link) -> int:
    """Read the bytes that the connection's namespace takes at the server now."""
    behind_the_last = 1 << 40
    return link.ask(messages.Scan(link.new_serial(), behind_the_last), messages.Listing).usage.used_bytes
