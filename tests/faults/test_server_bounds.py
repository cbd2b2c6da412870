"""Tests of bounds: on the state that a cache server keeps of past clients, and on the cost of one for the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from support.cache_server import ServerThread, serving_ipc, serving_tcp
from support.gate import Gate
from support.redis_server import wait_for
from support.served import WAIT_S, A, Raw, open_tier, settle
from support.shop import whole

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.payload import PAGE_BYTES, Geometry
from kvstore.server import disk_tiers
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.spaces import Chunk, Space
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_ref, make_transfer
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.tier import DiskTier

SMALL = KVLayout((PAGE_BYTES,), 1, 16, 16)


def hold(gate: threading.Event) -> None:
    """Keep a thread busy."""
    gate.wait(WAIT_S)


def fill(server: ServerThread) -> None:
    """Store 4000 chunks of a page each, on the server's thread, which forgets an empty namespace."""
    wait_for("the pool has all pages", lambda: not server.hub.pool.is_growing)
    filled: Future[None] = Future()

    def work() -> None:
        space = server.hub.stock.spaces.enter(Namespace({"model": "small"}), SMALL)
        assert space is not None
        for number in range(4000):
            chunk = whole(server.hub.stock.reserve(space, make_ref(number, 1)))
            assert chunk is not None
            server.hub.stock.complete(chunk, is_whole=True)
        filled.set_result(None)

    server.hub._jobs.report(work)
    filled.result(WAIT_S)


class TestDiskThreads:
    def test_an_error_that_nobody_foresaw_costs_one_chunk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        claim, failures = disk_tiers.DiskTiers.claim, 6

        def claim_or_not(tiers: disk_tiers.DiskTiers, space: Space, num_bytes: int) -> bool:
            nonlocal failures
            if failures:
                failures -= 1
                raise ZeroDivisionError("broken on purpose")
            return claim(tiers, space, num_bytes)

        monkeypatch.setattr(disk_tiers.DiskTiers, "claim", claim_or_not)
        with serving_ipc(disk=DiskOptions(tmp_path, 1 << 20), max_writes=2) as server:
            tier = open_tier(server.url)
            refs = [make_ref(number) for number in range(8)]
            tier.put([make_transfer(EVEN, ref) for ref in refs])
            settle(server)
            assert server.hub.stock.num_on_disk == 2
            assert server.hub.service.writes.num_writing == 0
            tier.remove(refs)  # and no turn is left behind
            settle(server)
            tier.close()
        assert [record.levelno for record in caplog.records if "disk thread" in record.message] == [logging.ERROR]

    @pytest.mark.parametrize("broken", ["get", "remove", "clear"])
    def test_nobody_waits_for_what_failed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("broken on purpose")

        with serving_ipc(pool_bytes=1 << 20, disk=DiskOptions(tmp_path, 4 << 20)) as server:
            tier = open_tier(server.url)
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
                    with pytest.raises(TierError, match="not deleted"):
                        tier.clear()
                settle(server)
            assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
            settle(server)
            assert tier.contains([A]) == [True]
            wait_for("no place is left in use", lambda: server.hub.sessions.num_leases == 0)
            tier.close()

    @pytest.mark.parametrize("axes", [(0, 1, 1), (1, -1, 2), (1 << 32, 1 << 31, 2)])
    def test_axes_that_codecs_cannot_divide_by(self, tmp_path: Path, axes: tuple[int, int, int]) -> None:
        with serving_ipc(disk=DiskOptions(tmp_path, 1 << 20, codec="int8")) as server:
            client = Raw(server)
            geometry = Geometry((4096,), 1, 16, 16, "p", "bf16", axes)
            with pytest.raises(TierError):
                client.hello({"model": "x"}, geometry)
            client.close()

    def test_pages_that_are_no_rows_are_refused_by_the_codec_only(self, tmp_path: Path) -> None:
        with serving_ipc(disk=DiskOptions(tmp_path, 1 << 20, codec="int8")) as server:
            odd = KVLayout((4096,), 1, 16, 16, "p", "bf16", (1, 1, 3))
            tier = open_tier(server.url, layout=odd)
            assert tier.put([make_transfer(odd, make_ref(1, 1))]) == [Outcome.STORED]
            settle(server)
            assert server.hub.stock.num_on_disk == 0
            tier.close()


