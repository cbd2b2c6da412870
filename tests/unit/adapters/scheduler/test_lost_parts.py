"""One rank of a consumer has lost its part, and the other one waits for its own, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing

import pytest
from support.fake_parts import CHUNK
from support.gate import HANG_GUARD_S
from support.handed_over import Wire, answered, consumer, flush, producer, to
from support.redis_server import wait_for

from kvstore.handover import tcp
from kvstore.model.chunks import ChunkRef
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock

PROMPT = list(range(2 * CHUNK + 1))


def test_what_one_rank_has_refused_is_not_waited_for_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's sender hangs in its layers and stays connected, so silence would not be noticed."""
    monkeypatch.setattr(tcp, "BEAT_S", 3600.0)
    real, hangs, may_go, wire = Stock.reserve, threading.Event(), threading.Event(), Wire(shard=1)
    with closing(consumer(ranks=2)) as second, closing(producer(wire, ranks=2)) as first:
        server = second.workers[0]._server
        assert server is not None
        full = server._hub.stock

        def reserve(stock: Stock, space: Space, ref: ChunkRef, owner: bytes) -> Generator[None, None, Chunk | None]:
            return None if stock is full else (yield from real(stock, space, ref, owner))

        def hang() -> None:
            hangs.set()
            assert may_go.wait(HANG_GUARD_S)

        monkeypatch.setattr(Stock, "reserve", reserve)
        wire.before_layers = hang
        asked = first.add("one", PROMPT, handover=to(second))
        first.run()
        assert hangs.wait(HANG_GUARD_S)
        request = second.add("one", PROMPT, handover=answered(asked))
        second.run()
        assert request.state == "finished"
        assert second.loaded_tokens["one"] == 0
        assert second.scheduler._handovers.waits.timeouts == 0
        may_go.set()
        flush(first)
        first.settle()
        wait_for("nothing is leased", lambda: not server._hub.sessions.num_leases)
