"""Uses of chunks at a cache server: lookups for prompts, and not the questions of engines that may send chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.cache_server import ServerThread, serving_tcp
from support.redis_server import wait_for
from support.served import A, B, open_tier

from kvstore.model.chunks import Outcome
from kvstore.model.layout import round_up
from kvstore.protocol import messages
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.spaces import SpaceCounters
from kvstore.testing.harness import EVEN, MINE, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup
from kvstore.tiers.guards import GuardOptions, guarded
from kvstore.tiers.members.tier import MembersTier
from kvstore.tiers.peers import PeersTier

C = make_ref(77, EVEN.blocks_per_chunk)


def counters(server: ServerThread) -> SpaceCounters:
    (space,) = server.hub.stock.spaces.values()
    return space.counters


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with serving_tcp() as serving:
        yield serving


def members(url: str) -> Tier:
    return MembersTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": url}))


WAYS: dict[str, Callable[[str], Tier]] = {
    "alone": open_tier,
    "guarded": lambda url: guarded(open_tier(url), GuardOptions(timeout_s=10.0)),
    "own beside peers": lambda url: PeersTier(open_tier(url), (), lambda *_: open_tier(url), MINE, EVEN),
    "peer": lambda url: PeersTier(None, ["peer"], lambda *_: open_tier(url), MINE, EVEN),
    "members": members,
}


@pytest.mark.parametrize("way", WAYS)
def test_only_lookups_for_prompts_are_uses(server: ServerThread, way: str) -> None:
    writer = open_tier(server.url)
    assert writer.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
    tier = WAYS[way](server.url)
    assert tier.contains([A]) == [True]
    assert counters(server) == SpaceCounters(stored_chunks=1, stored_bytes=counters(server).stored_bytes)
    assert list(tier.look([A, B])) == [True, False]
    told = counters(server)
    assert (told.lookups, told.found_chunks) == (1, 1)
    tier.close()
    writer.close()


def test_a_chunk_that_is_only_asked_for_goes_first() -> None:
    with serving_tcp(pool_bytes=2 * round_up(EVEN.slot_bytes, PAGE_BYTES), policy="LRU") as server:
        tier = open_tier(server.url)
        for ask, gone in ((tier.contains, A), (tier.look, B)):
            assert tier.put([make_transfer(EVEN, ref) for ref in (A, B)]) == [Outcome.STORED] * 2
            assert list(ask([A])) == [True]
            wait_for("the policies hear of it", lambda: not server.hub.service.has_leisure_work)
            assert tier.put([make_transfer(EVEN, C)]) == [Outcome.STORED]
            assert tier.contains([A, B, C]) == [ref != gone for ref in (A, B, C)]
            tier.remove([A, B, C])
        tier.close()


def test_older_servers_are_asked_by_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.service.messages.PROTOCOL_VERSION", 5)
    with serving_tcp() as server:
        monkeypatch.setattr(messages, "PROTOCOL_VERSION", 5)
        tier = open_tier(server.url)
        assert tier.contains([A]) == [False]
        assert counters(server).lookups == 1
        tier.close()
