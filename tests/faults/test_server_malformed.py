"""Tests of malformed messages to a cache server, which cost their sender the connection and others nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import psutil
import pytest
from support.cache_server import ServerThread, raw_peer, serving_ipc, serving_tcp
from support.malformed import fuzz
from support.redis_server import wait_for
from support.served import WAIT_S, A, Raw, check_quiet, check_read, open_connection, open_tier

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.outcomes import pack_outcomes
from kvstore.protocol.payload import Geometry, checksum
from kvstore.server import connections, sessions
from kvstore.testing.harness import EVEN, MINE, make_payload, make_transfer
from kvstore.tiers.server.connection import NoSessionError, ServerConnection
from kvstore.tiers.server.url import parse_server


class TestMalformed:
    def test_it_costs_its_sender_the_connection(self, server: ServerThread) -> None:
        """A malformed message ends its sender's connection, and affects no other client."""
        tier = open_tier(server.url)
        tier.put([make_transfer(EVEN, A)])
        context, connection = open_connection(server.url)
        connection.ask(messages.Acquire(connection.new_serial(), messages.pack_refs([A])), messages.Granted)
        connection._socket.send(b"\x93\x01nonsense")
        wait_for("it is cut off", lambda: server.hub.reception.num_malformed == 1)
        with pytest.raises(TierError):
            connection.ask(messages.Lookup(connection.new_serial(), b""), messages.Held)
        connection.close()
        check_quiet(server)
        assert check_read(tier, A) is Outcome.HIT
        close_context(context)
        tier.close()

    @pytest.fixture(autouse=True)
    def _less_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shorten the wait for clients whose end was missed because they left right after their hello."""
        monkeypatch.setattr(sessions, "SILENCE_S", 5.0)

    def test_fuzz(self, server: ServerThread) -> None:
        fuzz(server, 3000)

    @pytest.mark.soak
    def test_fuzz_for_long(self, server: ServerThread) -> None:
        """Memory stays flat over 100,000 messages."""
        fuzz(server, 5000)
        before = psutil.Process().memory_info().rss
        fuzz(server, 100_000)
        assert psutil.Process().memory_info().rss - before < 128 << 20

    def test_messages_that_never_end(self) -> None:
        """Clients that announce more than they send, or send less than ZeroMQ's greeting, do no harm."""
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
            while huge.recv(4096):  # it is cut off because of the announced size
                pass
            for _ in range(50):
                assert check_read(tier, A) is Outcome.HIT
            for connection in (*slow, half, huge):
                connection.close()
            tier.close()

    def test_a_piece_that_was_damaged_on_its_way(self) -> None:
        with serving_tcp() as server:
            context, connection = open_connection(server.url)
            granted = connection.ask(
                messages.Reserve(connection.new_serial(), messages.pack_refs([A])), messages.Granted
            )
            lease = granted.grants[0].lease
            payload = make_payload(EVEN, A)
            piece = messages.Piece(connection.new_serial(), lease, 0, bytes(8))
            assert connection.ask(piece, messages.Done, [payload]).outcomes == pack_outcomes([Outcome.FAILED])
            done = connection.ask(messages.Commit(connection.new_serial(), [lease], True), messages.Done)
            assert done.outcomes == pack_outcomes([Outcome.FAILED])
            connection.close()
            check_quiet(server)
            close_context(context)

    def test_a_chunk_of_which_a_part_never_came(self) -> None:
        with serving_tcp() as server:
            context, connection = open_connection(server.url)
            granted = connection.ask(
                messages.Reserve(connection.new_serial(), messages.pack_refs([A])), messages.Granted
            )
            lease = granted.grants[0].lease
            part = make_payload(EVEN, A)[:4096]
            connection.ask(messages.Piece(connection.new_serial(), lease, 0, checksum([part])), messages.Done, [part])
            done = connection.ask(messages.Commit(connection.new_serial(), [lease], True), messages.Done)
            assert done.outcomes == pack_outcomes([Outcome.FAILED])
            connection.close()
            close_context(context)

    def test_a_chunk_of_which_one_half_came_twice(self) -> None:
        """Otherwise the other half would be the old contents of the pages, which are another client's KV."""
        with serving_tcp() as server:
            context, connection = open_connection(server.url)
            granted = connection.ask(
                messages.Reserve(connection.new_serial(), messages.pack_refs([A])), messages.Granted
            )
            lease = granted.grants[0].lease
            payload = make_payload(EVEN, A)
            half = payload[: len(payload) // 2]
            for outcome in (Outcome.STORED, Outcome.FAILED):
                piece = messages.Piece(connection.new_serial(), lease, 0, checksum([half]))
                assert connection.ask(piece, messages.Done, [half]).outcomes == pack_outcomes([outcome])
            done = connection.ask(messages.Commit(connection.new_serial(), [lease], True), messages.Done)
            assert done.outcomes == pack_outcomes([Outcome.FAILED])
            connection.close()
            check_quiet(server)
            close_context(context)

    def test_another_version(self, server: ServerThread) -> None:
        context = open_context()
        connection = ServerConnection(context, parse_server(server.url, {}))
        hello = messages.Hello(1, 99, {}, Geometry.of(EVEN), 0, connection.token)
        with pytest.raises(TierError, match="versions 1 to 6 of the protocol, not 99"):
            connection.ask(hello, messages.Welcome)
        with pytest.raises(NoSessionError):
            connection.ask(messages.Lookup(2, b""), messages.Held)
        connection.close()
        close_context(context)


def hold(gate: threading.Event) -> None:
    """Keep a thread busy."""
    gate.wait(WAIT_S)


class TestMessages:
    def endless(self, peer: socket.socket) -> int:
        """Send an endless message; return the bytes sent until the connection was cut off."""
        peer.settimeout(WAIT_S)
        frame = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
        sent = 0
        try:
            while sent < 2 << 30:
                peer.sendall(frame)
                sent += len(frame)
        except ConnectionError:
            return sent
        return sent

    def test_a_message_that_never_ends_before_a_hello(self) -> None:
        with serving_tcp() as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            peer = raw_peer(server)
            assert self.endless(peer) < 1 << 30
            assert server.hub.reception.num_malformed >= 1
            assert tier.contains([A]) == [True]
            peer.close()
            tier.close()

    def test_a_client_that_goes_as_soon_as_it_is_welcome(self) -> None:
        """The end of its connection is reported before the server has noted its client."""
        hello = messages.encode(
            messages.Hello(1, messages.PROTOCOL_VERSION, dict(MINE.fields), Geometry.of(EVEN), 0, b"")
        )
        with serving_tcp() as server:
            peer, real = raw_peer(server), server.hub.core.send

            def send(*answer: Any) -> None:
                real(*answer)
                peer.close()
                assert server.hub.network is not None
                assert server.hub.network.reports.poll(int(1000 * WAIT_S))

            server.hub.core.send = send
            peer.sendall(b"\x02" + len(hello).to_bytes(8, "big") + hello)
            wait_for("it has come", lambda: server.hub.stock.spaces)
            wait_for("it has gone", lambda: not server.hub.sessions.by_peer)

    def test_a_message_that_never_ends_after_a_hello(self) -> None:
        hello = messages.encode(
            messages.Hello(1, messages.PROTOCOL_VERSION, dict(MINE.fields), Geometry.of(EVEN), 0, b"")
        )
        with serving_tcp() as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            peer = raw_peer(server)
            peer.sendall(b"\x02" + len(hello).to_bytes(8, "big") + hello)
            wait_for("it is a client", lambda: len(server.hub.sessions.by_peer) == 2)
            assert self.endless(peer) < 2 << 30
            wait_for("it is no client any more", lambda: len(server.hub.sessions.by_peer) == 1)
            assert tier.contains([A]) == [True]
            peer.close()
            tier.close()

    def test_many_that_send_little_are_cut_off_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a hello, each client is within its bound, but all together are not."""
        monkeypatch.setattr(connections, "_ALL_STRANGERS_BYTES", 4 << 20)
        with serving_tcp() as server:
            part = b"\x03" + (800 << 10).to_bytes(8, "big") + bytes(800 << 10)
            peers = [raw_peer(server) for _ in range(12)]
            for peer in peers:
                peer.sendall(part)
            wait_for("some are cut off", lambda: server.hub.reception.num_malformed >= 12 - 5)
            for peer in peers:
                peer.close()

    def test_a_client_with_all_pieces_under_way_is_not_cut_off(self) -> None:
        """The client stays although no message of it is complete for a while."""
        layout = KVLayout((2 << 20,), 1, 16, 128)
        with serving_tcp() as server:
            context = open_context()
            connection = ServerConnection(context, parse_server(server.url, {"timeout_s": 60.0}))
            connection.hello(MINE, Geometry.of(layout))
            granted = connection.ask(
                messages.Reserve(connection.new_serial(), messages.pack_refs([ChunkRef(bytes(16), 8)])),
                messages.Granted,
            )
            gate = threading.Event()
            server.hub._jobs.report(partial(hold, gate))
            piece = bytes(2 << 20)
            for number in range(8):
                offset = number * len(piece)
                connection.send(
                    messages.Piece(connection.new_serial(), granted.grants[0].lease, offset, checksum([piece])), [piece]
                )
            gate.set()
            outcomes = [connection.receive() for _ in range(8)]
            assert all(isinstance(outcome, messages.Done) for outcome in outcomes)
            assert server.hub.reception.num_malformed == 0
            connection.close()
            close_context(context)

    @pytest.mark.parametrize("serving", [serving_tcp, serving_ipc])
    def test_a_message_of_many_frames_is_thrown_away_unread(
        self, serving: Callable[[], AbstractContextManager[ServerThread]]
    ) -> None:
        """Bytes of connections on this host are not counted, but all of them belong to the server's own user."""
        with serving() as server:
            tier = open_tier(server.url)
            client = Raw(server)
            client.connection._socket.send_multipart([b"x"] * 20_000)
            wait_for("it is malformed", lambda: server.hub.reception.num_malformed == 1)
            assert tier.contains([A]) == [False]
            assert server.hub.reception.num_malformed == 1
            client.close()
            tier.close()


class TestHellos:
    def test_fields_without_a_bound_are_refused(self) -> None:
        with serving_tcp() as server, closing(Raw(server)) as client:
            with pytest.raises(TierError, match="at most 16384 bytes"):
                client.hello({f"f{number}": "x" * 1000 for number in range(20)}, Geometry.of(EVEN))
            assert not server.hub.stock.spaces
            client.hello({f"f{number}": "x" * 1000 for number in range(15)}, Geometry.of(EVEN))

    @pytest.mark.parametrize(
        "geometry",
        [
            Geometry((4096,) * 1025, 1, 16, 16, "p", "opaque", None),
            Geometry((4,) * 1000, 1, 1, 1 << 20, "p", "opaque", None),
            Geometry((1 << 20,), 64, 16, 256, "p", "opaque", None),
        ],
        ids=["layers", "blocks", "bytes"],
    )
    def test_a_geometry_that_nobody_could_serve(self, geometry: Geometry) -> None:
        with serving_tcp() as server:
            client = Raw(server)
            with pytest.raises(TierError):
                client.hello({"model": "x"}, geometry)
            assert not server.hub.stock.spaces
            client.close()

    @pytest.mark.parametrize("field_characters", [1, 4000])
    def test_a_report_is_short_whatever_there_is(self, field_characters: int) -> None:
        """The report is short, and names the namespaces that hold most."""
        with serving_tcp() as server:
            server.hub.stop()
            server.close()
            layout = KVLayout((4096,), 1, 16, 16)
            for number in range(1000):
                fields = {"model": f"model {number}", "more": "x" * field_characters}
                space = server.hub.stock.spaces.enter(Namespace(fields), layout)
                assert space is not None
                space.used_bytes = number
            tree = server.hub._stats()
            assert 0 < len(tree["namespaces"]) <= 256
            assert len(json.dumps(tree)) < 1 << 20
            assert [space["used_bytes"] for space in tree["namespaces"]] == list(
                range(999, 999 - len(tree["namespaces"]), -1)
            )
            assert tree["namespaces_left_out"] + len(tree["namespaces"]) == 1000

    def test_checksums_of_pieces_that_overlap_take_no_room(self) -> None:
        with serving_tcp() as server:
            client = Raw(server)
            client.hello(dict(MINE.fields), Geometry.of(EVEN))
            connection = client.connection
            granted = connection.ask(
                messages.Reserve(connection.new_serial(), messages.pack_refs([A])), messages.Granted
            )
            for offset in range(400):
                piece = messages.Piece(connection.new_serial(), granted.grants[0].lease, offset, checksum([b"x"]))
                connection.ask(piece, messages.Done, [b"x"])
            (session,) = server.hub.sessions.by_peer.values()
            (lease,) = session.leases.values()
            assert len(lease.chunk.sums) <= 256
            client.close()
