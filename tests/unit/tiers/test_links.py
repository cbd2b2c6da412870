"""Connections to a cache server that are closed while one is in use, or for which no more files may be opened."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from support.cache_server import serving_tcp
from support.gate import HANG_GUARD_S, Gate
from support.served import A, open_tier

from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.protocol.payload import Geometry
from kvstore.testing.harness import EVEN, MINE, make_transfer
from kvstore.tiers.server import connections
from kvstore.tiers.server.connections import ServerConnections
from kvstore.tiers.server.url import parse_server


@pytest.mark.parametrize("is_stuck", [False, True])
def test_the_last_use_ends_the_context(is_stuck: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_CLOSE_WAIT_S", -10.0)  # no wait at all
    gate = Gate()
    with serving_tcp() as server:
        tier = open_tier(server.url)
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        context = tier._connections._context
        user = threading.Thread(target=tier._connections.use, args=(lambda _: gate(),))
        if is_stuck:
            user.start()
            assert gate.reached.wait(HANG_GUARD_S)
        tier.close()
        assert context.closed != is_stuck
        gate.open()
        if is_stuck:
            user.join(HANG_GUARD_S)
        assert context.closed
        tier.close()


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_cannot_be_opened_is_an_error_of_the_tier() -> None:
    """Senders and lanes expect such errors, and nothing of the connection stays."""
    with serving_tcp() as server:
        target = parse_server(server.url, {})
        with no_more_files(), pytest.raises(TierError, match="Too many open files"):
            ServerConnections(target, MINE, Geometry.of(EVEN))
        with closing(ServerConnections(target, MINE, Geometry.of(EVEN))) as opened:
            with no_more_files(), pytest.raises(TierError, match="cannot be reached"):
                opened.use(lambda _: None)
            assert opened.use(lambda connection: connection.version)
