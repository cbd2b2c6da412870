"""Reads of a server from its clients' memory: what it verifies, and pages that it keeps until a read has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import EntryPoint
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.cache_server import ServerThread, serving_tcp
from support.example_channel import HeldChannel
from support.redis_server import wait_for

from kvstore import channels
from kvstore.handover import offering
from kvstore.handover.offering import Exposed, OfferingTransport, open_offering
from kvstore.handover.transport import Parcel
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import ChannelError, TierError
from kvstore.model.layout import KVLayout
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.outcomes import outcome_of
from kvstore.protocol.payload import Geometry, checksum
from kvstore.server import offers, payload
from kvstore.testing.harness import MINE
from kvstore.tiers.server import calls
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.connections import ServerConnections
from kvstore.tiers.server.url import parse_server

LAYOUT = KVLayout((1 << 18,) * 5, planes=1, block_tokens=16, chunk_tokens=64)  # a layer of a chunk has 1 MiB
REF = ChunkRef(bytes(16), 4)
POOL_BYTES = 24 << 20  # four chunks
STORED, FAILED = Outcome.STORED, Outcome.FAILED


@pytest.fixture(autouse=True)
def _channel(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("held", "support.example_channel:HeldChannel", channels.GROUP)
    monkeypatch.setattr(channels, "BUILT_IN", (entry,))
    monkeypatch.setattr(offering, "_throttle", Throttle(offering.logger))
    monkeypatch.setattr(HeldChannel, "made", [])
    monkeypatch.setattr(HeldChannel, "holds", False)
    monkeypatch.setattr(HeldChannel, "damage", None)


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with serving_tcp(pool_bytes=POOL_BYTES, channel="held") as running:
        yield running


def reading_end() -> HeldChannel:
    """Return the server's end of the channel."""
    return HeldChannel.made[0]


class Sending:
    """An engine that hands over."""

    def __init__(self, server: ServerThread, timeout_s: float = 5.0) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, 2 * LAYOUT.slot_bytes, np.uint8)
        self.channel = HeldChannel()
        self.channel.register(self.memory)
        self.exposed = Exposed(self.channel, self.memory)
        self.transport = self.connect(server, timeout_s)

    def connect(self, server: ServerThread, timeout_s: float = 5.0) -> OfferingTransport:
        return open_offering(server.url, MINE, LAYOUT, {"timeout_s": timeout_s}, self.exposed)

    def parcel(self, number: int) -> Parcel:
        return Parcel(ChunkRef(number.to_bytes(16, "big"), 4), self.memory[: LAYOUT.payload_bytes(4)])

    def deliver(self, number: int) -> list[Outcome]:
        return self.transport.deliver([self.parcel(number)], iter([range(5)]))

    def close(self) -> None:
        self.transport.close()
        self.channel.close()


@pytest.fixture
def sending(server: ServerThread) -> Iterator[Sending]:
    with closing(Sending(server)) as sending:
        yield sending


@pytest.fixture
def connection(server: ServerThread) -> Iterator[ServerConnection]:
    """Yield a client that sends whatever a test wants."""
    connections = ServerConnections(parse_server(server.url, {}), MINE, Geometry.of(LAYOUT))
    held: list[ServerConnection] = []
    _, give_back = connections.hold(held.append)
    yield held[0]
    give_back(messages.Release(held[0].new_serial(), []))
    connections.close()


def stats(server: ServerThread) -> dict[str, Any]:
    found: dict[str, Any] = server.hub.snapshot(5)
    return found


def used_bytes(server: ServerThread) -> int:
    used: int = stats(server)["tiers"]["memory"]["used_bytes"]
    return used


