"""Tests of a cache server's end, and of the chunks that the next one finds."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cache_server import ServerThread, serving_process, serving_tcp
from support.redis_server import wait_for
from support.served import WAIT_S, A, B, check_read, open_tier

from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.file_order import FileOrder
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.testing.harness import EVEN, make_transfer
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.disk.tier import DiskTier


class TestEnd:
    def test_a_second_signal_does_not_wait_for_the_disk(self) -> None:
        server = ServerThread(ServerOptions(1 << 20, tcp=TcpAddress("127.0.0.1", 0), drain_s=600.0))
        server.hub.service.writes.num_writing = 1
        server.hub.stop()
        assert not server.hub._hurry.is_set()
        wait_for("it is closing", lambda: server.hub.core.is_closing)
        server.close()
        assert server.drained is False

    def test_what_was_cleared_while_it_was_written_stays_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The chunk's file is deleted before the server ends."""
        disk, gate, put = DiskOptions(tmp_path, 1 << 20), threading.Event(), DiskTier.put

        def put_late(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
            gate.wait(WAIT_S)
            return put(tier, transfers)

        def end_late(order: FileOrder, space_id: bytes, key: bytes | None) -> None:
            time.sleep(0.3)  # the server knows that the write has ended, and might take this for the end of all work
            end(order, space_id, key)

        def clear(tier: Tier) -> None:
            with suppress(TierError):  # the server ends before it answers
                tier.clear()

        end = FileOrder._end
        monkeypatch.setattr(FileOrder, "_end", end_late)
        monkeypatch.setattr(DiskTier, "put", put_late)
        with serving_tcp(disk=disk) as server:
            tier = open_tier(server.url)
            assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
            clearing = threading.Thread(target=clear, args=(tier,))
            clearing.start()
            wait_for("it is cleared", lambda: tier.contains([A]) == [False])
            server.hub.stop()
            wait_for("it is closing", lambda: server.hub.core.is_closing)
            gate.set()
            clearing.join(WAIT_S)
            tier.close()
            wait_for("it has ended", lambda: server.drained is not None)
        with serving_tcp(disk=disk) as server:
            tier = open_tier(server.url)
            assert tier.contains([A]) == [False]
            tier.close()

    def test_what_was_cleared_stays_away_after_a_crash(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After the call, a restart from the disk finds no cleared chunk, although no file was deleted yet."""
        disk, copy = DiskOptions(tmp_path / "disk", 1 << 20), tmp_path / "copy"
        monkeypatch.setattr(DiskTier, "remove", lambda *_: None)
        monkeypatch.setattr("kvstore.tiers.disk.chunks.shutil", SimpleNamespace(rmtree=lambda *_, **__: None))
        with serving_tcp(disk=disk) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A), make_transfer(EVEN, B)])
            wait_for("both are on disk", lambda: not server.hub.service.writes.num_writing)
            tier.clear()
            tier.put([make_transfer(EVEN, B, version=1)])
            wait_for("it is on disk", lambda: not server.hub.service.writes.num_writing)
            shutil.copytree(disk.folder, copy)  # as a crash would leave it now
            assert tier.contains([A, B]) == [False, True]
            tier.close()
        with serving_tcp(disk=DiskOptions(copy, 1 << 20)) as server:
            tier = open_tier(server.url)
            assert tier.contains([A, B]) == [False, True]
            assert check_read(tier, B, version=1) is Outcome.HIT
            tier.close()

    def test_a_disk_that_does_not_let_go_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No chunk is found, and the files are deleted one by one once that works."""

        def refuse(_: DiskTier) -> None:
            raise TierError("broken on purpose")

        with serving_tcp(disk=DiskOptions(tmp_path, 1 << 20)) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            wait_for("it is on disk", lambda: bool(list(tmp_path.rglob("*.safetensors"))))
            with monkeypatch.context() as broken:
                broken.setattr(DiskTier, "clear", refuse)
                with pytest.raises(TierError, match="not deleted"):
                    tier.clear()
            assert tier.contains([A]) == [False]
            wait_for(
                "its file is gone", lambda: not [p for p in tmp_path.rglob("*.safetensors") if p.parent.name != ".free"]
            )
            tier.close()

    def test_nothing_new_while_it_ends(self) -> None:
        server = ServerThread(ServerOptions(1 << 20, tcp=TcpAddress("127.0.0.1", 0), drain_s=600.0))
        tier = open_tier(server.url)
        tier.put([make_transfer(EVEN, A)])
        server.hub.service.writes.num_writing = 1
        server.hub.stop()
        wait_for("it is closing", lambda: server.hub.core.is_closing)
        assert tier.put([make_transfer(EVEN, B)]) == [Outcome.FAILED]
        assert check_read(tier, A) is Outcome.HIT
        server.hub.service.writes.num_writing = 0
        server.close()
        assert server.drained is True
        tier.close()


def test_the_end_of_the_terminal_is_not_its_end() -> None:
    with serving_process(disk_gib=0.01, forks=False) as server:
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        wait_for("it has heard", lambda: "the configuration was read again" in server.log.read_text())
        tier = open_tier(server.url)
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        tier.close()
        assert server.terminate() == 0
