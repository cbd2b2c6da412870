"""Tests of processes that hand over by NIXL, and are killed, frozen and started again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from support.channel_ends import LAYOUT, NUM_CHUNKS, End, open_receiver, payload_of, ref_of
from support.redis_server import wait_for

from kvstore.channels.base import State
from kvstore.server import offers
from kvstore.server.embedded import EmbeddedServer
from kvstore.testing.harness import MINE
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tools.processes import free_port

nixl = pytest.importorskip("kvstore.channels.nixl", reason="needs NIXL: the extra `nixl`", exc_type=ImportError)
pytestmark = pytest.mark.slow

CHUNK_BYTES = LAYOUT.payload_bytes(4)
ALL = str(["stored"] * NUM_CHUNKS)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with closing(open_receiver("nixl")) as server:
        yield server


def stats(server: EmbeddedServer) -> dict[str, Any]:
    return server.stats(30.0)


def used_bytes(server: EmbeddedServer) -> int:
    used: int = stats(server)["tiers"]["memory"]["used_bytes"]
    return used


def sending(server: EmbeddedServer, first: int, **environment: str) -> End:
    return End("sender", "nixl", f"kvs://127.0.0.1:{server.port}", first, **environment)


def hand_over(sender: End) -> str:
    for _ in range(2):
        sender.go()
    assert sender.says() == "half"
    return sender.says()


def require(url: str, *numbers: int) -> None:
    with closing(open_tier("server", TierSetup(MINE, LAYOUT, UNBOUNDED_BYTES, {"url": url}))) as tier:
        for number in numbers:
            buffer = np.zeros(LAYOUT.slot_bytes, np.uint8)
            assert [outcome.value for outcome in tier.get([Transfer(ref_of(number), buffer)])] == ["hit"]
            assert np.array_equal(buffer[:CHUNK_BYTES], payload_of(number))


def test_bytes_go_by_nixl(server: EmbeddedServer) -> None:
    with sending(server, 0) as sender:
        assert sender.says() == "ready"
        assert hand_over(sender) == f"{ALL} {NUM_CHUNKS * CHUNK_BYTES}"
    assert stats(server)["channel"]["read_bytes"] == NUM_CHUNKS * CHUNK_BYTES
    require(server.url, *range(NUM_CHUNKS))


def test_a_sender_is_killed(server: EmbeddedServer) -> None:
    """Its unfinished chunks are forgotten, its memory is detached, and the next sender is served."""
    with sending(server, 0) as sender:
        assert sender.says() == "ready"
        sender.go()
        assert sender.says() == "half"
        assert used_bytes(server) > 0
        sender.kill()
    wait_for("nothing of it is left", lambda: used_bytes(server) == 0)
    wait_for("its memory is let go of", lambda: stats(server)["channel"]["attached"] == 0)
    with sending(server, 0) as sender:
        assert sender.says() == "ready"
        assert hand_over(sender) == f"{ALL} {NUM_CHUNKS * CHUNK_BYTES}"
    require(server.url, *range(NUM_CHUNKS))


def test_a_receiver_is_killed_and_started_again() -> None:
    port = free_port()
    with End("receiver", "nixl", port) as receiver:
        assert receiver.says() == str(port)
        with End("sender", "nixl", f"kvs://127.0.0.1:{port}", 0) as sender:
            assert sender.says() == "ready"
            assert hand_over(sender).startswith(ALL)
            sender.go()
            assert sender.says() == "half"
            receiver.kill()
            sender.go()
            assert sender.says().startswith("failed")
            with End("receiver", "nixl", port) as successor:
                assert successor.says() == str(port)
                sender.go()
                assert hand_over(sender) == f"{ALL} {2 * NUM_CHUNKS * CHUNK_BYTES}"
                require(f"kvs://127.0.0.1:{port}", NUM_CHUNKS, NUM_CHUNKS + 1)


def test_a_sender_that_does_nothing_for_reads_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """With only TCP in UCX, reads need the sender's processor. They are given up, but may still write.

    So their pages are not reused before UCX says that they have ended.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(offers, "READ_S", 1.0)
    with closing(open_receiver("nixl")) as server:
        url = f"kvs://127.0.0.1:{server.port}"
        with End("lazy-sender", "nixl", url, 0) as sender:
            assert sender.says() == "ready"
            sender.go()
            assert sender.says() == "half"
            sender.go()
            assert sender.says() == f"{['failed'] * NUM_CHUNKS} 0"
            assert (stats(server)["leases"], stats(server)["channel"]["read_bytes"]) == (0, 0)
            assert used_bytes(server) == NUM_CHUNKS * LAYOUT.slot_bytes
            sender.go()
            wait_for("what was under way has ended", lambda: used_bytes(server) == 0)


def test_a_sender_dies_before_it_has_answered_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with closing(open_receiver("nixl")) as server:
        with End("lazy-sender", "nixl", f"kvs://127.0.0.1:{server.port}", 0) as sender:
            assert sender.says() == "ready"
            sender.go()
            wait_for("reads are under way", lambda: used_bytes(server) > 0)
        wait_for("nothing of it is left", lambda: used_bytes(server) == 0)
        with sending(server, 0) as another:
            assert another.says() == "ready"
            assert hand_over(another) == f"{ALL} {NUM_CHUNKS * CHUNK_BYTES}"
        require(server.url, *range(NUM_CHUNKS))


def test_a_read_that_nixl_no_longer_knows_may_still_write() -> None:
    """Its end is unknown, so it is not reported as ended, and its pages stay in use until the channel is closed."""
    with closing(nixl.NixlChannel()) as here, closing(nixl.NixlChannel()) as there:
        target, source = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
        here.register(target)
        there.register(source)
        peer = here.attach(there.describe())
        with there.serving():
            reading = here.read(peer, 0, [target])
            here._agent.remove_remote_agent(peer)
            state = here.look(reading)
        assert state in {State.PENDING, State.DONE}
