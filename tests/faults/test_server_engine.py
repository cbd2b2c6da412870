"""Tests of engines over a real cache server: shared chunks, also by layer, a start without it, and its return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from support.cache_server import ServerProcess, ServerThread, mapped_pools, serving_ipc, serving_tcp, short_folder
from support.checks import check_idle, check_return
from support.redis_server import wait_for
from support.rig import CHUNK, Rig, tokens_of

from kvstore.engine import opening
from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import RemoteOptions
from kvstore.memory.slabs import LabelledPool
from kvstore.model.errors import ConfigError, TierError
from kvstore.transfer.borrowing import BATCH

TOKENS = tokens_of(1, 40)
LONG = tokens_of(3, 20 * CHUNK)
WAIT_S = 30.0


@pytest.fixture
def rig() -> Rig:
    return Rig(num_blocks=128)


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
    """Neither this engine nor another finds chunks of other weights."""
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


def hits_again(rig: Rig, engine: CacheEngine) -> bool:
    """Store the chunks lost meanwhile, and return True if all are there."""
    rig.store(engine, LONG)
    return bool(engine.flush(WAIT_S)) and rig.retrieve(engine, LONG) == len(LONG)


class TestPassage:
    """Tests of loads without a CPU tier, which read straight from the server's pages."""

    @pytest.fixture
    def stored(self, rig: Rig) -> Iterator[ServerThread]:
        with serving_ipc() as server:
            with rig.open(remote=options_of(server.url), local_cpu=False, slots=32) as engine:
                assert rig.store(engine, LONG) == len(LONG)
                assert engine.flush(WAIT_S)
            yield server

    def test_nothing_goes_through_a_slot(self, rig: Rig, stored: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LabelledPool, "claim", None)
        with rig.open(remote=options_of(stored.url), local_cpu=False, slots=32) as engine:
            for skip in (0, 20, 100):
                assert rig.retrieve(engine, LONG, skip) == len(LONG) - skip
            assert engine.stats().mover.chunks_loaded_from_remote > len(LONG) // CHUNK
            check_idle(engine)
        wait_for("all is given back", lambda: stored.hub.sessions.num_leases == 0)

    def test_what_stays_in_memory_still_goes_there(self, rig: Rig, stored: ServerThread) -> None:
        with rig.open(remote=options_of(stored.url), slots=32) as engine:
            for _ in range(2):
                assert rig.retrieve(engine, LONG) == len(LONG)
            assert engine.stats().mover.chunks_loaded_from_remote == len(LONG) // CHUNK

    def test_layer_by_layer_and_at_once(self, rig: Rig, stored: ServerThread) -> None:
        """A load at once runs between two layers of another load of the same chunks, which has them in slots."""
        with rig.open(remote=options_of(stored.url), local_cpu=False, slots=32) as engine:
            rig.poison()
            slowly, at_once = rig.blocks(48, among=range(12)), rig.blocks(len(LONG), among=range(12, 128))
            loading = engine.retrieve_layer(LONG[:48], slot_mapping=rig.slot_mapping(slowly, 48))
            next(loading)
            assert int(engine.retrieve(LONG, slot_mapping=rig.slot_mapping(at_once, len(LONG))).sum()) == len(LONG)
            *_, loaded = loading
            assert loaded is not None
            assert int(loaded.sum()) == 48
            rig.check(LONG, slowly, 0, 48)
            rig.check(LONG, at_once, 0, len(LONG))
            check_idle(engine)

    def test_a_scatter_that_raises(self, rig: Rig, stored: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
        with rig.open(remote=options_of(stored.url), local_cpu=False, slots=32) as engine:
            scatter, calls = engine._mover.paged.scatter, count()

            def breaks(*arguments: Any) -> None:
                if next(calls) == 2:
                    raise ZeroDivisionError
                scatter(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(engine._mover.paged, "scatter", breaks)
                with pytest.raises(ZeroDivisionError):
                    rig.retrieve(engine, LONG)
            wait_for("all is given back", lambda: stored.hub.sessions.num_leases == 0)
            wait_for("it is asked again", lambda: rig.retrieve(engine, LONG) == len(LONG))
            check_idle(engine)

    @pytest.mark.parametrize("deadly", ["kill", "freeze"])
    def test_a_server_that_goes_in_the_middle(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, deadly: str) -> None:
        """Lent chunks stay right, the others are missing, and all works again once the server is back."""
        monkeypatch.setattr(opening, "PROBE_INTERVAL_S", 0.2)
        before = mapped_pools()
        with short_folder() as folder:
            server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 0.1\n").start()
            remote = replace(options_of(server.url), settings={"timeout_s": 1.0})
            try:
                with rig.open(remote=remote, local_cpu=False, slots=32) as engine:
                    assert rig.store(engine, LONG) == len(LONG)
                    assert engine.flush(WAIT_S)
                    assert rig.retrieve(engine, LONG) == len(LONG)
                    scatter, calls = engine._mover.paged.scatter, count()

                    def dies(*arguments: Any) -> None:
                        if next(calls) == 1:
                            getattr(server, deadly)()
                        scatter(*arguments)

                    with monkeypatch.context() as patch:
                        patch.setattr(engine._mover.paged, "scatter", dies)
                        assert rig.retrieve(engine, LONG) >= BATCH * CHUNK
                    server.kill()
                    server.start()
                    wait_for("all hits again", partial(hits_again, rig, engine))
                    check_idle(engine)
            finally:
                server.kill()
        assert mapped_pools() <= before


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
    """The engine logs one warning, works without the server, and then with it."""
    monkeypatch.setattr(opening, "PROBE_INTERVAL_S", 0.2)
    with short_folder() as folder:
        server = ServerProcess(folder)
        check_return(rig, caplog, options_of(server.url), server.start)
        server.kill()
