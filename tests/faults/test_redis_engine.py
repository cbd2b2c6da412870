"""Engines over a real Redis: shared chunks, a start without it, and its return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checks import check_idle
from support.redis_server import RedisServer, running
from support.returning import check_return
from support.rig import Rig, tokens_of

from kvstore import assembly
from kvstore.errors import TierError
from kvstore.options import RemoteOptions

TOKENS = tokens_of(1, 40)
WAIT_S = 30.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", ["user engine on >secret ~* &* +@all"])
    with running(server):
        yield server


def options_of(server: RedisServer, **others: object) -> RemoteOptions:
    settings: dict[str, object] = {
        "username": "engine",
        "password": "secret",
        "timeout_s": 2.0,
        "connect_timeout_s": 1.0,
    }
    return RemoteOptions(f"redis://127.0.0.1:{server.port}", settings, hold_s=0.2, max_queue=64, **others)  # type: ignore[arg-type]


def test_engines_share_what_one_has_computed(rig: Rig, server: RedisServer) -> None:
    with rig.open(remote=options_of(server)) as engine:
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush(WAIT_S)
        check_idle(engine)
    with rig.open(remote=options_of(server)) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.clear(TOKENS) == 3
    with rig.open(remote=options_of(server)) as engine:
        assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("down", "refused"),
        ("password", "password"),
        ("database", "database|DB index"),
        ("replica", "replica|read only|writes"),
        ("plain", "TLS|SSL|certificate"),
    ],
)
def test_a_required_redis_that_cannot_be_used(rig: Rig, server: RedisServer, broken: str, says: str) -> None:
    url = f"redis://127.0.0.1:{server.port}"
    settings: dict[str, object] = {"username": "engine", "password": "secret", "timeout_s": 2.0}
    if broken == "down":
        server.kill()
    elif broken == "password":
        settings["password"] = "wrong"
    elif broken == "database":
        url += "/99"
    elif broken == "replica":
        server.admin().replicaof("127.0.0.1", 1)
    elif broken == "plain":
        url = url.replace("redis://", "rediss://")
    with pytest.raises(TierError, match=f"(?i){says}") as caught:
        rig.open(remote=RemoteOptions(url, settings, required=True))
    assert "secret" not in str(caught.value)


def test_a_start_without_redis_and_its_return(
    rig: Rig, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, a cache that works without it, and then with it."""
    monkeypatch.setattr(assembly, "PROBE_INTERVAL_S", 0.2)
    server.kill()
    check_return(rig, caplog, options_of(server), server.start)
