"""Times to live at a real cache server: of what one engine stores and another loads, of older sides, on its disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.cache_server import POOL_BYTES, ServerThread, serving_ipc, serving_tcp
from support.ended import check_end_for_both
from support.redis_server import wait_for
from support.rig import Rig, tokens_of

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import RemoteOptions
from kvstore.model.chunks import Outcome
from kvstore.model.lifetime import Lifetime
from kvstore.protocol import messages
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.testing import MINE
from kvstore.testing.harness import EVEN, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.tier import ServerTier

TOKENS = tokens_of(1, 40)
WAIT_S = 30.0
A = make_ref(1)
OLD_VERSION = messages.ENDS_VERSION - 1


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with serving_ipc() if request.param == "ipc" else serving_tcp() as server:
        yield server


def open_engine(rig: Rig, server: ServerThread) -> CacheEngine:
    return rig.open(remote=RemoteOptions(server.url, {"timeout_s": WAIT_S}, hold_s=0.1, max_queue=64))


def open_tier(server: ServerThread) -> ServerTier:
    tier = ServerTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": server.url, "timeout_s": WAIT_S}))
    tier.check()
    return tier


def ends_of(server: ServerThread) -> list[float | None]:
    """Return the ends of all chunks, in seconds from now."""
    chunks = [chunk for space in list(server.hub.stock.spaces.values()) for chunk in list(space.chunks.values())]
    now_s = time.monotonic()
    return [None if chunk.until_s is None else chunk.until_s - now_s for chunk in chunks]


def begin_as(patch: pytest.MonkeyPatch, version: int) -> None:
    """Let clients connect with a version of the protocol."""
    say_hello = ServerConnection.hello

    def hello(connection: ServerConnection, *arguments: object) -> object:
        connection.version = version
        return say_hello(connection, *arguments)  # type: ignore[arg-type]

    patch.setattr(ServerConnection, "hello", hello)


def test_what_another_engine_loads_ends_for_it_too(server: ServerThread) -> None:
    rig = Rig()
    with open_engine(rig, server) as first, open_engine(rig, server) as second:
        check_end_for_both(
            rig, first, second, TOKENS, lambda: wait_for("the server has dropped them", lambda: not ends_of(server))
        )
        assert set(ends_of(server)) == {None}


def test_an_engine_that_keeps_a_chunk_for_longer_tells_the_server(server: ServerThread) -> None:
    rig = Rig()
    with open_engine(rig, server) as first, open_engine(rig, server) as second:
        rig.store(first, TOKENS, ttl_s=600)
        assert first.flush(WAIT_S)
        assert all(end_s is not None and 500 < end_s <= 600 for end_s in ends_of(server))
        assert rig.retrieve(second, TOKENS) == 40
        rig.store(second, TOKENS, ttl_s=6000)
        wait_for("it keeps them for longer", lambda: all(end_s and end_s > 5000 for end_s in ends_of(server)))
        rig.store(first, TOKENS)
        wait_for("it keeps them", lambda: set(ends_of(server)) == {None})
        rig.store(second, TOKENS, ttl_s=9000)
        assert second.flush(WAIT_S)
        assert set(ends_of(server)) == {None}, "they end no more"


def test_an_older_server_gets_no_chunk_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", OLD_VERSION)
    begin_as(monkeypatch, messages.ENDS_VERSION)
    with serving_tcp() as server, open_engine(rig, server) as engine:
        rig.store(engine, TOKENS, ttl_s=600)
        assert engine.flush(WAIT_S)
        assert not ends_of(server)
        rig.store(engine, TOKENS)
        assert engine.flush(WAIT_S)
        assert set(ends_of(server)) == {None}


def test_a_server_that_became_older_keeps_no_chunk_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier took it for one that keeps times to live."""
    with serving_tcp() as server, closing(open_tier(server)) as tier:
        keeps = [tier.keeps_lifetimes]
        tier._connections._hang_up_idle()
        monkeypatch.setattr(messages, "PROTOCOL_VERSION", OLD_VERSION)
        begin_as(monkeypatch, messages.ENDS_VERSION)
        assert tier.put([make_transfer(EVEN, A)._replace(until_s=time.time() + 600)]) == [Outcome.FAILED]
        assert not ends_of(server)
        keeps.append(tier.keeps_lifetimes)
        assert keeps == [True, False]
        tier.limit([Lifetime(A, None)])
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        assert tier.contains([A]) == [True]


