"""Tests of a cache server and of clients that die, hang or come back."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import zmq
from support.cache_server import ServerProcess, ServerThread, mapped_pools, serving_ipc, serving_tcp
from support.redis_server import wait_for
from support.served import BIG, WAIT_S, A, B, check_quiet, check_read, open_connection, open_tier, works

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ClosedError, ConfigError, TierError
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context
from kvstore.protocol.outcomes import pack_outcomes
from kvstore.server.hub import Hub
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.testing.harness import EVEN, make_buffer, make_ref, make_transfer
from kvstore.tiers.guards import GuardOptions, guarded
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.moves import Mapped
from kvstore.tools.processes import free_port


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
        """The server writes chunks on their way to disk before it ends."""
        tier = open_tier(process.url)
        refs = [make_ref(number) for number in range(40)]
        assert set(tier.put([make_transfer(EVEN, ref) for ref in refs])) == {Outcome.STORED}
        assert process.terminate() == 0
        process.start()
        wait_for("the tier works again", lambda: tier.contains(refs) == [True] * 40)
        assert [check_read(tier, ref) for ref in refs] == [Outcome.HIT] * 40
        tier.close()

    def test_frozen(self, process: ServerProcess) -> None:
        """Calls end at their deadline, and work once the server continues."""
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
        """No pool stays mapped, even if an error of a failed call is kept, and without a garbage collector."""
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
        context, connection = open_connection(process.url)
        mover.close()
        with pytest.raises(ClosedError):
            mover.read(connection, make_buffer(EVEN.slot_bytes), messages.Grant(0))
        assert mapped_pools() <= before
        connection.close()
        close_context(context)

    def test_a_second_server_in_the_folder_is_refused(self, process: ServerProcess) -> None:
        with pytest.raises(ConfigError, match="another cache server"):
            Hub(ServerOptions(1 << 20, folder=process.folder))

    def test_sessions_of_an_earlier_server(self) -> None:
        """Over the network, ZeroMQ reconnects by itself, and the client says hello again."""
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
        context, connection = open_connection(server.url)
        connection.ask(messages.Reserve(connection.new_serial(), messages.pack_refs([B])), messages.Granted)
        connection.ask(messages.Acquire(connection.new_serial(), messages.pack_refs([A])), messages.Granted)
        assert server.hub.sessions.num_leases == 2
        connection.close()
        check_quiet(server)
        assert tier.contains([A, B]) == [True, False]
        close_context(context)
        tier.close()

    def test_a_client_that_comes_through_a_connection_of_before(self) -> None:
        """The end of a connection is reported late, when a new one has its number, and the new client stays."""
        with serving_tcp() as server:
            assert any(self._change_places(server) for _ in range(10)), "no connection ever got the number of another"

    def _change_places(self, server: ServerThread) -> bool:
        """Return True if the new client, which is served in any case, has the file descriptor of the one that left."""
        context, other = open_connection(server.url)
        first_context, first = open_connection(server.url)
        came: list[tuple[zmq.Context[zmq.Socket[bytes]], ServerConnection]] = []
        opener = threading.Thread(target=lambda: came.append(open_connection(server.url)))
        receive = server.hub.reception._receive

        def change_places(number: int, router: zmq.Socket[bytes]) -> None:
            """Run on the server's thread, after its look for closed connections and before that for messages."""
            server.hub.reception._receive = receive  # type: ignore[method-assign]
            first.close()
            close_context(first_context)
            time.sleep(0.1)  # until this end of the connection is closed, too
            opener.start()
            time.sleep(0.1)  # until its hello has arrived
            receive(number, router)

        wait_for("only these two are left", lambda: len(server.hub.reception._by_fd) == 2)
        fds = set(server.hub.reception._by_fd)
        server.hub.reception._receive = change_places  # type: ignore[method-assign]
        try:
            other.ask(messages.Lookup(other.new_serial(), messages.pack_refs([A])), messages.Held)
            opener.join(10)
            new = came[0][1]
            assert new.ask(messages.Lookup(new.new_serial(), messages.pack_refs([A])), messages.Held).found == b"\0"
            return set(server.hub.reception._by_fd) == fds
        finally:
            for its_context, connection in ((context, other), *came):
                connection.close()
                close_context(its_context)

    def test_a_lease_of_before_is_worth_nothing(self, server: ServerThread) -> None:
        """A lease of another connection, or one that was given back, is refused."""
        context, connection = open_connection(server.url)
        granted = connection.ask(messages.Reserve(connection.new_serial(), messages.pack_refs([B])), messages.Granted)
        (lease,) = (grant.lease for grant in granted.grants)
        other_context, other = open_connection(server.url)
        failed = pack_outcomes([Outcome.FAILED])
        assert other.ask(messages.Commit(other.new_serial(), [lease], True), messages.Done).outcomes == failed
        assert (
            connection.ask(messages.Commit(connection.new_serial(), [lease], False), messages.Done).outcomes == failed
        )
        assert connection.ask(messages.Commit(connection.new_serial(), [lease], True), messages.Done).outcomes == failed
        connection.close()
        other.close()
        check_quiet(server)
        assert not server.hub.stock.spaces or all(not s.chunks for s in server.hub.stock.spaces.values())
        close_context(context)
        close_context(other_context)

    def test_what_is_read_stays_while_it_is_replaced(self) -> None:
        """Pages that a client reads are not reused."""
        with serving_ipc(pool_bytes=8 << 20) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            context, connection = open_connection(server.url)
            granted = connection.ask(
                messages.Acquire(connection.new_serial(), messages.pack_refs([A])), messages.Granted
            )
            before = server.hub.pool.parts(granted.grants[0].runs, 0, EVEN.slot_bytes)[0].copy()
            for number in range(2000):
                tier.put([make_transfer(EVEN, make_ref(number % 600))])
            tier.remove([A])
            after = server.hub.pool.parts(granted.grants[0].runs, 0, EVEN.slot_bytes)[0]
            assert np.array_equal(before, after)
            connection.close()
            check_quiet(server)
            close_context(context)
            tier.close()

    def test_a_write_that_clear_overtook(self, server: ServerThread) -> None:
        context, connection = open_connection(server.url)
        granted = connection.ask(messages.Reserve(connection.new_serial(), messages.pack_refs([B])), messages.Granted)
        tier = open_tier(server.url)
        tier.clear()
        done = connection.ask(messages.Commit(connection.new_serial(), [granted.grants[0].lease], True), messages.Done)
        assert done.outcomes == pack_outcomes([Outcome.FAILED])
        assert tier.contains([B]) == [False]
        connection.close()
        close_context(context)
        tier.close()

    def test_a_client_may_not_take_the_whole_pool(self) -> None:
        with serving_ipc(pool_bytes=64 << 20) as server:
            context, connection = open_connection(server.url, BIG)
            refs = [make_ref(number) for number in range(16)]
            granted = connection.ask(
                messages.Reserve(connection.new_serial(), messages.pack_refs(refs)), messages.Granted
            )
            assert sum(grant.lease > 0 for grant in granted.grants) == 4
            tier = open_tier(server.url, BIG)
            assert tier.put([make_transfer(BIG, make_ref(99))]) == [Outcome.STORED]
            connection.close()
            close_context(context)
            tier.close()

    def test_a_frozen_client_keeps_its_place_until_it_is_gone(self) -> None:
        """The client may still write to its pages when it continues, so they are not reused."""
        code = (
            "import sys, zmq, time; from kvstore.protocol import messages;"
            "from kvstore.tiers.server.connection import ServerConnection;"
            "from kvstore.tiers.server.url import parse_server; from kvstore.testing.harness import *;"
            "from kvstore.protocol.payload import Geometry;"
            "connection = ServerConnection(zmq.Context(), parse_server(sys.argv[1], {}));"
            "connection.hello(MINE, Geometry.of(EVEN));"
            "connection.ask(messages.Reserve(1, messages.pack_refs([make_ref(7)])), messages.Granted);"
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
                server.hub._jobs.report(server.hub.service.expire)
                tier = open_tier(server.url)
                tier.check()
                assert server.hub.sessions.num_leases == 1
            finally:
                client.kill()
                client.wait()
            check_quiet(server)
            tier.close()

    def test_a_child_does_not_keep_what_was_its_parent_s(self) -> None:
        """A forked process that outlives the client does not keep the client's pages in use."""
        with serving_ipc() as server:
            context, connection = open_connection(server.url)
            connection.ask(messages.Reserve(connection.new_serial(), messages.pack_refs([B])), messages.Granted)
            child = os.fork()
            if not child:
                time.sleep(WAIT_S)
                os._exit(0)
            connection.close()
            check_quiet(server)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            close_context(context)
