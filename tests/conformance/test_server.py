"""Tests of the server tier's contract, through the server's memory and in messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from support.cache_server import POOL_BYTES, ServerThread, serving_ipc, serving_tcp
from support.redis_server import wait_for
from support.served import scan

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.server.spaces import Space
from kvstore.testing import MINE, LendingTests, TierConformance
from kvstore.testing.harness import make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.guards import GuardOptions, guarded, layers
from kvstore.tiers.peers import PeersTier
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.tier import ServerTier

HANG_GUARD_S = 60.0


class Served(TierConformance):
    """Base of the tests here: raw access into the server, which runs in a thread."""

    persistent = True
    keeps_trails = True
    server: ClassVar[ServerThread]
    _last_folder: Path | None = None

    def open_tier(self, setup: TierSetup) -> Tier:
        if self.folder != self._last_folder:  # a new harness begins with an empty storage
            self._clear_all()
            self._last_folder = self.folder
        return ServerTier.open(self.with_options(setup, url=self.server.url, timeout_s=HANG_GUARD_S))

    def _clear_all(self) -> None:
        stock = self.server.hub.stock
        for space in stock.spaces.values():
            stock.clear(space)
        stock.spaces.clear()

    def _spaces(self) -> list[Space]:
        return list(self.server.hub.stock.spaces.values())

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        for space in self._spaces():
            if space.namespace.id == MINE.id and space.layout == self.layout and ref in space.chunks:
                chunk = space.chunks[ref]
                return b"".join(part.tobytes() for part in self.server.hub.pool.parts(chunk.runs, 0, chunk.num_bytes))
        return None

    def server_tier(self) -> ServerTier:
        *_, tier = layers(self.tier)
        assert isinstance(tier, ServerTier)
        return tier

    def test_a_put_that_a_reset_overtakes_leaves_nothing_in_the_namespace_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise an engine that starts in that namespace later would find KV of the old weights."""
        self.start()
        tier, ref = self.server_tier(), make_ref(1)
        store = tier._store

        def overtaken(connection: ServerConnection, transfer: Transfer) -> Outcome:
            tier.reset(MINE.at_epoch("next"))
            return store(connection, transfer)

        monkeypatch.setattr(tier, "_store", overtaken)
        assert tier.put([make_transfer(self.layout, ref)]) == [Outcome.FAILED]
        assert self.raw_read(ref) is None
        monkeypatch.setattr(tier, "_store", store)
        assert tier.put([make_transfer(self.layout, ref)]) == [Outcome.STORED]

    def raw_used_bytes(self) -> int:
        """Return the bytes of the tier's current namespace, which changes with a reset."""
        here = (self.server_tier()._connections.namespace.id, self.layout)
        chunks = [c for s in self._spaces() if (s.namespace.id, s.layout) == here for c in s.chunks.values()]
        return sum(pages for chunk in chunks for _, pages in chunk.runs) * PAGE_BYTES


class TestMapped(LendingTests, Served):
    """Tier that maps the server's memory."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with serving_ipc() as cls.server:
            yield


class TestFramed(Served):
    """Tier with payload in messages."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with serving_tcp() as cls.server:
            yield


@pytest.mark.sweep
class TestRestarted(Served):
    """Server with a disk, which is restarted whenever the tier is opened."""

    pause_s = 1.1
    running: ClassVar[list[ServerThread]] = []

    @pytest.fixture(autouse=True)
    def _end_server(self) -> Iterator[None]:
        yield
        self._stop_server()

    def open_tier(self, setup: TierSetup) -> Tier:
        self._stop_server()
        disk = DiskOptions(self.folder / "disk", 64 << 20)
        type(self).server = ServerThread(ServerOptions(POOL_BYTES, tcp=TcpAddress("127.0.0.1", 0), disk=disk))
        self.running.append(self.server)
        return ServerTier.open(self.with_options(setup, url=self.server.url, timeout_s=HANG_GUARD_S))

    def stop(self) -> None:
        """Stop the server as well, because it might still write to a folder that is about to be deleted."""
        super().stop()
        self._stop_server()

    def _stop_server(self) -> None:
        while self.running:
            server = self.running.pop()
            server.close()
            assert server.drained

    def _settle(self) -> None:
        service = self.server.hub.service
        wait_for("all is on disk", lambda: not service.writes.is_changing_files)

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        """Return ``b"there"`` if the server has it, in memory or in a file that will be used; else None."""
        found = [space for space in self._spaces() if space.namespace.id == MINE.id and ref in space.chunks]
        return b"there" if found else None

    def raw_used_bytes(self) -> int:
        here = (self.server_tier()._connections.namespace.id, self.layout)
        chunks = [c for s in self._spaces() if (s.namespace.id, s.layout) == here for c in s.chunks.values()]
        return sum(chunk.size_bytes for chunk in chunks)

    def test_scan_names_the_longest_untouched_first(self) -> None:
        """A read from memory does not touch the file, so a restarted server knows the order of stores only."""
        refs = [make_ref(number) for number in range(8)]
        self.start()
        self.put(*refs)
        self._settle()
        time.sleep(self.pause_s)  # longer than the resolution of touches
        self.get(*refs[::2])
        self.put(refs[1], version=1)
        self._settle()
        order = self.server_tier()._connections.use(scan)
        assert set(order[:3]) == set(refs[3::2])
        assert order[-1] == refs[1]
        self.restart()
        order = self.server_tier()._connections.use(scan)
        assert set(order) == set(refs)
        assert order[-1] == refs[1]


@pytest.mark.sweep
class TestGuarded(LendingTests, Served):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with serving_ipc() as cls.server:
            yield

    def open_tier(self, setup: TierSetup) -> Tier:
        return guarded(super().open_tier(setup), GuardOptions(timeout_s=HANG_GUARD_S))


class TestBesidePeers(Served):
    """Tier with peers that hold nothing."""

    peers: ClassVar[list[ServerThread]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with serving_ipc() as cls.server, serving_tcp() as one, serving_tcp() as another:
            cls.peers = [one, another]
            yield

    def open_tier(self, setup: TierSetup) -> Tier:
        def open_peer(url: str, namespace: Namespace) -> Tier:
            asked = TierSetup(namespace, setup.layout, UNBOUNDED_BYTES, {"url": url, "timeout_s": HANG_GUARD_S})
            return guarded(ServerTier.open(asked), GuardOptions(timeout_s=HANG_GUARD_S))

        urls = [peer.url for peer in self.peers]
        return PeersTier(super().open_tier(setup), urls, open_peer, setup.namespace, setup.layout)

    def server_tier(self) -> ServerTier:
        assert isinstance(self.tier, PeersTier)
        assert isinstance(self.tier.own, ServerTier)
        return self.tier.own


@pytest.mark.sweep
class TestWithoutPeers(LendingTests, TestBesidePeers):
    """Tier without known peers, which lends from its own server."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        cls.peers = []
        with serving_ipc() as cls.server:
            yield
