"""Tests of reads from other engines over real sockets, with peers that die, freeze, recover or are strangers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from support.cache_server import ServerProcess, short_folder
from support.checks import check_idle
from support.name_server import NameServer
from support.redis_server import wait_for
from support.rig import NAMESPACE, Rig, tokens_of

from kvstore.engine import opening
from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import RemoteOptions
from kvstore.model.keys import Namespace
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.tiers import peer_watch
from kvstore.tiers.guards import BreakerState, CircuitBreaker, find
from kvstore.tiers.peers import PeersTier
from kvstore.tools.processes import free_port

TOKENS = tokens_of(1, 40)
OTHERS = tokens_of(2, 40)
WAIT_S = 30.0
SETTINGS = {"timeout_s": 2.0}


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def peers() -> Iterator[list[ServerProcess]]:
    """Yield two servers as processes, each with a TCP port."""
    with ExitStack() as opened:
        servers = []
        for _ in range(2):
            server = ServerProcess(opened.enter_context(short_folder()), port=free_port())
            opened.callback(server.kill)
            servers.append(server.start())
        yield servers


def embedded(rig: Rig, namespace: Namespace = NAMESPACE) -> EmbeddedServer:
    return EmbeddedServer(namespace, rig.layout, EmbeddedOptions(16 << 20, "127.0.0.1", 0))


def storing_at(url: str) -> RemoteOptions:
    return RemoteOptions(url, SETTINGS, max_queue=64)


def reading_from(*urls: str, url: str | None = None, **others: float) -> RemoteOptions:
    options = {"hold_s": 0.2, "lookup_timeout_s": 10.0, "max_queue": 64, **others}
    return RemoteOptions(url, peers=urls, peer_settings=SETTINGS, **options)  # type: ignore[arg-type]


def fill(rig: Rig, url: str, tokens: list[int]) -> None:
    """Let an engine store its chunks at a server."""
    with rig.open(remote=storing_at(url)) as engine:
        assert rig.store(engine, tokens) == len(tokens)
        assert engine.flush(WAIT_S)
        check_idle(engine)


def breaker_of(engine: CacheEngine, number: int) -> CircuitBreaker:
    """Return the breaker of a peer, on the reading side."""
    assert engine._planner.directory is not None
    with_peers = find(engine._planner.directory._tiers[0], PeersTier)
    assert with_peers is not None
    breaker = find(with_peers.parts[number], CircuitBreaker)
    assert breaker is not None
    return breaker


@pytest.mark.parametrize("layerwise", [False, True])
def test_an_engine_reads_what_another_has_computed(rig: Rig, *, layerwise: bool) -> None:
    server = embedded(rig)
    try:
        fill(rig, server.url, TOKENS)
        with rig.open(remote=reading_from(f"kvs://127.0.0.1:{server.port}"), local_cpu=False) as engine:
            assert engine.lookup(TOKENS) == 40
            rig.poison()
            blocks = rig.blocks(40, seed=7)
            mapping = rig.slot_mapping(blocks, 40)
            if layerwise:
                *_, loaded = engine.retrieve_layer(TOKENS, slot_mapping=mapping)
            else:
                loaded = engine.retrieve(TOKENS, slot_mapping=mapping)
            assert loaded is not None
            assert int(loaded.sum()) == 40
            rig.check(TOKENS, blocks, 0, 40)
            rig.store(engine, OTHERS)
            assert engine.flush(WAIT_S)
            assert engine.stats().index.sends_done == engine.stats().index.sends_failed == 0
            check_idle(engine)
        with rig.open(remote=storing_at(server.url)) as engine:
            assert engine.lookup(OTHERS) == 0, "nothing is sent to peers"
            assert engine.lookup(TOKENS) == 40
    finally:
        server.close()


def test_peers_that_dns_names_come_and_go(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is added, one is killed: its chunks are misses, and those of the other are read."""
    monkeypatch.setattr(peer_watch, "LOOK_INTERVAL_S", (0.02, 0.02))
    port = free_port()
    with ExitStack() as running:
        names = running.enter_context(NameServer({"engines": []}))

        def start(host: str) -> EmbeddedServer:
            server = EmbeddedServer(NAMESPACE, rig.layout, EmbeddedOptions(16 << 20, host, port))
            running.callback(server.close)
            return server

        first, second = start("127.0.0.1"), start("127.0.0.2")
        fill(rig, first.url, TOKENS)
        fill(rig, second.url, OTHERS)
        url = f"kvs+dns://engines:{port}?nameserver=127.0.0.1:{names.port}"
        remote = replace(reading_from(), watched_peers=(url,), own_place=("127.0.0.3", port))
        engine = running.enter_context(rig.open(remote=remote, local_cpu=False))
        assert engine.lookup(TOKENS) == 0
        names.records["engines"] = ["127.0.0.1", "127.0.0.3"]
        wait_for("the first is found", lambda: engine.lookup(TOKENS) == 40)
        names.records["engines"] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        wait_for("the second is found", lambda: engine.lookup(OTHERS) == 40)
        first.close()
        blocks = rig.blocks(40, seed=7)
        rig.poison()
        loaded = engine.retrieve(TOKENS, slot_mapping=rig.slot_mapping(blocks, 40))
        assert int(loaded.sum()) == 0, "it was found at a peer that has ended"
        loaded = engine.retrieve(OTHERS, slot_mapping=rig.slot_mapping(blocks, 40))
        assert int(loaded.sum()) == 40
        rig.check(OTHERS, blocks, 0, 40)
        check_idle(engine)


