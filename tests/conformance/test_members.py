"""Tests of the contract by the tier of several cache servers, three of which run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import pytest
from support.cache_server import ServerThread, serving_tcp

from kvstore.model.chunks import ChunkRef
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.testing import MINE, TierConformance
from kvstore.tiers import open_tier, tier_behind
from kvstore.tiers.base import Tier, TierSetup
from kvstore.tiers.guards import Statistics


class TestMembers(TierConformance):
    """Tier of three servers."""

    persistent = True
    keeps_trails = True
    servers: ClassVar[list[ServerThread]]
    _last_folder: object = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _servers(cls) -> Iterator[None]:
        with ExitStack() as running:
            cls.servers = [running.enter_context(serving_tcp()) for _ in range(3)]
            yield

    def open_tier(self, setup: TierSetup) -> Tier:
        if self.folder != self._last_folder:  # a new harness begins with an empty storage
            for server in self.servers:
                stock = server.hub.stock
                for space in stock.spaces.values():
                    stock.clear(space)
                stock.spaces.clear()
            self._last_folder = self.folder
        url = "kvs://" + ",".join(f"127.0.0.1:{server.hub.tcp_port}" for server in self.servers)
        named = replace(self.with_options(setup, url=url, timeout_s=60.0), guard=Statistics)
        tier = open_tier(tier_behind(url), named)
        tier.check()
        return tier

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        for server in self.servers:
            for space in server.hub.stock.spaces.values():
                if space.namespace.id == MINE.id and space.layout == self.layout and ref in space.chunks:
                    chunk = space.chunks[ref]
                    return b"".join(p.tobytes() for p in server.hub.pool.parts(chunk.runs, 0, chunk.num_bytes))
        return None

    def raw_used_bytes(self) -> int:
        spaces = [space for server in self.servers for space in server.hub.stock.spaces.values()]
        chunks = [c for s in spaces if s.namespace.id == MINE.id and s.layout == self.layout for c in s.chunks.values()]
        return sum(pages for chunk in chunks for _, pages in chunk.runs) * PAGE_BYTES