def flip(part: ByteArray) -> None:
    part[len(part) // 2] ^= 1


def test_what_was_damaged_on_its_way_is_not_found(
    server: ServerThread, sending: Sending, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HeldChannel, "damage", staticmethod(flip))
    assert sending.deliver(1) == [FAILED]
    assert stats(server)["channel"]["read_bytes"] == 0
    assert (used_bytes(server), sending.exposed.read_bytes) == (0, 0)
    assert sending.deliver(1) == [STORED]  # in messages: a broken channel is not tried twice over one connection
    assert sending.exposed.read_bytes == 0
    assert "a read has failed, or returned damaged bytes" in caplog.text


def test_what_was_overwritten_before_it_was_read_is_not_found(server: ServerThread, sending: Sending) -> None:
    """A sender that has given up reuses its buffer."""
    HeldChannel.holds = True
    results: list[list[Outcome]] = []
    delivering = threading.Thread(target=lambda: results.append(sending.deliver(1)))
    delivering.start()
    wait_for("reads are under way", lambda: bool(reading_end().held))
    sending.memory[:] = 0
    HeldChannel.holds = False
    reading_end().let_end()
    delivering.join(20)
    assert results == [[FAILED]]
    assert used_bytes(server) == 0


class TestPagesOfAReadThatHangs:
    @pytest.fixture(autouse=True)
    def _hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(HeldChannel, "holds", True)

    def test_they_are_kept_when_the_sender_has_gone(self, server: ServerThread) -> None:
        sending = Sending(server, timeout_s=0.3)
        with pytest.raises(TierError):
            sending.deliver(1)
        sending.close()
        wait_for("the client is gone", lambda: stats(server)["clients"] == 0)
        assert stats(server)["leases"] == 0
        assert used_bytes(server) == LAYOUT.slot_bytes  # no other chunk gets them
        assert not server.hub.stock.spaces or not any(space.chunks for space in server.hub.stock.spaces.values())
        reading_end().let_end()
        wait_for("they are free", lambda: used_bytes(server) == 0)

    def test_it_is_given_up(self, server: ServerThread, sending: Sending, monkeypatch: pytest.MonkeyPatch) -> None:
        """The sender learns it in time to continue with messages; the pages stay."""
        monkeypatch.setattr(offers, "READ_S", 0.05)
        assert sending.deliver(1) == [FAILED]
        assert used_bytes(server) == LAYOUT.slot_bytes
        assert sending.deliver(2) == [STORED]
        assert used_bytes(server) == 2 * LAYOUT.slot_bytes
        reading_end().let_end()
        wait_for("they are free", lambda: used_bytes(server) == LAYOUT.slot_bytes)

    def test_nothing_more_is_read_from_there(
        self, server: ServerThread, sending: Sending, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another connection may not read either, or each would keep more pages."""
        monkeypatch.setattr(offers, "READ_S", 0.05)
        assert sending.deliver(1) == [FAILED]
        num_held = len(reading_end().held)
        for number in (2, 3):
            with closing(sending.connect(server)) as another:
                assert another.deliver([sending.parcel(number)], iter([range(5)])) == [STORED]
        assert len(reading_end().held) == num_held
        assert sending.exposed.read_bytes == 0

    def test_who_comes_again_with_new_memory_keeps_no_more_of_them(
        self, server: ServerThread, sending: Sending, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No more memory is attached until the hung read has ended."""
        monkeypatch.setattr(offers, "READ_S", 0.05)
        for number in (1, 2):
            with closing(Sending(server)) as hanging:
                assert hanging.deliver(number) == [FAILED]
        wait_for("both are gone", lambda: stats(server)["clients"] == 0)
        assert sending.deliver(3) == [STORED]
        assert sending.exposed.read_bytes == 0
        assert len(reading_end().held) == 2
        monkeypatch.setattr(HeldChannel, "holds", False)
        reading_end().let_end()
        wait_for("they are free", lambda: used_bytes(server) == LAYOUT.slot_bytes)
        with closing(Sending(server)) as another:
            assert another.deliver(4) == [STORED]
            assert another.exposed.read_bytes == LAYOUT.payload_bytes(4)

    def test_the_server_ends(self, server: ServerThread) -> None:
        sending = Sending(server, timeout_s=0.3)
        with pytest.raises(TierError):
            sending.deliver(1)
        server.close()
        sending.close()

    def test_its_client_may_begin_another_in_its_place(
        self, server: ServerThread, sending: Sending, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise it would be disconnected for too many, and not continue with messages."""
        monkeypatch.setattr(offers, "READ_S", 0.05)
        monkeypatch.setattr(payload, "MAX_PIECES", 5)
        assert sending.deliver(1) == [FAILED]
        assert sending.deliver(2) == [STORED]
        reading_end().let_end()
        wait_for("what was late has ended", lambda: used_bytes(server) == LAYOUT.slot_bytes)
        assert sending.deliver(3) == [STORED]
        assert stats(server)["clients"] == 1


@pytest.mark.parametrize("broken", ["attach", "read", "look"])
def test_a_channel_with_a_bug_does_not_stop_the_others(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Pages of a read that may have begun are kept."""
    monkeypatch.setattr(offers, "READ_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(HeldChannel, broken, Mock(side_effect=RuntimeError("a bug")))
        with closing(Sending(server)) as sending:
            assert sending.deliver(1) == [STORED if broken == "attach" else FAILED]
            assert sending.deliver(2) == [STORED]
    with closing(Sending(server)) as another:
        assert another.deliver(3) == [STORED]
        assert another.exposed.read_bytes == LAYOUT.payload_bytes(4)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ChannelError("not promised here")])
@pytest.mark.parametrize("broken", ["look", "detach"])
def test_an_error_that_a_call_does_not_promise_ends_no_thread(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception
) -> None:
    """Only attaching and reading may be refused; the thread serves all clients."""
    monkeypatch.setattr(offers, "READ_S", 0.05)
    with monkeypatch.context() as patch:
        failing = Mock(side_effect=error)
        patch.setattr(HeldChannel, broken, failing)
        with closing(Sending(server)) as sending:
            assert sending.deliver(1) == [FAILED if broken == "look" else STORED]
        wait_for("the call was made", lambda: failing.called)
    with closing(Sending(server)) as another:
        assert another.deliver(2) == [STORED]
        assert another.exposed.read_bytes == LAYOUT.payload_bytes(4)


class TestWhatAClientMaySay:
    def attach(self, connection: ServerConnection, description: bytes, channel: str = "held") -> Outcome:
        answer = connection.ask(messages.Attach(connection.new_serial(), channel, description), messages.Done)
        return outcome_of(answer.outcomes[0])

    def offer(
        self, connection: ServerConnection, lease: int, offset: int, num_bytes: int, there: int, added_up: bytes
    ) -> Outcome:
        request = messages.Offer(connection.new_serial(), lease, offset, num_bytes, there, added_up)
        return outcome_of(connection.ask(request, messages.Done).outcomes[0])

    def lease(self, connection: ServerConnection) -> int:
        (grant,) = calls.grants(connection, messages.Reserve, [REF])
        return grant.lease

    @pytest.mark.parametrize("description", [b"", b"junk", bytes(1000)])
    def test_junk_is_not_attached(self, connection: ServerConnection, description: bytes) -> None:
        assert self.attach(connection, description) is FAILED
        assert self.offer(connection, self.lease(connection), 0, 9, 0, bytes(8)) is FAILED

    def test_another_channel(self, connection: ServerConnection, sending: Sending) -> None:
        assert self.attach(connection, sending.channel.describe(), "nixl") is FAILED

    def test_nothing_is_attached_twice(self, connection: ServerConnection, sending: Sending) -> None:
        assert self.attach(connection, sending.channel.describe()) is STORED
        with pytest.raises(TierError):
            self.attach(connection, sending.channel.describe())

    def test_memories_are_bounded(
        self, connection: ServerConnection, sending: Sending, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(offers, "_MAX_ATTACHED", 0)
        assert self.attach(connection, sending.channel.describe()) is FAILED

    def test_an_offer_without_memory(self, connection: ServerConnection) -> None:
        assert self.offer(connection, self.lease(connection), 0, 9, 0, bytes(8)) is FAILED

    def test_an_offer_without_a_lease(self, connection: ServerConnection, sending: Sending) -> None:
        self.attach(connection, sending.channel.describe())
        assert self.offer(connection, 999, 0, 9, 0, bytes(8)) is FAILED

    def test_an_offer_outside_of_its_memory(self, connection: ServerConnection, sending: Sending) -> None:
        self.attach(connection, sending.channel.describe())
        assert self.offer(connection, self.lease(connection), 0, 9, sending.memory.nbytes - 8, bytes(8)) is FAILED

    def test_an_offer_behind_its_chunk(self, connection: ServerConnection, sending: Sending) -> None:
        self.attach(connection, sending.channel.describe())
        with pytest.raises(TierError):
            self.offer(connection, self.lease(connection), LAYOUT.payload_bytes(4) - 8, 9, 0, bytes(8))

    def test_a_part_that_is_offered_twice(
        self, server: ServerThread, connection: ServerConnection, sending: Sending
    ) -> None:
        """Verified bytes must not be written again, so after that nothing of the chunk counts."""
        self.attach(connection, sending.channel.describe())
        lease, size = self.lease(connection), LAYOUT.payload_bytes(4)
        parts = [(begin, min(4 << 20, size - begin)) for begin in range(0, size, 4 << 20)]
        for begin, num_bytes in parts:
            added_up = checksum([sending.memory[begin : begin + num_bytes].data])
            assert self.offer(connection, lease, begin, num_bytes, begin, added_up) is STORED
        assert self.offer(connection, lease, 0, 9, 9, checksum([sending.memory[9:18].data])) is FAILED
        assert calls.commit(connection, [lease], is_whole=True) == [FAILED]
        wait_for("its pages are free", lambda: used_bytes(server) == 0)


def test_a_server_without_a_channel_gets_messages(caplog: pytest.LogCaptureFixture) -> None:
    with serving_tcp(pool_bytes=POOL_BYTES) as server, closing(Sending(server)) as sending:
        assert sending.deliver(1) == [STORED]
        assert sending.deliver(2) == [STORED]
        assert sending.exposed.read_bytes == 0
    assert len([record for record in caplog.records if "KV is sent to a receiver over TCP" in record.message]) == 1


def test_an_older_server_is_told_of_no_channel(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", 2)
    with closing(Sending(server)) as sending:
        assert sending.deliver(1) == [STORED]
    assert stats(server)["channel"]["attached"] == 0


def test_one_memory_of_several_clients_is_attached_once(server: ServerThread, sending: Sending) -> None:
    with closing(sending.connect(server)) as another:
        assert sending.deliver(1) == [STORED]
        assert another.deliver([sending.parcel(2)], iter([range(5)])) == [STORED]
        assert len(reading_end()._peers) == 1
    wait_for("one is gone", lambda: stats(server)["clients"] == 1)
    assert sending.deliver(3) == [STORED]
    assert sending.exposed.read_bytes == 3 * LAYOUT.payload_bytes(4)
    sending.transport.close()
    wait_for("both are gone, and so is the memory", lambda: not reading_end()._peers)
