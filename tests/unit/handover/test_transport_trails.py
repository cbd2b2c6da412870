"""A chunk is handed over with its trail, so that a receiver finds its parts without reading it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.cache_server import ServerThread, serving_tcp

from kvstore.handover.tcp import TcpTransport, open_transport
from kvstore.handover.transport import Parcel
from kvstore.model.chunks import Outcome, chunk_of
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.server.service import Service
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup
from kvstore.tiers.server.connection import ServerConnection

LAYOUT = KVLayout((4096, 8192, 4096), planes=2, block_tokens=16, chunk_tokens=64)
BIG = KVLayout((1 << 18,) * 5, planes=2, block_tokens=16, chunk_tokens=64)
MINE = Namespace({"model": "mine"})
WHOLE = [range(3)]


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with serving_tcp() as running:
        yield running


def tier_of(server: ServerThread, layout: KVLayout = LAYOUT) -> Tier:
    return open_tier("server", TierSetup(MINE, layout, UNBOUNDED_BYTES, {"url": server.url}))


def transport_of(server: ServerThread, layout: KVLayout = LAYOUT) -> TcpTransport:
    return open_transport(server.url, MINE, layout, {"timeout_s": 10.0})


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def trail(first: int, last: int, num_blocks: int = 4) -> bytes:
    """Return a trail that begins and ends with blocks of these numbers."""
    return b"".join([*map(key, range(first, first + num_blocks - 1)), key(last)])


def parcel(told: bytes, layout: KVLayout = LAYOUT, *, kept: bytes | None = None) -> Parcel:
    ref = chunk_of(told if kept is None else kept)
    payload = np.random.default_rng(told[-1]).integers(0, 256, layout.payload_bytes(ref.num_blocks), np.uint8)
    return Parcel(ref, payload, told)


def test_a_part_of_what_was_handed_over_is_found(server: ServerThread) -> None:
    transport, tier = transport_of(server), tier_of(server)
    whole, tail = trail(100, 7), trail(200, 8, num_blocks=2)
    asked = [trail(100, 99), trail(200, 99), trail(300, 99)]

    def computed() -> Iterator[range]:
        yield range(2)
        assert tier.nearest(asked) == [()] * 3, "nothing leads to what is not whole"
        yield range(2, 3)

    assert transport.deliver([parcel(whole), parcel(tail)], computed()) == [Outcome.STORED] * 2
    assert tier.nearest(asked) == [(whole,), (tail,), ()]
    tier.close()
    transport.close()


def test_nothing_leads_to_what_was_not_to_be_trusted(server: ServerThread) -> None:
    transport, tier = transport_of(server), tier_of(server)
    assert transport.deliver([parcel(trail(100, 7))], iter([range(2)])) == [Outcome.FAILED]
    assert tier.nearest([trail(100, 99)]) == [()]
    tier.close()
    transport.close()


def test_what_waited_for_room_is_found_by_its_parts_as_well() -> None:
    with serving_tcp(pool_bytes=100 << 20) as server:  # a client may be writing to a quarter of it
        transport, tier = transport_of(server, BIG), tier_of(server, BIG)
        trails = [trail(100 * number, number) for number in range(1, 7)]  # 10 MiB each
        sent = [parcel(told, BIG) for told in trails]
        assert transport.deliver(sent, iter([range(5)])) == [Outcome.STORED] * 6
        assert tier.nearest([trail(100 * number, 99) for number in range(1, 7)]) == [(told,) for told in trails]
        tier.close()
        transport.close()


def test_only_who_writes_a_chunk_describes_it(server: ServerThread) -> None:
    """A chunk that is there is not sent again, and its first trail stays."""
    transport, tier = transport_of(server), tier_of(server)
    first, second = trail(100, 7), trail(200, 7)
    for told in (first, second):
        assert transport.deliver([parcel(told)], iter(WHOLE)) == [Outcome.STORED]
    assert tier.nearest([trail(100, 99), trail(200, 99)]) == [(first,), ()]
    tier.close()
    transport.close()


@pytest.mark.parametrize("told", [b"", trail(100, 7)[16:], trail(100, 8), b"x" * 7])
def test_what_is_no_trail_of_a_chunk_is_not_told(server: ServerThread, told: bytes) -> None:
    transport, tier = transport_of(server), tier_of(server)
    sent = parcel(told or b"\0", kept=trail(100, 7))._replace(trail=told)
    assert transport.deliver([sent], iter(WHOLE)) == [Outcome.STORED]
    assert tier.contains([sent.ref]) == [True]
    assert not any(list(space.trails) for space in server.hub.stock.spaces.values())
    tier.close()
    transport.close()


def test_an_older_receiver_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown message would end the connection, and with it the hand-over."""
    asked: list[messages.Request] = []
    answer = Service._answer

    def noted(service: Service, session: object, request: messages.Request, payload: object) -> object:
        asked.append(request)
        return answer(service, session, request, payload)  # type: ignore[arg-type]

    monkeypatch.setattr(Service, "_answer", noted)
    monkeypatch.setattr("kvstore.server.service.messages.PROTOCOL_VERSION", 1)
    say_hello = ServerConnection.hello

    def hello(connection: ServerConnection, *arguments: object) -> object:
        connection.version = 2
        return say_hello(connection, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerConnection, "hello", hello)
    with serving_tcp() as server:
        transport = open_transport(server.url, MINE, LAYOUT, {"timeout_s": 10.0})
        assert transport.deliver([parcel(trail(100, 7))], iter(WHOLE)) == [Outcome.STORED]
        transport.close()
    assert any(isinstance(request, messages.Commit) for request in asked)
    assert not any(isinstance(request, messages.Describe) for request in asked)
