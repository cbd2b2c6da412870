"""Connections to a cache server that are closed while one of them is in use."""

from __future__ import annotations

import threading

import pytest
from support.cache_server import serving_tcp
from support.gate import HANG_GUARD_S, Gate
from support.served import A, open_tier

from kvstore.chunks import Outcome
from kvstore.testing.harness import EVEN, make_transfer
from kvstore.tiers.server import links


@pytest.mark.parametrize("is_stuck", [False, True])
def test_the_last_use_ends_the_context(is_stuck: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_CLOSE_WAIT_S", -10.0)  # wait for nobody
    gate = Gate()
    with serving_tcp() as server:
        tier = open_tier(server.url)
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        connections, context = tier._links, tier._links._context
        user = threading.Thread(target=connections.use, args=(lambda _: gate(),))
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
