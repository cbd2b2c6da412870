"""Leading blocks of chunks that other engines hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.divided import Worker
from support.rig import FakeTier

from kvstore.engine.opening import open_remote
from kvstore.engine.options import RemoteOptions
from kvstore.model.chunks import Outcome
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_ref, make_transfer
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.peer_watch import PeerWatch
from kvstore.tiers.peers import PeersTier

REF = make_ref(1)
PEER, SOURCE = "kvs://peer:1", "kvs://source:1"


class Engine(FakeTier):
    """Engine that has the chunk and records questions, but sends no leading blocks alone."""

    def __init__(self, *, reads_fronts: bool, holds: bool = True) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self._reads_fronts = reads_fronts
        self.asked: list[int] = []
        if holds:
            self.put([make_transfer(EVEN, REF)])

    @property
    def reads_fronts(self) -> bool:
        return self._reads_fronts

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self.asked += [transfer.front_blocks for transfer in transfers]
        return [Outcome.HIT if transfer.ref in self.chunks else Outcome.MISS for transfer in transfers]


def front() -> Transfer:
    return Transfer(REF, make_buffer(EVEN.slot_bytes), front_blocks=1)


@contextmanager
def opened(own: Tier | None, **engines: Engine) -> Iterator[PeersTier]:
    others = {PEER: engines.get("peer"), SOURCE: engines.get("source")}

    def open_peer(url: str, _: Namespace) -> Tier:
        engine = others[url]
        assert engine is not None
        return engine

    peers, sources = ([url] if others[url] else [] for url in (PEER, SOURCE))
    with closing(PeersTier(own, peers, open_peer, MINE, EVEN, sources=sources)) as tier:
        yield tier


def test_they_are_read_where_all_can_bring_them_alone() -> None:
    own, peer = Engine(reads_fronts=True, holds=False), Engine(reads_fronts=True)
    with opened(own, peer=peer) as tier:
        assert tier.reads_fronts
        assert tier.get([front()]) == [Outcome.HIT]
        assert (own.asked, peer.asked) == ([1], [1])
        assert tier.counters.bytes_read == EVEN.payload_bytes(1)


@pytest.mark.parametrize("is_own", [True, False])
def test_one_that_cannot_bring_them_is_enough_to_refuse(*, is_own: bool) -> None:
    able, unable = Engine(reads_fronts=True), Engine(reads_fronts=False)
    with opened(unable if is_own else able, peer=able if is_own else unable) as tier:
        assert not tier.reads_fronts
        with pytest.raises(InvalidCallError, match="leading blocks"):
            tier.get([front()])
        assert not able.asked
        assert not unable.asked


def test_a_source_that_cannot_bring_them_does_not_have_them() -> None:
    """It is known only when a request names it."""
    source = Engine(reads_fronts=False)
    with opened(None, source=source) as tier:
        tier.read_from(SOURCE, [REF])
        assert tier.get([front()]) == [Outcome.MISS]
        assert not source.asked


@pytest.mark.parametrize("found_read_fronts", [True, False])
def test_callers_plan_by_an_ability_that_does_not_change_when_peers_come(*, found_read_fronts: bool) -> None:
    """A peer that cannot bring them does not have them; one that can does."""
    unable, able = Engine(reads_fronts=False), Engine(reads_fronts=True)
    watch: Any = Mock(spec=PeerWatch)
    engines = {PEER: unable, SOURCE: able}
    found = PeersTier(
        None, [], lambda url, _: engines[url], MINE, EVEN, watch=watch, found_read_fronts=found_read_fronts
    )
    with closing(found) as tier:
        (change,) = watch.start.call_args.args
        for urls in ([], [PEER], [PEER, SOURCE], [SOURCE]):
            change(urls)
            assert tier.reads_fronts is found_read_fronts
        if found_read_fronts:
            change([PEER])
            assert tier.get([front()]) == [Outcome.MISS]
            change([PEER, SOURCE])
            assert tier.get([front()]) == [Outcome.HIT]
        assert not unable.asked


@pytest.mark.parametrize("is_divided", [True, False])
def test_where_a_peer_may_come_that_cannot_bring_them_they_are_not_asked_for(
    tmp_path: Path, *, is_divided: bool
) -> None:
    """An engine plans by what it finds at start, when peers of other tensor-parallel sizes may not be there yet."""
    peers = tmp_path / "peers"
    peers.write_text("")
    worker = Worker(0, 2)
    divisions = (worker.division(4),) if is_divided else ()
    options = RemoteOptions(None, peers=(), divisions=divisions, watched_peers=(f"kvs+file://{peers}",))
    with closing(open_remote(worker.namespace, worker.paged.layout, options, 5.0)) as tier:
        assert tier.reads_fronts is not is_divided