def test_beside_a_server_of_its_own(rig: Rig, peers: list[ServerProcess]) -> None:
    """The engine stores to its server, and loads from the peer only the chunks that its server lacks."""
    mine, other = peers
    fill(rig, other.url, TOKENS)
    with rig.open(remote=reading_from(other.tcp_url, url=mine.url), local_cpu=False) as engine:
        assert rig.store(engine, OTHERS) == 40
        assert engine.flush(WAIT_S)
        assert rig.retrieve(engine, OTHERS) == 40
        assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)
    with rig.open(remote=storing_at(mine.url)) as engine:
        assert engine.lookup(OTHERS) == 40


def test_a_frozen_peer_costs_one_deadline_and_the_others_go_on(
    rig: Rig, peers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PROBE_INTERVAL_S", 1000.0)
    frozen, alive = peers
    fill(rig, frozen.url, OTHERS)
    fill(rig, alive.url, TOKENS)
    options = reading_from(frozen.tcp_url, alive.tcp_url, lookup_timeout_s=0.5)
    with rig.open(remote=options, local_cpu=False) as engine:
        assert rig.retrieve(engine, OTHERS) == 40
        frozen.freeze()
        for _ in range(3):
            assert engine.lookup(tokens_of(3, 40)) == 0
            assert rig.retrieve(engine, TOKENS) == 40
            assert rig.retrieve(engine, OTHERS) == 0
        assert breaker_of(engine, 0).state is BreakerState.OPEN
        assert breaker_of(engine, 1).state is BreakerState.CLOSED
        check_idle(engine)
        frozen.thaw()


def test_a_peer_that_dies_is_done_without_and_found_again(
    rig: Rig, peers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written to a peer, so a lookup must detect that it is back."""
    monkeypatch.setattr(opening, "PROBE_INTERVAL_S", 0.2)
    mortal, alive = peers
    fill(rig, mortal.url, OTHERS)
    fill(rig, alive.url, TOKENS)
    with rig.open(remote=reading_from(mortal.tcp_url, alive.tcp_url), local_cpu=False) as engine:
        assert rig.retrieve(engine, OTHERS) == 40
        mortal.kill()
        assert rig.retrieve(engine, OTHERS) == 0
        assert rig.retrieve(engine, TOKENS) == 40
        mortal.start()
        fill(rig, mortal.url, OTHERS)
        wait_for("the peer is found again", lambda: rig.retrieve(engine, OTHERS) == 40)
        check_idle(engine)
    said = [record for record in caplog.records if "is left out" in record.getMessage()]
    assert len(said) <= 2, "once by those who ask, and once by those who read"


def test_a_stranger_is_not_used_and_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    other = Namespace({**NAMESPACE.fields, "model": "another", "dtype": "fp8"})
    server = embedded(rig, other)
    address = f"127.0.0.1:{server.port}"
    try:
        with caplog.at_level(logging.WARNING), rig.open(remote=reading_from(f"kvs://{address}")) as engine:
            for _ in range(3):
                assert engine.lookup(TOKENS) == 0
            assert rig.store(engine, TOKENS) == 40
            assert rig.retrieve(engine, TOKENS) == 40
            check_idle(engine)
    finally:
        server.close()
    said = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(said) == 1
    assert "they differ in dtype, model" in said[0]
    assert address in said[0], "or nobody knows which peer it is about"
