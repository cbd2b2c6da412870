"""A cache server that dies, hangs or comes back, clients that do, and messages that nobody should send."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from support.cache_server import (
    ServerProcess,
    ServerThread,
    mapped_pools,
    raw_peer,
    serving_ipc,
    serving_tcp,
    short_folder,
)
from support.redis_server import free_port, wait_for

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ClosedError, ConfigError, TierError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.protocol.pieces import checksum
from kvstore.protocol.runs import PAGE_BYTES
from kvstore.server import sessions
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.hub import Hub
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.server.turns import Turns
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import GuardOptions, guarded
from kvstore.tiers.server.link import Link, NoSessionError
from kvstore.tiers.server.moves import Mapped
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server

A, B = make_ref(1), make_ref(2)
BIG = KVLayout(page_bytes=(1 << 20,), planes=1, block_tokens=16, chunk_tokens=64)
WAIT_S = 20.0


def open_tier(url: str, layout: KVLayout = EVEN, namespace: Namespace = MINE, **options: object) -> ServerTier:
    return ServerTier.open(TierSetup(namespace, layout, UNBOUNDED_BYTES, {"url": url, "timeout_s": 10.0, **options}))


def open_link(url: str, layout: KVLayout = EVEN) -> tuple[zmq.Context[zmq.Socket[bytes]], Link]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link(context, parse_server(url, {}))
    link.hello(MINE, messages.Geometry.of(layout), 0)
    return context, link


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
    """Nobody holds anything, and every page belongs to a chunk."""
    wait_for("leases end", lambda: server.hub.sessions.num_leases == 0)
    chunks = [chunk for space in server.hub.stock.spaces.values() for chunk in space.chunks.values()]
    assert server.hub.sessions.leased_bytes == 0
    assert server.hub.pool.used_bytes == sum(chunk.size_bytes for chunk in chunks if chunk.runs)
    assert sum(space.used_bytes for space in server.hub.stock.spaces.values()) == sum(c.size_bytes for c in chunks)


@pytest.fixture(params=["mapped", "framed"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with serving_ipc() if request.param == "mapped" else serving_tcp() as server:
        yield server


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with short_folder() as folder:
        server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 0.1\n")
        try:
            yield server.start()
        finally:
            server.kill()


class TestServerGoesAway:
    def test_killed_and_started_anew(self, process: ServerProcess) -> None:
        tier = open_tier(process.url)
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        process.kill()
        with pytest.raises(TierError, match=r"cannot be reached|gone"):
            tier.contains([A])
        process.start()
        wait_for("the tier works again", lambda: tier.put([make_transfer(EVEN, B)]) == [Outcome.STORED])
        assert check_read(tier, B) is Outcome.HIT
        tier.close()

    def test_a_disk_is_warm_after_sigterm(self, process: ServerProcess) -> None:
        """What was on its way to disk is written first."""
        tier = open_tier(process.url)
        refs = [make_ref(number) for number in range(40)]
        assert set(tier.put([make_transfer(EVEN, ref) for ref in refs])) == {Outcome.STORED}
        assert process.terminate() == 0
        process.start()
        wait_for("the tier works again", lambda: tier.contains(refs) == [True] * 40)
        assert [check_read(tier, ref) for ref in refs] == [Outcome.HIT] * 40
        tier.close()

    def test_frozen(self, process: ServerProcess) -> None:
        """Calls end at their deadline, and work when it goes on."""
        tier = open_tier(process.url, timeout_s=0.5)
        tier.put([make_transfer(EVEN, A)])
        process.freeze()
        for _ in range(2):
            with pytest.raises(TierError, match=r"no answer|cannot be reached|does not take"):
                tier.contains([A])
        process.thaw()
        wait_for("the tier works again", lambda: check_read(tier, A) is Outcome.HIT)
        tier.close()

    def test_nothing_of_it_stays_mapped(self, process: ServerProcess) -> None:
        """Whatever holds on to errors of calls that it did not survive, and without a garbage collector."""
        gc.collect()
        before = mapped_pools()
        gc.disable()
        try:
            tier = guarded(open_tier(process.url, timeout_s=0.5), GuardOptions())
            for deadly in (process.freeze, process.kill):
                wait_for("the tier works again", partial(works, tier))
                assert mapped_pools() > before
                deadly()
                with pytest.raises(TierError) as caught:
                    tier.put([make_transfer(EVEN, B)])
                process.thaw()
                if process.process is None:
                    process.start()
            wait_for("the tier works again", partial(works, tier))
            process.kill()
            tier.close()
            assert mapped_pools() == before
            assert isinstance(caught.value, TierError)
        finally:
            gc.enable()

    def test_a_call_that_comes_back_after_close_maps_nothing(self, process: ServerProcess) -> None:
        before = mapped_pools()
        mover = Mapped()
        context, link = open_link(process.url)
        mover.close()
        with pytest.raises(ClosedError):
            mover.read(link, [])
        assert mapped_pools() <= before
        link.close()
        context.term()

    def test_a_second_server_in_the_folder_is_refused(self, process: ServerProcess) -> None:
        with pytest.raises(ConfigError, match="another cache server"):
            Hub(ServerOptions(1 << 20, folder=process.folder))

    def test_sessions_of_an_earlier_server(self) -> None:
        """Over the network, a connection comes back by itself; its client says hello again."""
        port = free_port()
        door = TcpAddress("127.0.0.1", port)
        with serving_tcp(tcp=door):
            tier = open_tier(f"kvs://127.0.0.1:{port}")
            tier.put([make_transfer(EVEN, A)])
        with serving_tcp(tcp=door):
            wait_for("the tier works again", lambda: tier.contains([A]) == [False])
            assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        tier.close()


class TestLeases:
    def test_a_client_that_vanishes_gives_everything_back(self, server: ServerThread) -> None:
        tier = open_tier(server.url)
        tier.put([make_transfer(EVEN, A)])
        context, link = open_link(server.url)
        link.ask(messages.Reserve(link.new_serial(), messages.pack_refs([B])), messages.Granted)
        link.ask(messages.Acquire(link.new_serial(), messages.pack_refs([A])), messages.Granted)
        assert server.hub.sessions.num_leases == 2
        link.close()
        check_quiet(server)
        assert tier.contains([A, B]) == [True, False]
        context.term()
        tier.close()

    def test_a_client_that_comes_through_a_connection_of_before(self) -> None:
        """The end of one connection is told late, when the next one has its number: that client stays."""
        with serving_tcp() as server:
            assert any(self._change_places(server) for _ in range(10)), "no connection ever got the number of another"

    def _change_places(self, server: ServerThread) -> bool:
        """Whether the new client, which is well in any case, has the number of the one that left."""
        context, other = open_link(server.url)
        first_context, first = open_link(server.url)
        came: list[tuple[zmq.Context[zmq.Socket[bytes]], Link]] = []
        opener = threading.Thread(target=lambda: came.append(open_link(server.url)))
        receive = server.hub._receive

        def change_places(number: int, door: zmq.Socket[bytes]) -> None:
            """On the server's thread, which is about to look at messages, and has looked who left."""
            server.hub._receive = receive  # type: ignore[method-assign]
            first.close()
            first_context.term()
            time.sleep(0.1)  # until this end of the connection is closed, too
            opener.start()
            time.sleep(0.1)  # until its hello lies there
            receive(number, door)

        wait_for("only these two are left", lambda: len(server.hub._by_fd) == 2)
        fds = set(server.hub._by_fd)
        server.hub._receive = change_places  # type: ignore[method-assign]
        try:
            other.ask(messages.Lookup(other.new_serial(), messages.pack_refs([A])), messages.Held)
            opener.join(10)
            new = came[0][1]
            assert new.ask(messages.Lookup(new.new_serial(), messages.pack_refs([A])), messages.Held).found == b"\0"
            return set(server.hub._by_fd) == fds
        finally:
            for its_context, link in ((context, other), *came):
                link.close()
                its_context.term()

    def test_a_lease_of_before_is_worth_nothing(self, server: ServerThread) -> None:
        """Neither of another connection, nor one that was given back."""
        context, link = open_link(server.url)
        granted = link.ask(messages.Reserve(link.new_serial(), messages.pack_refs([B])), messages.Granted)
        (lease,) = (grant.lease for grant in granted.grants)
        other_context, other = open_link(server.url)
        failed = messages.pack_outcomes([Outcome.FAILED])
        assert other.ask(messages.Commit(other.new_serial(), [lease], True), messages.Done).outcomes == failed
        assert link.ask(messages.Commit(link.new_serial(), [lease], False), messages.Done).outcomes == failed
        assert link.ask(messages.Commit(link.new_serial(), [lease], True), messages.Done).outcomes == failed
        link.close()
        other.close()
        check_quiet(server)
        assert not server.hub.stock.spaces or all(not s.chunks for s in server.hub.stock.spaces.values())
        context.term()
        other_context.term()

    def test_what_is_read_stays_while_it_is_replaced(self) -> None:
        """Pages that somebody reads are given to nobody else."""
        with serving_ipc(pool_bytes=8 << 20) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            context, link = open_link(server.url)
            granted = link.ask(messages.Acquire(link.new_serial(), messages.pack_refs([A])), messages.Granted)
            before = server.hub.pool.parts(granted.grants[0].runs, 0, EVEN.slot_bytes)[0].copy()
            for number in range(2000):
                tier.put([make_transfer(EVEN, make_ref(number % 600))])
            tier.remove([A])
            after = server.hub.pool.parts(granted.grants[0].runs, 0, EVEN.slot_bytes)[0]
            assert np.array_equal(before, after)
            link.close()
            check_quiet(server)
            context.term()
            tier.close()

    def test_a_write_that_clear_overtook(self, server: ServerThread) -> None:
        context, link = open_link(server.url)
        granted = link.ask(messages.Reserve(link.new_serial(), messages.pack_refs([B])), messages.Granted)
        tier = open_tier(server.url)
        tier.clear()
        done = link.ask(messages.Commit(link.new_serial(), [granted.grants[0].lease], True), messages.Done)
        assert done.outcomes == messages.pack_outcomes([Outcome.FAILED])
        assert tier.contains([B]) == [False]
        link.close()
        context.term()
        tier.close()

    def test_a_client_may_not_take_the_whole_pool(self) -> None:
        with serving_ipc(pool_bytes=64 << 20) as server:
            context, link = open_link(server.url, BIG)
            refs = [make_ref(number) for number in range(16)]
            granted = link.ask(messages.Reserve(link.new_serial(), messages.pack_refs(refs)), messages.Granted)
            assert sum(grant.lease > 0 for grant in granted.grants) == 4
            tier = open_tier(server.url, BIG)
            assert tier.put([make_transfer(BIG, make_ref(99))]) == [Outcome.STORED]
            link.close()
            context.term()
            tier.close()

    def test_a_frozen_client_keeps_its_place_until_it_is_gone(self) -> None:
        """It may write there when it goes on, so nobody else gets it."""
        code = (
            "import sys, zmq, time; from kvstore.protocol import messages; from kvstore.tiers.server.link import Link;"
            "from kvstore.tiers.server.url import parse_server; from kvstore.testing.harness import *;"
            "link = Link(zmq.Context(), parse_server(sys.argv[1], {}));"
            "link.hello(MINE, messages.Geometry.of(EVEN), 0);"
            "link.ask(messages.Reserve(1, messages.pack_refs([make_ref(7)])), messages.Granted);"
            "print('reserved', flush=True);"
            "time.sleep(600)"
        )
        with serving_ipc() as server:
            client = subprocess.Popen([sys.executable, "-c", code, server.url], stdout=subprocess.PIPE)
            try:
                assert client.stdout is not None
                with client.stdout as said:
                    assert said.readline() == b"reserved\n"
                os.kill(client.pid, signal.SIGSTOP)
                (session,) = server.hub.sessions.by_peer.values()
                session.heard_s -= 10_000
                server.hub._report(server.hub.service.expire)
                tier = open_tier(server.url)
                tier.check()
                assert server.hub.sessions.num_leases == 1
            finally:
                client.kill()
                client.wait()
            check_quiet(server)
            tier.close()

    def test_a_child_does_not_keep_what_was_its_parent_s(self) -> None:
        """A process that is forked, and outlives the client, has no hold of its places."""
        with serving_ipc() as server:
            context, link = open_link(server.url)
            link.ask(messages.Reserve(link.new_serial(), messages.pack_refs([B])), messages.Granted)
            child = os.fork()
            if not child:
                time.sleep(WAIT_S)
                os._exit(0)
            link.close()
            check_quiet(server)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            context.term()