def test_an_older_engine_finds_what_has_no_end(server: ServerThread) -> None:
    rig = Rig()
    with open_engine(rig, server) as first, pytest.MonkeyPatch.context() as patch:
        rig.store(first, TOKENS, ttl_s=600)
        assert first.flush(WAIT_S)
        begin_as(patch, OLD_VERSION)
        with open_engine(rig, server) as older:
            assert older.lookup(TOKENS) == 0
            rig.store(older, TOKENS)
            assert older.flush(WAIT_S)
        assert set(ends_of(server)) == {None}


@pytest.mark.parametrize("until_s", [1.0, -1.0, float("inf")])
def test_ends_in_the_past_and_beyond_all_calendars(server: ServerThread, until_s: float) -> None:
    with closing(open_tier(server)) as tier:
        assert tier.put([make_transfer(EVEN, A)._replace(until_s=until_s)]) == [Outcome.STORED]
        time.sleep(0.01)
        assert any(tier.contains([A])) is (until_s > 1)
        tier.limit([Lifetime(A, float("inf"))])
        assert any(tier.contains([A])) is (until_s > 1)


def test_ends_outlast_the_server(tmp_path: Path) -> None:
    """Those on disk are told after a restart, the later ones, too; what ended meanwhile is not there."""
    refs = [make_ref(number) for number in range(4)]
    options = ServerOptions(POOL_BYTES, tcp=TcpAddress("127.0.0.1", 0), disk=DiskOptions(tmp_path, 64 << 20))
    end_s = time.time() + 2
    with ExitStack() as running:
        server = running.enter_context(closing(ServerThread(options)))
        tier = running.enter_context(closing(open_tier(server)))
        for ref, until_s in zip(refs, [end_s, end_s, end_s + 600, None], strict=True):
            assert tier.put([make_transfer(EVEN, ref)._replace(until_s=until_s)]) == [Outcome.STORED]
        tier.limit([Lifetime(refs[1], end_s + 900)])
        assert tier.get([make_transfer(EVEN, ref) for ref in refs]) == [Outcome.HIT] * 4
    time.sleep(max(0.0, end_s + 1.5 - time.time()))
    with closing(ServerThread(options)) as server, closing(open_tier(server)) as tier:
        first, later, ends, endless = tier.contains(refs)
        assert (first, endless) == (False, True)
        assert abs(ends - (end_s + 600)) < 2
        assert abs(later - (end_s + 900)) < 2
        assert tier.get([make_transfer(EVEN, ref) for ref in refs]) == [Outcome.MISS, *[Outcome.HIT] * 3]
        wait_for("its file is deleted", lambda: len(list(tmp_path.rglob("*.safetensors"))) == 3)


def test_a_later_end_reaches_the_disk_after_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is prolonged while it waits for the disk, and while it is written."""
    refs, calls = [make_ref(number) for number in range(3)], []
    put, limit = DiskTier.put, DiskTier.limit

    def slow(tier: DiskTier, transfers: object) -> object:
        time.sleep(0.5)
        calls.append("put")
        return put(tier, transfers)  # type: ignore[arg-type]

    def noted(tier: DiskTier, lifetimes: list[Lifetime]) -> None:
        calls.append("limit")
        limit(tier, lifetimes)

    monkeypatch.setattr(DiskTier, "put", slow)
    monkeypatch.setattr(DiskTier, "limit", noted)
    end_s = time.time() + 600
    with serving_tcp(disk=DiskOptions(tmp_path, 64 << 20), max_writes=1) as server, closing(open_tier(server)) as tier:
        for ref in refs:
            assert tier.put([make_transfer(EVEN, ref)._replace(until_s=end_s)]) == [Outcome.STORED]
        tier.limit([Lifetime(ref, end_s + 300) for ref in refs])
        wait_for("all is on disk", lambda: not server.hub.service.writes.is_changing_files)
    assert calls.count("limit") < calls.count("put") == 3, "those that waited were written with it"
    ends = [int(path.stem.rsplit("-", 1)[1]) for path in tmp_path.rglob("*.safetensors")]
    assert len(ends) == 3
    assert all(0 <= end - (end_s + 300) < 3 for end in ends)
