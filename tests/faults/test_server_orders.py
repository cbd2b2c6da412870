"""Tests of orders to a cache server: the clients that may give them, and the duration of pins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cache_server import serving_ipc, serving_tcp
from support.redis_server import wait_for
from support.served import A, B, Raw, open_tier

from kvstore.model.errors import TierError
from kvstore.protocol import messages
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.protocol.payload import Geometry
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.testing.harness import EVEN, MINE, make_transfer
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.url import parse_server


@contextmanager
def embedded_server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(MINE, EVEN, EmbeddedOptions(4 << 20, "127.0.0.1", 0))
    try:
        yield server
    finally:
        server.close()


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
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            client = Raw(server)
            with pytest.raises(TierError, match="only operators"):
                client.connection.ask(order, messages.Report)
            client.close()
            stranger = Raw(server)  # a session changes nothing
            stranger.hello(dict(MINE.fields), Geometry.of(EVEN))
            with pytest.raises(TierError, match="only operators"):
                stranger.connection.ask(order, messages.Report)
            stranger.close()
            assert tier.contains([A]) == [True]
            tier.close()

    def test_our_own_user_may_and_whoever_is_allowed_to(self) -> None:
        for serve, options in ((serving_ipc, {}), (serving_tcp, {"operators": frozenset({"*"})})):
            with serve(**options) as server:
                tier = open_tier(server.url)
                tier.put([make_transfer(EVEN, A)])
                client = Raw(server)
                assert b"1" in client.connection.ask(messages.ClearSpaces(1, b""), messages.Report).body
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
                    with pytest.raises(TierError, match="only operators"):
                        operator.clear()
                operator.close()

    def test_an_engine_that_was_refused_cannot_wipe(self) -> None:
        with embedded_server() as server:
            client = Operator(parse_server(f"kvs://127.0.0.1:{server.port}", {"timeout_s": 10.0}))
            with pytest.raises(TierError, match="only operators"):
                client.clear()
            client.close()


class TestPins:
    def test_a_pin_ends_after_the_longest_time(self) -> None:
        with serving_ipc(pin_max_s=100.0) as server:
            hub = server.hub
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A), make_transfer(EVEN, B)])
            (space_id,) = hub.stock.spaces
            client = Raw(server)
            for ref, seconds in ((A, 0), (B, 10**9)):
                asked = messages.Pin(1, space_id, messages.pack_refs([ref]), True, seconds)
                assert b"1" in client.connection.ask(asked, messages.Report).body
            now_s = time.monotonic()
            ends = [chunk.pin_end_s for chunk in hub.stock.pins]
            assert all(now_s < end_s <= now_s + 100 for end_s in ends)
            assert len(hub.stock.pins.due(max(ends))) == 2
            client.close()
            tier.close()

    def test_the_server_ends_them_by_itself(self) -> None:
        with serving_ipc(pin_max_s=1.0) as server:
            tier = open_tier(server.url)
            tier.put([make_transfer(EVEN, A)])
            client = Raw(server)
            (space_id,) = server.hub.stock.spaces
            client.connection.ask(messages.Pin(1, space_id, messages.pack_refs([A]), True), messages.Report)
            wait_for("it has ended", lambda: server.hub.stock.pins.used_bytes == 0)
            client.close()
            tier.close()
