"""A cache server on a machine that has no further thread for it."""

from __future__ import annotations

import pytest
from support.cache_server import serving_tcp
from support.few_threads import refuse_threads
from support.served import A, B, open_tier

from kvstore.model.chunks import Outcome
from kvstore.testing.harness import EVEN, make_transfer


def test_a_piece_for_which_there_is_no_thread_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the server, with the chunks of all clients in its memory."""
    with serving_tcp() as server:
        tier = open_tier(server.url)
        with monkeypatch.context() as patch:
            refuse_threads(patch, "kvstore-copy")
            assert tier.put([make_transfer(EVEN, A)]) == [Outcome.FAILED]
            assert tier.contains([A]) == [False]
        assert tier.put([make_transfer(EVEN, ref) for ref in (A, B)]) == [Outcome.STORED] * 2
        tier.close()
