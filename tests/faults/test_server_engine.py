"""Engines over a real cache server: shared chunks, layer by layer too, a start without it, and its return."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
from support.cache_server import ServerProcess, ServerThread, serving_ipc, serving_tcp, short_folder
from support.checks import check_idle
from support.rig import Rig, tokens_of

from kvstore import opening
from kvstore.errors import ConfigError, TierError
from kvstore.opening import RemoteOptions

TOKENS = tokens_of(1, 40)
WAIT_S = 30.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture(params=["mapped", "framed"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with serving_ipc() if request.param == "mapped" else serving_tcp() as server:
        yield server


def options_of(url: str, **others: object) -> RemoteOptions:
    return RemoteOptions(url, {"timeout_s": 5.0}, hold_s=0.2, max_queue=64, **others)  # type: ignore[arg-type]


def test_engines_share_what_one_has_computed(rig: Rig, server: ServerThread) -> None:
    with rig.open(remote=options_of(server.url)) as engine:
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(WAIT_S)
        check_idle(engine)
    with rig.open(remote=options_of(server.url)) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.clear(TOKENS) == 3
    with rig.open(remote=options_of(server.url)) as engine:
        assert engine.lookup(TOKENS) == 0


def test_layer_by_layer(rig: Rig, server: ServerThread) -> None:
    with rig.open(remote=options_of(server.url)) as engine:
        mapping = rig.compute(TOKENS, rig.blocks(40))
        *_, stored = engine.store_layer(TOKENS, slot_mapping=mapping)
        assert stored == 40
        assert engine.flush(WAIT_S)
    with rig.open(remote=options_of(server.url)) as engine:
        rig.poison()
        blocks = rig.blocks(40, seed=7)
        *_, loaded = engine.retrieve_layer(TOKENS, slot_mapping=rig.slot_mapping(blocks, 40))
        assert loaded is not None
        assert int(loaded.sum()) == 40
        rig.check(TOKENS, blocks, 0, 40)
        check_idle(engine)


def test_reset_is_for_good(rig: Rig, server: ServerThread) -> None:
    """Neither this engine nor another finds what was stored with other weights."""
    with rig.open(remote=options_of(server.url)) as engine, rig.open(remote=options_of(server.url)) as other:
        rig.store(engine, TOKENS)
        assert engine.flush(WAIT_S)
        engine.reset_cache()
        assert engine.lookup(TOKENS) == 0
        assert rig.retrieve(other, TOKENS) == 0
        rig.store(engine, TOKENS)
        assert engine.flush(WAIT_S)
        assert rig.retrieve(engine, TOKENS) == 40
        assert rig.retrieve(other, TOKENS) == 0


def test_a_required_server_that_is_not_there(rig: Rig) -> None:
    with pytest.raises(TierError, match="cannot be reached"):
        rig.open(remote=options_of("kvs+ipc:///nowhere", required=True))


@pytest.mark.parametrize(
    "url", ["kvs://", "kvs://host", "kvs+ipc://host/run", "kvs://host:x", "kvs://host:1?what=2", "kvs://host:1/path"]
)
def test_urls_that_name_no_server(rig: Rig, url: str) -> None:
    with pytest.raises(ConfigError, match="cache server"):
        rig.open(remote=options_of(url))


def test_a_start_without_it_and_its_return(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, a cache that works without it, and then with it."""
    monkeypatch.setattr(opening, "PROBE_INTERVAL_S", 0.2)
    with short_folder() as folder:
        server = ServerProcess(folder)
        with caplog.at_level(logging.INFO), rig.open(remote=options_of(server.url)) as engine:
            assert "the remote tier cannot be used now" in caplog.text
            assert rig.store(engine, TOKENS) == 40
            assert rig.retrieve(engine, TOKENS) == 40
            assert engine.flush(WAIT_S)
            server.start()
            deadline_s = time.monotonic() + WAIT_S
            while not engine.stats().index.sends_done and time.monotonic() < deadline_s:
                rig.store(engine, tokens_of(2, 16))  # known by now, but not sent
                engine.flush(WAIT_S)
                time.sleep(0.1)
            assert engine.stats().index.sends_done
            check_idle(engine)
            server.kill()
