"""A client of a cache server that uses more of the protocol than ours: it sets a bound, and asks what is there."""

from __future__ import annotations

from kvstore.chunks import ChunkRef
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout, round_up
from kvstore.protocol import messages
from kvstore.protocol.geometry import Geometry
from kvstore.protocol.runs import PAGE_BYTES
from kvstore.tiers.base import BoundedTier, TierSetup
from kvstore.tiers.server.link import Link
from kvstore.tiers.server.links import Links
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import ServerTarget, parse_server


class BoundedServerTier(ServerTier, BoundedTier):
    """A server tier whose namespace holds at most ``capacity_bytes``; beyond that ``put`` answers ``FULL``."""

    def __init__(self, target: ServerTarget, namespace: Namespace, layout: KVLayout, capacity_bytes: int) -> None:
        super().__init__(target, namespace, layout)
        self._links.close()
        self._links = Links(target, namespace, Geometry.of(layout), capacity_bytes)
        self.capacity_bytes = capacity_bytes
        if capacity_bytes < self.stored_bytes(layout.blocks_per_chunk):
            self._links.close()
            raise ConfigError(f"{capacity_bytes} bytes of a cache server do not hold one chunk")

    @classmethod
    def open(cls, setup: TierSetup) -> BoundedServerTier:
        options = dict(setup.options)
        target = parse_server(options.pop("url"), options)
        return cls(target, setup.namespace, setup.layout, setup.capacity_bytes)

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, the least recently used first."""
        return [(ref, self.stored_bytes(ref.num_blocks)) for ref in self._links.use(scan)]

    def stored_bytes(self, num_blocks: int) -> int:
        """The bytes of the server's pages that a chunk takes."""
        return round_up(self._layout.payload_bytes(num_blocks), PAGE_BYTES)

    @property
    def used_bytes(self) -> int:
        """What the namespace takes at the server. Asks it."""
        return self._links.use(used_bytes)


def scan(link: Link) -> list[ChunkRef]:
    """Every chunk of the connection's namespace, the least recently used first."""
    refs: dict[ChunkRef, None] = {}
    first = 0
    while True:
        listing = link.ask(messages.Scan(link.new_serial(), first), messages.Listing)
        refs.update(dict.fromkeys(messages.unpack_refs(listing.refs)))
        first += len(listing.refs) // messages.REF_BYTES
        if first >= listing.total or not listing.refs:
            return list(refs)


def used_bytes(link: Link) -> int:
    """What the connection's namespace takes at the server now."""
    behind_the_last = 1 << 40
    return link.ask(messages.Scan(link.new_serial(), behind_the_last), messages.Listing).usage.used_bytes