class TestEnd:
    def test_a_second_signal_does_not_wait_for_the_disk(self) -> None:
        server = ServerThread(ServerOptions(1 << 20, tcp=TcpAddress("127.0.0.1", 0), drain_s=600.0))
        server.hub.service.num_writing = 1
        server.hub.stop()
        assert not server.hub._hurry.is_set()
        wait_for("it is closing", lambda: server.hub.core.is_closing)
        server.close()
        assert server.drained is False

    def test_what_was_cleared_while_it_was_written_stays_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its file is deleted before the server ends."""
        disk, gate, put = DiskOptions(tmp_path, 1 << 20), threading.Event(), DiskTier.put

        def put_late(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
            gate.wait(WAIT_S)
            return put(tier, transfers)

        def end_late(turns: Turns, space_id: bytes, key: bytes) -> None:
            time.sleep(0.3)  # the server knows by now that the write has ended, and might think that this was all
            end(turns, space_id, key)

        def clear(tier: Tier) -> None:
            with suppress(TierError):  # the server goes before it has answered
                tier.clear()

        end = Turns._end
        monkeypatch.setattr(Turns, "_end", end_late)
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
        """When the call has returned, the disk has nothing left, although no file was deleted yet."""
        disk, copy = DiskOptions(tmp_path / "disk", 1 << 20), tmp_path / "copy"
        for name in ("remove", "_delete_dead"):
            monkeypatch.setattr(DiskTier, name, lambda *_: None)
        with serving_tcp(disk=disk) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A), make_transfer(EVEN, B)])
            wait_for("both are on disk", lambda: not server.hub.service.num_writing)
            tier.clear()
            tier.put([make_transfer(EVEN, B, version=1)])
            wait_for("it is on disk", lambda: not server.hub.service.num_writing)
            shutil.copytree(disk.folder, copy)  # as a crash would leave it now
            assert tier.contains([A, B]) == [False, True]
            tier.close()
        with serving_tcp(disk=DiskOptions(copy, 1 << 20)) as server:
            tier = open_tier(server.url)
            assert tier.contains([A, B]) == [False, True]
            assert check_read(tier, B, version=1) is Outcome.HIT
            tier.close()

    def test_a_disk_that_does_not_let_go_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is found, and the files are deleted one by one when that works."""

        def refuse(_: DiskTier) -> None:
            raise TierError("broken on purpose")

        with serving_tcp(disk=DiskOptions(tmp_path, 1 << 20)) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            wait_for("it is on disk", lambda: bool(list(tmp_path.rglob("*.safetensors"))))
            with monkeypatch.context() as broken:
                broken.setattr(DiskTier, "clear", refuse)
                with pytest.raises(TierError, match="not let go"):
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
        server.hub.service.num_writing = 1
        server.hub.stop()
        wait_for("it is closing", lambda: server.hub.core.is_closing)
        assert tier.put([make_transfer(EVEN, B)]) == [Outcome.FAILED]
        assert check_read(tier, A) is Outcome.HIT
        server.hub.service.num_writing = 0
        server.close()
        assert server.drained is True
        tier.close()


