"""Times to live in a real Redis: of what one engine stores and another loads, of all values, and of later times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.diskwork import EVEN, make_ref, make_transfer
from support.ended import check_end_for_both
from support.redis_server import RedisServer, running, wait_for
from support.redis_tiers import LARGE, PAYLOADS, WHOLE, open_redis, put_large, values
from support.rig import Rig, tokens_of

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import RemoteOptions
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention

TOKENS = tokens_of(1, 40)
WAIT_S = 30.0
A = WHOLE[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    with running(server):
        yield server


def open_engine(rig: Rig, server: RedisServer, **settings: object) -> CacheEngine:
    remote = RemoteOptions(f"redis://127.0.0.1:{server.port}", dict(settings), hold_s=0.1, max_queue=64)
    return rig.open(remote=remote)


def rests_s(server: RedisServer) -> set[int]:
    """Return the rests of all values' times to live, in seconds; -1 for none."""
    admin = server.admin()
    return {admin.ttl(key) for key in values(server)}


def test_what_another_engine_loads_ends_for_it_too(server: RedisServer) -> None:
    rig = Rig()
    with open_engine(rig, server) as first, open_engine(rig, server) as second:

        def check_gone() -> None:
            assert values(server) == {}

        check_end_for_both(rig, first, second, TOKENS, check_gone)
        assert rests_s(server) == {-1}


def test_an_engine_that_keeps_a_chunk_for_longer_tells_redis(server: RedisServer) -> None:
    rig = Rig()
    with open_engine(rig, server) as first, open_engine(rig, server) as second:
        rig.store(first, TOKENS, ttl_s=600)
        assert first.flush(WAIT_S)
        assert 0 < min(rests_s(server)) <= max(rests_s(server)) <= 600
        assert rig.retrieve(second, TOKENS) == 40
        rig.store(second, TOKENS, ttl_s=6000)
        wait_for("Redis keeps them for longer", lambda: min(rests_s(server)) > 600)  # for which no flush waits
        assert max(rests_s(server)) <= 6000
        rig.store(first, TOKENS)
        wait_for("Redis keeps them", lambda: rests_s(server) == {-1})
        rig.store(second, TOKENS, ttl_s=9000)
        assert second.flush(WAIT_S)
        assert rests_s(server) == {-1}, "it ends no more"


def test_a_time_for_all_chunks_is_no_end_of_any(server: RedisServer) -> None:
    """With ``ttl_s`` in the URL, chunks that have an end of their own stay here, and the others have none."""
    rig = Rig()
    with open_engine(rig, server, ttl_s=3) as first, open_engine(rig, server, ttl_s=3) as second:
        rig.store(first, TOKENS, ttl_s=600)
        assert first.flush(WAIT_S)
        assert values(server) == {}
        rig.store(first, TOKENS)
        assert first.flush(WAIT_S)
        assert 0 <= min(rests_s(server)) <= max(rests_s(server)) <= 3
        assert rig.retrieve(second, TOKENS) == 40
        while values(server):
            time.sleep(0.1)
        assert second.lookup(TOKENS) == 40, "its copies stay"


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_all_values_of_a_chunk_end_together(server: RedisServer, codec: str) -> None:
    tier = open_redis(f"redis://127.0.0.1:{server.port}", LARGE, codec=codec)
    end_s = time.time() + 1200
    assert tier.put([PAYLOADS[A]._replace(until_s=end_s)]) == [Outcome.STORED]
    assert len(values(server)) > 2
    assert all(1198 <= rest <= 1200 for rest in rests_s(server))
    tier.limit([Lifetime(A, end_s - 300)])
    assert all(1198 <= rest <= 1200 for rest in rests_s(server)), "a longer time stays"
    tier.limit([Lifetime(A, end_s + 300)])
    assert all(1498 <= rest <= 1500 for rest in rests_s(server))
    tier.limit([Lifetime(A, None)])
    assert rests_s(server) == {-1}
    tier.limit([Lifetime(A, end_s)])
    assert rests_s(server) == {-1}, "it ends no more"
    assert put_large(tier, A) == [Outcome.STORED]
    assert rests_s(server) == {-1}
    tier.close()


@pytest.mark.parametrize("until_s", [1.0, -1.0, float("inf")])
def test_ends_in_the_past_and_beyond_all_calendars(server: RedisServer, until_s: float) -> None:
    tier, ref = open_redis(f"redis://127.0.0.1:{server.port}"), make_ref(1)
    assert tier.put([make_transfer(ref, EVEN)._replace(until_s=until_s)]) == [Outcome.STORED]
    time.sleep(0.01)
    assert any(tier.contains([ref])) is (until_s > 1)
    tier.limit([Lifetime(ref, float("inf"))])
    assert any(tier.contains([ref])) is (until_s > 1)
    tier.close()


def test_a_server_that_is_gone_is_told_nothing(server: RedisServer) -> None:
    rig = Rig()
    with open_engine(rig, server, timeout_s=0.5, connect_timeout_s=0.5) as engine:
        rig.store(engine, TOKENS, ttl_s=600)
        assert engine.flush(WAIT_S)
        server.kill()
        rig.store(engine, TOKENS, ttl_s=6000)
        assert engine.flush(WAIT_S)
        assert rig.retrieve(engine, TOKENS) == 40


def test_only_the_disk_is_told_of_retention(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = ChunkRef(bytes(PREFIX_KEY_BYTES), 1)
    with Rig().open(local_disk=tmp_path / "disk", remote=RemoteOptions(f"redis://127.0.0.1:{server.port}")) as engine:
        engine._mover.note_times([Retention(ref, 1e9, b"")], [Lifetime(ref, 1e9)])
        assert engine.flush(WAIT_S)
    assert not caplog.records
