"""What a cache server keeps of clients that come and go, and what one client can cost the others: all of it bounded."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import zmq
from support.cache_server import ServerThread, raw_peer, serving_ipc, serving_tcp
from support.redis_server import wait_for

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import TierError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.protocol.pieces import checksum
from kvstore.protocol.runs import PAGE_BYTES
from kvstore.server import rack, watch
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.server.rack import ShelfOptions
from kvstore.server.spaces import NO_QUOTA, Chunk, Space
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.server.link import Link
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server

WAIT_S = 20.0
A, B = make_ref(1), make_ref(2)


def open_tier(server: ServerThread, namespace: Namespace = MINE, layout: KVLayout = EVEN) -> ServerTier:
    return ServerTier.open(TierSetup(namespace, layout, UNBOUNDED_BYTES, {"url": server.url, "timeout_s": 10.0}))


def hold(gate: threading.Event) -> None:
    """Keep a thread busy."""
    gate.wait(WAIT_S)


def settle(server: ServerThread) -> None:
    """Until the disk has everything."""
    service = server.hub.service
    wait_for("nothing is on its way to disk", lambda: not service.is_changing_files)


@contextmanager
def embedded_server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(MINE, EVEN, EmbeddedOptions(4 << 20, "127.0.0.1", 0))
    try:
        yield server
    finally:
        server.close()


class Raw:
    """A client that says what it likes."""

    def __init__(self, server: ServerThread) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = Link(self.context, parse_server(server.url, {"timeout_s": 10.0}))

    def hello(self, fields: dict[str, str | int], geometry: messages.Geometry) -> messages.Welcome:
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
            geometry = messages.Geometry((4096,), 1, 16, 16, "p", "bf16", axes)
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
            wait_for("few are open", lambda: server.hub.service._shelves.num_open <= 3)
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


# -- messages --------------------------------------------------------------------------------------------------------


class TestMessages:
    def endless(self, peer: socket.socket) -> int:
        """Send a message without an end; how much could be sent until the connection was cut off."""
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
            tier = open_tier(server)
            tier.put([make_transfer(EVEN, A)])
            peer = raw_peer(server)
            assert self.endless(peer) < 1 << 30
            assert server.hub.num_malformed >= 1
            assert tier.contains([A]) == [True]
            peer.close()
            tier.close()

    def test_a_message_that_never_ends_after_a_hello(self) -> None:
        hello = messages.encode(
            messages.Hello(1, messages.PROTOCOL_VERSION, dict(MINE.fields), messages.Geometry.of(EVEN), 0, b"")
        )
        with serving_tcp() as server:
            tier = open_tier(server)
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
        """Before a hello: each is within its bound, and all together are not."""
        monkeypatch.setattr(watch, "_ALL_STRANGERS_BYTES", 4 << 20)
        with serving_tcp() as server:
            part = b"\x03" + (800 << 10).to_bytes(8, "big") + bytes(800 << 10)
            peers = [raw_peer(server) for _ in range(12)]
            for peer in peers:
                peer.sendall(part)
            wait_for("some are cut off", lambda: server.hub.num_malformed >= 12 - 5)
            for peer in peers:
                peer.close()

    def test_a_client_with_all_pieces_under_way_is_not_cut_off(self) -> None:
        """Although the server hears nothing of them for a while."""
        layout = KVLayout((2 << 20,), 1, 16, 128)
        with serving_tcp() as server:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            link = Link(context, parse_server(server.url, {"timeout_s": 60.0}))
            link.hello(dict(MINE.fields), messages.Geometry.of(layout), 0)
            granted = link.ask(
                messages.Reserve(link.new_serial(), messages.pack_refs([ChunkRef(bytes(16), 8)])), messages.Granted
            )
            gate = threading.Event()
            server.hub._report(partial(hold, gate))
            piece = bytes(2 << 20)
            for number in range(8):
                offset = number * len(piece)
                link.send(
                    messages.Piece(link.new_serial(), granted.grants[0].lease, offset, checksum([piece])), [piece]
                )
            gate.set()
            outcomes = [link.receive() for _ in range(8)]
            assert all(isinstance(outcome, messages.Done) for outcome in outcomes)
            assert server.hub.num_malformed == 0
            link.close()
            context.term()

    def test_a_message_of_many_frames_is_thrown_away_unread(self) -> None:
        with serving_tcp() as server:
            tier = open_tier(server)
            client = Raw(server)
            client.link._socket.send_multipart([b"x"] * 20_000)
            wait_for("it is malformed", lambda: server.hub.num_malformed == 1)
            assert tier.contains([A]) == [False]
            assert server.hub.num_malformed == 1
            client.close()
            tier.close()

    def test_a_message_of_many_frames_on_this_host(self) -> None:
        """There is no count of bytes for such a connection, but whoever has one is our own user."""
        with serving_ipc() as server:
            tier = open_tier(server)
            client = Raw(server)
            client.link._socket.send_multipart([b"x"] * 20_000)
            wait_for("it is malformed", lambda: server.hub.num_malformed == 1)
            assert tier.contains([A]) == [False]
            client.close()
            tier.close()


class TestHellos:
    def test_fields_without_a_bound_are_refused(self) -> None:
        with serving_tcp() as server:
            client = Raw(server)
            with pytest.raises(TierError, match="at most 16384 bytes"):
                client.hello({f"f{number}": "x" * 1000 for number in range(20)}, messages.Geometry.of(EVEN))
            assert not server.hub.stock.spaces
            client.hello({f"f{number}": "x" * 1000 for number in range(15)}, messages.Geometry.of(EVEN))
            client.close()

    @pytest.mark.parametrize(
        "geometry",
        [
            messages.Geometry((4096,) * 1025, 1, 16, 16, "p", "opaque", None),
            messages.Geometry((4,) * 1000, 1, 1, 1 << 20, "p", "opaque", None),
            messages.Geometry((1 << 20,), 64, 16, 256, "p", "opaque", None),
        ],
        ids=["layers", "blocks", "bytes"],
    )
    def test_a_geometry_that_nobody_could_serve(self, geometry: messages.Geometry) -> None:
        with serving_tcp() as server:
            client = Raw(server)
            with pytest.raises(TierError):
                client.hello({"model": "x"}, geometry)
            assert not server.hub.stock.spaces
            client.close()

    def test_a_report_is_short_whatever_there_is(self) -> None:
        """And names the namespaces that hold most."""
        with serving_tcp() as server:
            server.hub.stop()
            server.close()
            layout = KVLayout((4096,), 1, 16, 16)
            for number in range(1000):
                fields = {"model": f"model {number}", "more": "x" * 4000}
                space = server.hub.stock.enter(Namespace(fields), layout)
                assert space is not None
                space.used_bytes = number
            tree = server.hub._stats()
            assert len(json.dumps(tree)) < 1 << 20
            assert [space["used_bytes"] for space in tree["namespaces"]] == list(
                range(999, 999 - len(tree["namespaces"]), -1)
            )
            assert tree["namespaces_left_out"] + len(tree["namespaces"]) == 1000

    def test_checksums_of_pieces_that_overlap_take_no_room(self) -> None:
        with serving_tcp() as server:
            client = Raw(server)
            client.hello(dict(MINE.fields), messages.Geometry.of(EVEN))
            link = client.link
            granted = link.ask(messages.Reserve(link.new_serial(), messages.pack_refs([A])), messages.Granted)
            for offset in range(400):
                piece = messages.Piece(link.new_serial(), granted.grants[0].lease, offset, checksum([b"x"]))
                link.ask(piece, messages.Done, [b"x"])
            (session,) = server.hub.sessions.by_peer.values()
            (lease,) = session.leases.values()
            assert len(lease.chunk.sums) <= 256
            client.close()


# -- turns -----------------------------------------------------------------------------------------------------------


class TestPlaces:
    def test_a_question_for_many_places_lets_others_have_their_turn(self) -> None:
        """Each place displaces many chunks; another client is answered before all of them are there."""
        small, large = KVLayout((PAGE_BYTES,), 1, 16, 16), KVLayout((200 * PAGE_BYTES,), 1, 16, 16)
        with serving_ipc(pool_bytes=4000 * PAGE_BYTES, policy="LRU") as server:
            space = server.hub.stock.enter(Namespace({"model": "small"}), small)
            assert space is not None
            for number in range(4000):
                chunk = server.hub.stock.reserve(space, make_ref(number, 1), NO_QUOTA)
                assert chunk is not None
                server.hub.stock.complete(chunk, is_whole=True)
            client, other = Raw(server), Raw(server)
            client.hello({"model": "large"}, messages.Geometry.of(large))
            other.hello({"model": "small"}, messages.Geometry.of(small))
            seen: list[int] = []
            lookup, reserve = server.hub.stock.lookup, server.hub.stock.reserve

            def slowly(space: Space, ref: ChunkRef, capacity_bytes: int) -> Chunk | None:
                time.sleep(0.05)  # so that what the other has sent has come, however busy the machine is
                return reserve(space, ref, capacity_bytes)

            def watched(space: Space, refs: Sequence[ChunkRef]) -> bytes:
                seen.append(server.hub.stock.num_displaced)
                return lookup(space, refs)

            server.hub.stock.lookup = watched  # type: ignore[method-assign]
            server.hub.stock.reserve = slowly  # type: ignore[method-assign]
            gate = threading.Event()
            server.hub._report(partial(hold, gate))
            refs = [make_ref(number, 1) for number in range(5)]
            client.link.send(messages.Reserve(1, messages.pack_refs(refs)))
            for _ in range(3):
                other.link.send(messages.Lookup(other.link.new_serial(), messages.pack_refs([A])))
            gate.set()
            granted = client.link.receive()
            assert isinstance(granted, messages.Granted)
            assert [grant.lease > 0 for grant in granted.grants] == [True] * 5
            for _ in range(3):
                assert isinstance(other.link.receive(), messages.Held)
            assert server.hub.stock.num_displaced == 1000
            assert min(seen) < 1000
            client.close()
            other.close()

    def test_questions_whose_answer_is_due_are_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, get = threading.Event(), DiskTier.get

        def get_late(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
            gate.wait(WAIT_S)
            return get(tier, transfers)

        with serving_ipc(pool_bytes=64 * PAGE_BYTES, policy="LRU", disk=ShelfOptions(tmp_path, 16 << 20)) as server:
            tier = open_tier(server)
            for number in range(100):
                tier.put([make_transfer(EVEN, make_ref(number))])
                settle(server)
            monkeypatch.setattr(DiskTier, "get", get_late)
            client = Raw(server)
            client.hello(dict(MINE.fields), messages.Geometry.of(EVEN))
            for _ in range(20):
                client.link.send(messages.Acquire(client.link.new_serial(), messages.pack_refs([make_ref(0)])))
            wait_for("it is cut off", lambda: server.hub.num_malformed == 1)
            gate.set()
            client.close()
            tier.close()
            wait_for("its places are free again", lambda: not server.hub.sessions.num_leases)


# -- orders ----------------------------------------------------------------------------------------------------------


ORDERS = [
    messages.ClearSpaces(1, b""),
    messages.Pin(1, bytes(8), b"", True),
    messages.Explain(1, bytes(8), b""),
    messages.Pins(1),
    messages.UnpinSpaces(1, b""),
]


class TestOrders:
    @pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
    def test_are_for_those_who_run_the_server(self, order: messages.Order) -> None:
        with serving_tcp() as server:
            tier = open_tier(server)
            tier.put([make_transfer(EVEN, A)])
            client = Raw(server)
            with pytest.raises(TierError, match="those who run the server"):
                client.link.ask(order, messages.Report)
            client.close()
            stranger = Raw(server)  # a session changes nothing
            stranger.hello(dict(MINE.fields), messages.Geometry.of(EVEN))
            with pytest.raises(TierError, match="those who run the server"):
                stranger.link.ask(order, messages.Report)
            stranger.close()
            assert tier.contains([A]) == [True]
            tier.close()

    def test_our_own_user_may_and_whoever_is_allowed_to(self) -> None:
        for serve, options in ((serving_ipc, {}), (serving_tcp, {"operators": frozenset({"*"})})):
            with serve(**options) as server:
                tier = open_tier(server)
                tier.put([make_transfer(EVEN, A)])
                client = Raw(server)
                assert b"1" in client.link.ask(messages.ClearSpaces(1, b""), messages.Report).body
                assert tier.contains([A]) == [False]
                client.close()
                tier.close()

    def test_with_keys_those_whom_the_operator_names(self, tmp_path: Path) -> None:
        make_keys(tmp_path, "server")
        for name in ("admin", "engine"):
            make_keys(tmp_path / "clients", name)
        keys, listed = read_pair(tmp_path / "server.key"), read_list(tmp_path / "clients")
        with serving_tcp(keys=keys, listed=listed, operators=frozenset({"admin"})) as server:
            for name, may in (("engine", False), ("admin", True)):
                files = {
                    "client_key_file": str(tmp_path / "clients" / f"{name}.key"),
                    "server_key_file": str(tmp_path / "server.pub"),
                }
                operator = Operator(parse_server(server.url, {"timeout_s": 10.0, **files}))
                assert operator.stats()["namespaces"] == []
                if may:
                    assert operator.clear() == 0
                else:
                    with pytest.raises(TierError, match="those who run the server"):
                        operator.clear()
                operator.close()

    def test_an_engine_that_was_refused_cannot_wipe(self) -> None:
        with embedded_server() as server:
            client = Operator(parse_server(f"kvs://127.0.0.1:{server.port}", {"timeout_s": 10.0}))
            with pytest.raises(TierError, match="those who run the server"):
                client.clear()
            client.close()


class TestPins:
    def test_a_pin_ends_after_the_longest_time(self) -> None:
        with serving_ipc(pin_max_s=100.0) as server:
            hub = server.hub
            tier = open_tier(server)
            tier.put([make_transfer(EVEN, A), make_transfer(EVEN, B)])
            (space_id,) = hub.stock.spaces
            client = Raw(server)
            for ref, seconds in ((A, 0), (B, 10**9)):
                asked = messages.Pin(1, space_id, messages.pack_refs([ref]), True, seconds)
                assert b"1" in client.link.ask(asked, messages.Report).body
            now_s = time.monotonic()
            ends = [chunk.pin_end_s for chunk in hub.stock.pins]
            assert all(now_s < end_s <= now_s + 100 for end_s in ends)
            hub.stock.pins.expire(max(ends) - 1)
            hub.stock.pins.expire(max(ends))
            assert hub.stock.pinned_bytes == 0
            client.close()
            tier.close()

    def test_the_server_ends_them_by_itself(self) -> None:
        with serving_ipc(pin_max_s=1.0) as server:
            tier = open_tier(server)
            tier.put([make_transfer(EVEN, A)])
            client = Raw(server)
            (space_id,) = server.hub.stock.spaces
            client.link.ask(messages.Pin(1, space_id, messages.pack_refs([A]), True), messages.Report)
            wait_for("it has ended", lambda: server.hub.stock.pinned_bytes == 0)
            client.close()
            tier.close()