class TestManyNamespaces:
    def come_and_go(self, server: ServerThread, number: int) -> None:
        """Connect, store and leave like an engine with new weights."""
        tier = open_tier(server.url, namespace=MINE.at_epoch(f"{number:016x}"))
        tier.put([make_transfer(EVEN, A)])
        settle(server)
        tier.clear()
        tier.close()

    def test_those_of_past_epochs_leave_nothing(self, tmp_path: Path) -> None:
        with serving_ipc(disk=DiskOptions(tmp_path, 1 << 20)) as server:
            self.come_and_go(server, 0)
            service = server.hub.service
            wait_for(
                "the first is forgotten", lambda: not server.hub.stock.spaces and not service.writes.is_changing_files
            )
            before = threading.active_count(), psutil.Process().num_fds()
            for number in range(1, 20):
                self.come_and_go(server, number)
            wait_for("all are forgotten", lambda: not server.hub.stock.spaces and not service.writes.is_changing_files)
            assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
            wait_for("no more threads", lambda: threading.active_count() <= before[0] + 8)  # those of the pools
            wait_for("no more descriptors", lambda: psutil.Process().num_fds() <= before[1])

    def test_few_that_have_chunks_on_disk_are_open(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Closed tiers are read as well, also after a restart."""
        monkeypatch.setattr(disk_tiers, "MAX_OPEN", 3)
        names = [Namespace({"model": f"model {number}"}) for number in range(10)]
        options = DiskOptions(tmp_path, 16 << 20)
        with serving_ipc(disk=options, pool_bytes=1 << 20) as server:
            for name in names:
                tier = open_tier(server.url, namespace=name)
                tier.put([make_transfer(EVEN, A)])
                tier.close()
            settle(server)
            disk = server.hub.core.disk
            assert disk is not None
            wait_for("few are open", lambda: disk._tiers.num_open <= 3)
            self.check_all(server, names)
        with serving_ipc(disk=options, pool_bytes=1 << 20) as server:
            disk = server.hub.core.disk
            assert disk is not None
            assert disk._tiers.num_open <= 3
            used_bytes = disk.used_bytes
            assert used_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
            self.check_all(server, names)
            for name in names:
                tier = open_tier(server.url, namespace=name)
                tier.remove([A])
                tier.close()
            settle(server)
            assert not [path for path in tmp_path.rglob("*.safetensors") if path.parent.name != ".free"]

    def test_those_that_are_open_share_threads(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        with serving_ipc(disk=DiskOptions(tmp_path, 16 << 20)) as server:
            for number in range(5):
                tier = open_tier(server.url, namespace=Namespace({"model": f"model {number}"}))
                tier.put([make_transfer(EVEN, A)])
                tier.close()
            settle(server)
            disk = server.hub.core.disk
            assert disk is not None
            assert disk._tiers.num_open == 5
            ours = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("kvstore-disk-")]
            assert len(ours) == 10, "for four reads, four writes and two calls that hang"

    def check_all(self, server: ServerThread, names: list[Namespace]) -> None:
        for name in names:
            tier = open_tier(server.url, namespace=name)
            expected = make_transfer(EVEN, A)
            buffer = make_buffer(EVEN.slot_bytes)
            assert tier.get([Transfer(A, buffer)]) == [Outcome.HIT]
            size = EVEN.payload_bytes(A.num_blocks)
            assert buffer[:size].tobytes() == expected.buffer[:size].tobytes()
            tier.close()

    def test_what_nobody_uses_is_forgotten_without_a_disk_too(self) -> None:
        with serving_tcp() as server:
            tiers = [open_tier(server.url, namespace=Namespace({"model": f"model {number}"})) for number in range(5)]
            for tier in tiers:
                tier.contains([A])
            tiers[0].put([make_transfer(EVEN, A)])
            assert len(server.hub.stock.spaces) == 5
            for tier in tiers[:4]:
                tier.close()
            wait_for("only those with chunks, or clients, are left", lambda: len(server.hub.stock.spaces) == 2)
            assert tiers[4].contains([A]) == [False]
            tiers[4].close()


class TestClears:
    def test_a_read_that_a_clear_overtook_brings_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, get = Gate(), DiskTier.get

        def late(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
            outcomes = get(tier, transfers)
            gate()
            return outcomes

        with serving_ipc(disk=DiskOptions(tmp_path, 4 << 20)) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            settle(server)
            tier.close()
        with serving_ipc(disk=DiskOptions(tmp_path, 4 << 20)) as server, ThreadPoolExecutor(1) as beside:
            tier, other = open_tier(server.url), open_tier(server.url)
            monkeypatch.setattr(DiskTier, "get", late)
            reading = beside.submit(tier.get, [Transfer(A, make_buffer(EVEN.slot_bytes))])
            assert gate.reached.wait(WAIT_S)
            other.clear()
            gate.open()
            assert reading.result(WAIT_S) == [Outcome.MISS]
            tier.close()
            other.close()


class TestGrants:
    def test_a_question_for_many_places_lets_others_have_their_turn(self) -> None:
        """Each grant evicts many chunks, and another client is answered before all grants are made."""
        large = KVLayout((200 * PAGE_BYTES,), 1, 16, 16)
        with serving_ipc(pool_bytes=4000 * PAGE_BYTES, policy="LRU") as server:
            fill(server)
            client, other = Raw(server), Raw(server)
            client.hello({"model": "large"}, Geometry.of(large))
            other.hello({"model": "small"}, Geometry.of(SMALL))
            seen: list[int] = []
            lookup, reserve = server.hub.stock.lookup, server.hub.stock.reserve

            def slowly(space: Space, ref: ChunkRef, owner: bytes) -> Generator[None, None, Chunk | None]:
                time.sleep(0.05)  # so that the other client's message has arrived, even on a busy machine
                return (yield from reserve(space, ref, owner))

            def watched(space: Space, refs: Sequence[ChunkRef], *, hears_ends: bool = True) -> tuple[bytes, list[int]]:
                seen.append(space.counters.evicted_chunks)
                return lookup(space, refs, hears_ends=hears_ends)

            server.hub.stock.lookup = watched  # type: ignore[method-assign]
            server.hub.stock.reserve = slowly  # type: ignore[method-assign, assignment]
            gate = threading.Event()
            server.hub._jobs.report(partial(hold, gate))
            refs = [make_ref(number, 1) for number in range(5)]
            client.connection.send(messages.Reserve(1, messages.pack_refs(refs)))
            for _ in range(3):
                other.connection.send(messages.Lookup(other.connection.new_serial(), messages.pack_refs([A])))
            gate.set()
            granted = client.connection.receive()
            assert isinstance(granted, messages.Granted)
            assert [grant.lease > 0 for grant in granted.grants] == [True] * 5
            for _ in range(3):
                assert isinstance(other.connection.receive(), messages.Held)
            assert [space.counters.evicted_chunks for space in server.hub.stock.spaces.values()] == [1000, 0]
            assert min(seen) < 1000
            client.close()
            other.close()

    def test_questions_whose_answer_is_due_are_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, get = threading.Event(), DiskTier.get

        def get_late(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
            gate.wait(WAIT_S)
            return get(tier, transfers)

        with serving_ipc(pool_bytes=64 * PAGE_BYTES, policy="LRU", disk=DiskOptions(tmp_path, 16 << 20)) as server:
            tier = open_tier(server.url)
            for number in range(100):
                tier.put([make_transfer(EVEN, make_ref(number))])
                settle(server)
            monkeypatch.setattr(DiskTier, "get", get_late)
            client = Raw(server)
            client.hello(dict(MINE.fields), Geometry.of(EVEN))
            for _ in range(20):
                client.connection.send(
                    messages.Acquire(client.connection.new_serial(), messages.pack_refs([make_ref(0)]))
                )
            wait_for("it is cut off", lambda: server.hub.reception.num_malformed == 1)
            gate.set()
            client.close()
            tier.close()
            wait_for("its places are free again", lambda: not server.hub.sessions.num_leases)
