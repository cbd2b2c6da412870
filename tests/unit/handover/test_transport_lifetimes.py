"""A chunk is handed over with the end of its time to live, or not at all."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np
import pytest
from support.cache_server import ServerThread, serving_tcp

from kvstore.handover.tcp import open_transport
from kvstore.handover.transport import Parcel
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.tiers.server.connection import ServerConnection

LAYOUT = KVLayout((4096, 8192, 4096), planes=2, block_tokens=16, chunk_tokens=64)
REFS = [ChunkRef(number.to_bytes(16, "big"), 4) for number in (1, 2)]


def hand_over(server: ServerThread) -> list[Outcome]:
    """Hand over a chunk with a time to live, and one without."""
    payload = np.zeros(LAYOUT.payload_bytes(4), np.uint8)
    parcels = [Parcel(REFS[0], payload, until_s=time.time() + 600), Parcel(REFS[1], payload)]
    with closing(open_transport(server.url, Namespace({"model": "mine"}), LAYOUT, {"timeout_s": 10.0})) as transport:
        return transport.deliver(parcels, iter([range(2), range(2, 3)]))


def test_the_receiver_knows_the_end() -> None:
    with serving_tcp() as server:
        assert hand_over(server) == [Outcome.STORED] * 2
        (space,) = server.hub.stock.spaces.values()
        first, second = (space.chunks[ref].until_s for ref in REFS)
        assert second is None
        assert first is not None
        assert 590 < first - time.monotonic() <= 600


def test_an_older_receiver_gets_no_chunk_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", messages.ENDS_VERSION - 1)
    say_hello = ServerConnection.hello

    def hello(connection: ServerConnection, *arguments: object) -> object:
        connection.version = messages.ENDS_VERSION
        return say_hello(connection, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerConnection, "hello", hello)
    with serving_tcp() as server:
        assert hand_over(server) == [Outcome.FULL, Outcome.STORED]
        (space,) = server.hub.stock.spaces.values()
        assert list(space.chunks) == REFS[1:]
