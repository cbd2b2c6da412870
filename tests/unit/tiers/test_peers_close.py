"""A peers tier that closes in the middle of lookups."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate, until
from support.rig import FakeTier

from kvstore.model.chunks import Presence
from kvstore.model.errors import ClosedError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, MINE, make_ref
from kvstore.tiers.peers import PeersTier

if TYPE_CHECKING:
    from kvstore.model.chunks import ChunkRef


def test_lookups_that_wait_for_a_thread_end_with_it(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or their threads, and with them the process, would never end."""

    class Hanging(FakeTier):
        def look(self, refs: Sequence[ChunkRef]) -> Sequence[Presence | None]:
            gate()
            return [False] * len(refs)

    monkeypatch.setattr("kvstore.tiers.peers._MAX_ASKING", 1)
    tier = PeersTier(None, ["peer"], lambda *_: Hanging(), MINE, EVEN)
    ended: list[type[BaseException]] = []

    def look() -> None:
        with pytest.raises(ClosedError) as error:
            tier.look([make_ref(1)])
        ended.append(error.type)

    asking = [threading.Thread(target=look, daemon=True) for _ in range(3)]
    for thread in asking:
        thread.start()
    assert until(lambda: tier._askers._work_queue.qsize() == 2)
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    assert until(lambda: tier._is_closed)
    gate.open()
    for thread in (closing, *asking):
        thread.join(HANG_GUARD_S)
    assert ended == [ClosedError] * 3


def test_the_own_tier_is_reset_where_no_thread_closes_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    own, new = FakeTier(), Namespace({"model": "new"})
    tier = PeersTier(own, ["peer"], lambda *_: FakeTier(), MINE, EVEN)
    with monkeypatch.context() as patch:
        refuse_threads(patch, "kvstore-close")
        with pytest.raises(RuntimeError, match="new thread"):
            tier.reset(new)
    assert own.namespaces == [new]
    tier.close()