class TestMalformed:
    def test_it_costs_its_sender_the_connection(self, server: ServerThread) -> None:
        """And nobody else anything."""
        tier = open_tier(server.url)
        tier.put([make_transfer(EVEN, A)])
        context, link = open_link(server.url)
        link.ask(messages.Acquire(link.new_serial(), messages.pack_refs([A])), messages.Granted)
        link._socket.send(b"\x93\x01nonsense")
        wait_for("it is cut off", lambda: server.hub.num_malformed == 1)
        with pytest.raises(TierError):
            link.ask(messages.Lookup(link.new_serial(), b""), messages.Held)
        link.close()
        check_quiet(server)
        assert check_read(tier, A) is Outcome.HIT
        context.term()
        tier.close()

    @pytest.fixture(autouse=True)
    def _less_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With clients of which it was not noticed that they have gone: they said hello and went at once."""
        monkeypatch.setattr(sessions, "SILENCE_S", 5.0)

    def test_fuzz(self, server: ServerThread) -> None:
        fuzz(server, 3000)

    @pytest.mark.soak
    def test_fuzz_for_long(self, server: ServerThread) -> None:
        """100,000 messages; memory stays flat."""
        fuzz(server, 5000)
        before = psutil.Process().memory_info().rss
        fuzz(server, 100_000)
        assert psutil.Process().memory_info().rss - before < 128 << 20

    def test_messages_that_never_end(self) -> None:
        """A client that promises more than it sends, and others that send less than ZeroMQ's greeting."""
        with serving_tcp() as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            slow = [socket.create_connection(("127.0.0.1", server.hub.tcp_port)) for _ in range(20)]
            for number, connection in enumerate(slow):
                connection.sendall((b"\xff" + bytes(8) + b"\x7f\x03" + bytes(64))[: 3 * number])
            half = raw_peer(server)
            half.sendall(b"\x02" + messages.MAX_FRAME_BYTES.to_bytes(8, "big") + b"x" * 1000)  # a frame that was begun
            huge = raw_peer(server)
            huge.sendall(b"\x02" + (1 << 40).to_bytes(8, "big") + b"x" * 1000)
            huge.settimeout(WAIT_S)
            while huge.recv(4096):  # it is cut off for the size it says
                pass
            for _ in range(50):
                assert check_read(tier, A) is Outcome.HIT
            for connection in (*slow, half, huge):
                connection.close()
            tier.close()

    def test_a_piece_that_was_damaged_on_its_way(self) -> None:
        with serving_tcp() as server:
            context, link = open_link(server.url)
            granted = link.ask(messages.Reserve(link.new_serial(), messages.pack_refs([A])), messages.Granted)
            lease = granted.grants[0].lease
            payload = make_payload(EVEN, A)
            piece = messages.Piece(link.new_serial(), lease, 0, bytes(8))
            assert link.ask(piece, messages.Done, [payload]).outcomes == messages.pack_outcomes([Outcome.FAILED])
            done = link.ask(messages.Commit(link.new_serial(), [lease], True), messages.Done)
            assert done.outcomes == messages.pack_outcomes([Outcome.FAILED])
            link.close()
            check_quiet(server)
            context.term()

    def test_a_chunk_of_which_a_part_never_came(self) -> None:
        with serving_tcp() as server:
            context, link = open_link(server.url)
            granted = link.ask(messages.Reserve(link.new_serial(), messages.pack_refs([A])), messages.Granted)
            lease = granted.grants[0].lease
            part = make_payload(EVEN, A)[:4096]
            link.ask(messages.Piece(link.new_serial(), lease, 0, checksum([part])), messages.Done, [part])
            done = link.ask(messages.Commit(link.new_serial(), [lease], True), messages.Done)
            assert done.outcomes == messages.pack_outcomes([Outcome.FAILED])
            link.close()
            context.term()

    def test_another_version(self, server: ServerThread) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = Link(context, parse_server(server.url, {}))
        hello = messages.Hello(1, 99, {}, messages.Geometry.of(EVEN), 0, link.token)
        with pytest.raises(TierError, match="version 1 of the protocol, not 99"):
            link.ask(hello, messages.Welcome)
        with pytest.raises(NoSessionError):
            link.ask(messages.Lookup(2, b""), messages.Held)
        link.close()
        context.term()


