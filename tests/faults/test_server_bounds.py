"""What a cache server keeps of clients that come and go, and what one client can cost the others: all of it bounded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import zmq
from support.cache_server import ServerThread, serving_ipc, serving_tcp
from support.redis_server import wait_for

from kvstore import wire
from kvstore.errors import TierError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.server import rack
from kvstore.server.rack import ShelfOptions
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_ref, make_transfer
from kvstore.tiers._server_link import Link
from kvstore.tiers._server_url import parse_server
from kvstore.tiers.base import UNBOUNDED_BYTES, Outcome, TierSetup, Transfer
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.server import ServerTier

A, B = make_ref(1), make_ref(2)


def open_tier(server: ServerThread, namespace: Namespace = MINE, layout: KVLayout = EVEN) -> ServerTier:
    return ServerTier.open(TierSetup(namespace, layout, UNBOUNDED_BYTES, {"url": server.url, "timeout_s": 10.0}))


def settle(server: ServerThread) -> None:
    """Until the disk has everything."""
    service = server.hub.service
    wait_for("nothing is on its way to disk", lambda: not service.is_changing_files)


class Raw:
    """A client that says what it likes."""

    def __init__(self, server: ServerThread) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = Link(self.context, parse_server(server.url, {"timeout_s": 10.0}))

    def hello(self, fields: dict[str, str | int], geometry: wire.Geometry) -> wire.Welcome:
        return self.link.hello(fields, geometry, 0)

    def close(self) -> None:
        self.link.close()
        self.context.destroy(linger=0)


# -- the disk --------------------------------------------------------------------------------------------------------


class TestDiskThreads:
    def test_an_error_that_nobody_foresaw_costs_one_chunk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        put, failures = DiskTier.put, 6

        def put_or_not(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
            nonlocal failures
            if failures:
                failures -= 1
                raise ZeroDivisionError("broken on purpose")
            return put(tier, transfers)

        monkeypatch.setattr(DiskTier, "put", put_or_not)
        with serving_ipc(disk=ShelfOptions(tmp_path, 1 << 20), max_writes=2) as server:
            tier = open_tier(server)
            refs = [make_ref(number) for number in range(8)]
            tier.put([make_transfer(EVEN, ref) for ref in refs])
            settle(server)
            assert server.hub.stock.num_on_disk == 2
            assert server.hub.service.num_writing == 0
            tier.remove(refs)  # and no turn is left behind
            settle(server)
            tier.close()
        assert [record.levelno for record in caplog.records if "disk failed" in record.message] == [logging.ERROR]

    @pytest.mark.parametrize("broken", ["get", "remove", "clear"])
    def test_nobody_waits_for_what_failed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("broken on purpose")

        with serving_ipc(pool_bytes=1 << 20, disk=ShelfOptions(tmp_path, 4 << 20)) as server:
            tier = open_tier(server)
            tier.put([make_transfer(EVEN, A)])
            settle(server)
            for number in range(100, 200):  # until it is on disk only
                tier.put([make_transfer(EVEN, make_ref(number))])
                settle(server)
            with monkeypatch.context() as patch:
                patch.setattr(DiskTier, broken, fail)
                if broken == "get":
                    assert tier.get([Transfer(A, make_buffer(EVEN.slot_bytes))]) == [Outcome.FAILED]
                elif broken == "remove":
                    tier.remove([A])
                else:
                    with pytest.raises(TierError, match="not let go"):
                        tier.clear()
                settle(server)
            assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
            settle(server)
            assert tier.contains([A]) == [True]
            wait_for("no place is left in use", lambda: server.hub.sessions.num_leases == 0)
            tier.close()

    @pytest.mark.parametrize("axes", [(0, 1, 1), (1, -1, 2), (1 << 32, 1 << 31, 2)])
    def test_axes_that_codecs_cannot_divide_by(self, tmp_path: Path, axes: tuple[int, int, int]) -> None:
        with serving_ipc(disk=ShelfOptions(tmp_path, 1 << 20, codec="int8")) as server:
            client = Raw(server)
            geometry = wire.Geometry((4096,), 1, 16, 16, "p", "bf16", axes)
            with pytest.raises(TierError):
                client.hello({"model": "x"}, geometry)
            client.close()

    def test_pages_that_are_no_rows_are_refused_by_the_codec_only(self, tmp_path: Path) -> None:
        with serving_ipc(disk=ShelfOptions(tmp_path, 1 << 20, codec="int8")) as server:
            odd = KVLayout((4096,), 1, 16, 16, "p", "bf16", (1, 1, 3))
            tier = open_tier(server, layout=odd)
            assert tier.put([make_transfer(odd, make_ref(1, 1))]) == [Outcome.STORED]
            settle(server)
            assert server.hub.stock.num_on_disk == 0
            tier.close()


class TestManyNamespaces:
    def come_and_go(self, server: ServerThread, number: int) -> None:
        """As an engine with new weights."""
        tier = open_tier(server, MINE.at_epoch(f"{number:016x}"))
        tier.put([make_transfer(EVEN, A)])
        settle(server)
        tier.clear()
        tier.close()

    def test_those_of_past_epochs_leave_nothing(self, tmp_path: Path) -> None:
        with serving_ipc(disk=ShelfOptions(tmp_path, 1 << 20)) as server:
            self.come_and_go(server, 0)
            service = server.hub.service
            wait_for("the first is forgotten", lambda: not server.hub.stock.spaces and not service.is_changing_files)
            before = threading.active_count(), psutil.Process().num_fds()
            for number in range(1, 20):
                self.come_and_go(server, number)
            wait_for("all are forgotten", lambda: not server.hub.stock.spaces and not service.is_changing_files)
            assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
            wait_for("no more threads", lambda: threading.active_count() <= before[0] + 8)  # those of the pools
            wait_for("no more descriptors", lambda: psutil.Process().num_fds() <= before[1])

    def test_few_that_have_chunks_on_disk_are_open(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And the others are read all the same, also after a restart."""
        monkeypatch.setattr(rack, "MAX_OPEN", 3)
        names = [Namespace({"model": f"model {number}"}) for number in range(10)]
        disk = ShelfOptions(tmp_path, 16 << 20)
        with serving_ipc(disk=disk, pool_bytes=1 << 20) as server:
            for name in names:
                tier = open_tier(server, name)
                tier.put([make_transfer(EVEN, A)])
                tier.close()
            settle(server)
            assert server.hub.service._shelves is not None
            wait_for("few are open", lambda: server.hub.service._shelves.num_open <= 3)  # type: ignore[union-attr]
            self.check_all(server, names)
        with serving_ipc(disk=disk, pool_bytes=1 << 20) as server:
            assert server.hub.service._shelves is not None
            assert server.hub.service._shelves.num_open <= 3
            used_bytes = server.hub.service._shelves.used_bytes
            assert used_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
            self.check_all(server, names)
            for name in names:
                tier = open_tier(server, name)
                tier.remove([A])
                tier.close()
            settle(server)
            assert not [path for path in tmp_path.rglob("*.safetensors") if path.parent.name != ".free"]

    def check_all(self, server: ServerThread, names: list[Namespace]) -> None:
        for name in names:
            tier = open_tier(server, name)
            expected = make_transfer(EVEN, A)
            buffer = make_buffer(EVEN.slot_bytes)
            assert tier.get([Transfer(A, buffer)]) == [Outcome.HIT]
            size = EVEN.payload_bytes(A.num_blocks)
            assert buffer[:size].tobytes() == expected.buffer[:size].tobytes()
            tier.close()

    def test_what_nobody_uses_is_forgotten_without_a_disk_too(self) -> None:
        with serving_tcp() as server:
            tiers = [open_tier(server, Namespace({"model": f"model {number}"})) for number in range(5)]
            for tier in tiers:
                tier.contains([A])
            tiers[0].put([make_transfer(EVEN, A)])
            assert len(server.hub.stock.spaces) == 5
            for tier in tiers[:4]:
                tier.close()
            wait_for("only those with chunks, or clients, are left", lambda: len(server.hub.stock.spaces) == 2)
            assert tiers[4].contains([A]) == [False]
            tiers[4].close()