def fuzz(server: ServerThread, count: int) -> None:
    """Send messages that are cut, changed or made up, by clients that said hello and others; a good one is unharmed."""
    dice = random.Random(count)
    tier = open_tier(server.url)
    tier.put([make_transfer(EVEN, A)])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = None
    for number in range(count):
        if link is None:
            link = Link(context, parse_server(server.url, {}))
            if dice.random() < 0.7:
                link.hello(MINE, messages.Geometry.of(EVEN), 0)
        link._socket.send_multipart(malformed(dice))
        if number % 2:  # after the first that is malformed nothing more is listened to
            link._socket.linger = 5000
            link.close()
            link = None
        if number % 500 == 0:
            assert check_read(tier, A) is Outcome.HIT
    if link is not None:
        link.close()
    context.destroy(linger=5000)
    check_quiet(server)
    assert server.hub.num_malformed >= count // 4
    wait_for("the good client is served", lambda: check_read(tier, A) in {Outcome.HIT, Outcome.MISS})
    tier.close()


def malformed(dice: random.Random) -> list[bytes]:
    """A message that is not quite right, or not at all."""
    good: list[messages.Request] = [
        messages.Lookup(1, messages.pack_refs([A, B])),
        messages.Reserve(1, messages.pack_refs([B])),
        messages.Acquire(1, messages.pack_refs([A])),
        messages.Commit(1, [dice.randrange(100)], dice.random() < 0.5),
        messages.Fetch(1, dice.randrange(100), dice.randrange(1 << 20), 1 + dice.randrange(1 << 20)),
        messages.Piece(1, dice.randrange(100), dice.randrange(1 << 20), bytes(8)),
        messages.Scan(1, dice.randrange(1 << 40)),
        messages.Hello(
            1, 1, {"model": "fuzz"}, messages.Geometry.of(EVEN), dice.randrange(1 << 40), dice.randbytes(16)
        ),
        messages.Explain(1, bytes(8), b""),
    ]
    data = bytearray(messages.encode(dice.choice(good)))
    kind = dice.randrange(5)
    if kind == 0:
        del data[dice.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(1 + dice.randrange(4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
    elif kind == 2:
        data = bytearray(dice.randbytes(dice.randrange(200)))
    elif kind == 3:
        data += dice.randbytes(1 + dice.randrange(20))
    frames = [bytes(data)]
    return frames + [dice.randbytes(dice.randrange(5000)) for _ in range(dice.choice([0, 0, 0, 1, 2, 5]))]


class TestKeys:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> Path:
        for name in ("server", "stranger", "other_server"):
            make_keys(tmp_path / name, name)
        make_keys(tmp_path / "clients", "engine")
        return tmp_path

    def options(self, keys: Path) -> dict[str, Any]:
        pair = read_pair(keys / "server/server.key")
        return {"keys": pair, "listed": read_list(keys / "clients")}

    def client(self, keys: Path, name: str, server: str = "server") -> dict[str, Any]:
        return {"client_key_file": str(keys / f"{name}.key"), "server_key_file": str(keys / f"{server}/{server}.pub")}

    @pytest.mark.parametrize("host", ["127.0.0.1", "this host"])
    def test_only_who_is_listed_comes_in(self, keys: Path, caplog: pytest.LogCaptureFixture, host: str) -> None:
        door = TcpAddress(host if host[0].isdigit() else other_address(), 0)
        with caplog.at_level(logging.WARNING), serving_tcp(tcp=door, **self.options(keys)) as server:
            tier = open_tier(server.url, **self.client(keys, "clients/engine"))
            assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
            assert check_read(tier, A) is Outcome.HIT
            strangers: list[dict[str, Any]] = [
                {},
                self.client(keys, "stranger/stranger"),
                self.client(keys, "clients/engine", "other_server"),
            ]
            client_keys = server.hub._client_keys
            assert client_keys is not None
            for options, noticed in zip(
                strangers,
                (
                    lambda: server.hub.num_strangers > 0,
                    lambda: client_keys.refused > 0,
                    lambda: server.hub.num_strangers > 1,
                ),
                strict=True,
            ):
                stranger = open_tier(server.url, timeout_s=1.0, **options)

                def is_noticed(stranger: ServerTier = stranger, noticed: Callable[[], bool] = noticed) -> bool:
                    with pytest.raises(TierError, match="cannot be reached"):
                        stranger.contains([A])
                    return noticed()

                wait_for("the stranger is refused", is_noticed)
                stranger.close()
            assert check_read(tier, A) is Outcome.HIT
            tier.close()
        lines = [record.getMessage() for record in caplog.records]
        assert sum(f"from {door.host}: its key is not on the list" in line for line in lines) == 1
        assert sum("has no keys" in line for line in lines) == 1

    def test_this_host_needs_none(self, keys: Path) -> None:
        """A folder of mode 0700 is enough, also beside an address that wants keys."""
        with short_folder() as folder, serving_tcp(folder=folder, **self.options(keys)) as server:
            near = open_tier(f"kvs+ipc://{folder}")
            far = open_tier(f"kvs://127.0.0.1:{server.hub.tcp_port}", **self.client(keys, "clients/engine"))
            assert near.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
            assert far.put([make_transfer(EVEN, B)]) == [Outcome.STORED]
            assert check_read(near, B) is check_read(far, A) is Outcome.HIT
            near.close()
            far.close()

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
    def test_other_addresses_need_keys(self, keys: Path, host: str) -> None:
        door = TcpAddress(host, 0)
        for options in ({}, {"keys": read_pair(keys / "server/server.key")}):
            with pytest.raises(ConfigError, match="kvstore keygen"):
                Hub(ServerOptions(1 << 20, tcp=door, **options))  # type: ignore[arg-type]

    def test_a_secret_key_is_secret(self, keys: Path) -> None:
        path = keys / "server/server.key"
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_pair(path)
        with pytest.raises(ConfigError, match="is there already"):
            make_keys(keys / "server", "server")

    def test_an_open_folder_is_refused(self) -> None:
        with short_folder() as folder:
            folder.chmod(0o755)
            with pytest.raises(ConfigError, match="chmod 700"):
                Hub(ServerOptions(1 << 20, folder=folder))


class TestManyNamespaces:
    def test_models_of_different_sizes_share_the_pool(self, server: ServerThread) -> None:
        """Until it is full, and then too; every hit is right, every page accounted for."""
        layouts = [EVEN, BIG, KVLayout(page_bytes=(300_000, 50), planes=2, block_tokens=16, chunk_tokens=32)]
        names = [Namespace({"model": f"model {number}"}) for number in range(3)]
        tiers = [open_tier(server.url, layout, name) for layout, name in zip(layouts, names, strict=True)]
        dice = random.Random(1)
        hits = 0
        for _ in range(300):
            which = dice.randrange(3)
            ref = make_ref(dice.randrange(30), layouts[which].blocks_per_chunk)
            if dice.random() < 0.5:
                assert tiers[which].put([make_transfer(layouts[which], ref)])[0] in {Outcome.STORED, Outcome.FULL}
            else:
                hits += check_read(tiers[which], ref, layouts[which]) is Outcome.HIT
        assert hits
        for tier in tiers:
            tier.close()
        check_quiet(server)

    def test_a_quota_is_kept(self) -> None:
        """By a namespace's own chunks going, the longest untouched first."""
        page = PAGE_BYTES
        with serving_tcp(quotas={"conformance": 8 * page, "*": 2 * page}) as server:
            tier = open_tier(server.url)
            other = open_tier(server.url, namespace=Namespace({"model": "other"}))
            for number in range(20):
                assert tier.put([make_transfer(EVEN, make_ref(number))]) == [Outcome.STORED]
                assert other.put([make_transfer(EVEN, make_ref(number))]) == [Outcome.STORED]
            assert [ref for ref, _ in tier.scan()] == [make_ref(number) for number in range(12, 20)]
            assert [ref for ref, _ in other.scan()] == [make_ref(18), make_ref(19)]
            assert tier.used_bytes == 8 * page
            tier.close()
            other.close()

    def test_a_fragmented_pool(self, tmp_path: Path) -> None:
        """A large chunk finds its place in several runs, also on its way to disk and back."""
        disk = DiskOptions(tmp_path / "disk", 64 << 20)
        with serving_ipc(pool_bytes=8 << 20, disk=disk) as server:
            small, large = open_tier(server.url), open_tier(server.url, BIG, Namespace({"model": "big"}))
            refs = [make_ref(number) for number in range(500)]
            small.put([make_transfer(EVEN, ref) for ref in refs])
            wait_for("all is on disk", lambda: server.hub.service.num_unwritten == 0)
            small.remove(refs[::2])
            ref = make_ref(1)
            assert large.put([make_transfer(BIG, ref)]) == [Outcome.STORED]
            (space,) = (s for s in server.hub.stock.spaces.values() if s.layout == BIG)
            assert len(space.chunks[ref].runs) > 1
            assert check_read(large, ref, BIG) is Outcome.HIT
            wait_for("all is on disk", lambda: server.hub.service.num_unwritten == 0)
            for number in range(600):  # until only the disk has it
                small.put([make_transfer(EVEN, make_ref(1000 + number))])
            assert check_read(large, ref, BIG) is Outcome.HIT
            small.close()
            large.close()
            check_quiet(server)


def test_metrics_and_health(process: ServerProcess) -> None:
    import httpx

    process.terminate()
    port = free_port()
    process.config.write_text(process.config.read_text() + f"server_http_port: {port}\n")
    process.start()
    tier = open_tier(process.url)
    tier.put([make_transfer(EVEN, A)])

    def page(path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers)

    wait_for("the page is there", lambda: page("/healthz").text == "ok\n" if page_is_up(port) else False)
    text = page("/metrics").text
    name = r'^kvstore_server_stored_chunks_total\{namespace="[0-9a-f]{16}",model="conformance"\} 1$'
    assert re.search(name, text, re.MULTILINE)
    assert page("/metrics", host="evil.example").status_code == 403
    assert page("/other").status_code == 404
    tier.close()


def other_address() -> str:
    """An address of this host that others can reach."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family is socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this host has no address but loopback")


def page_is_up(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_time_stands_for_nothing(server: ServerThread) -> None:
    """A lookup is answered while another client keeps the server busy with its payload."""
    tier = open_tier(server.url, BIG)
    other = open_tier(server.url)
    other.put([make_transfer(EVEN, A)])
    transfers = [make_transfer(BIG, make_ref(number)) for number in range(8)]
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 1.0:
        assert set(tier.put(transfers)) == {Outcome.STORED}
        assert other.contains([A]) == [True]
    tier.close()
    other.close()
