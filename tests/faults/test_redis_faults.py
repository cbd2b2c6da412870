"""Tests of Redis servers that freeze, die, load and refuse: errors in bounded time, and no wrong byte."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from support.diskwork import get, make_slot, put
from support.redis_server import RedisServer, make_certificates, running, tls_options, wait_for
from support.redis_tiers import (
    BOUND_S,
    LARGE,
    PAYLOADS,
    REFS,
    WHOLE,
    ends,
    get_large,
    keys_of,
    open_redis,
    put_large,
    values,
)

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, TierError, TierSetupError, TierTimeoutError
from kvstore.tiers.base import Transfer
from kvstore.tiers.guards import Guard
from kvstore.tiers.redis.chunk import PART_BYTES
from kvstore.tools.processes import free_port


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    one = RedisServer(tmp_path / "server")
    with running(one):
        yield one


def test_a_tier_outlives_its_server(server: RedisServer) -> None:
    """The tier can be opened while the server is down, and reconnects by itself."""
    server.kill()
    tier = open_redis(f"redis://127.0.0.1:{server.port}")
    for _ in range(2):
        for call in (tier.clear, tier.check, partial(put, tier, *REFS), partial(get, tier, REFS[0])):
            assert isinstance(ends(call), TierError)
        assert isinstance(ends(partial(tier.contains, REFS)), TierError)
        server.start()
        tier.check()
        assert set(put(tier, *REFS)) == {Outcome.STORED}
        assert all(get(tier, ref) is Outcome.HIT for ref in REFS)
        server.kill()
        tier.close()
        tier = open_redis(f"redis://127.0.0.1:{server.port}")
    tier.close()


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_a_frozen_server(tmp_path: Path, kind: str) -> None:
    """Every call ends within its time-outs, even close, and the tier works again afterwards."""
    files = make_certificates(tmp_path / "certificates") if kind == "tls" else {}
    server = RedisServer(tmp_path / "server", tls_options(files) if files else [], tls=bool(files))
    options: dict[str, Any] = {}
    url = f"redis://127.0.0.1:{server.port}"
    if files:
        url = f"rediss://127.0.0.1:{server.port}"
        options = {
            "tls_ca": str(files["ca.crt"]),
            "tls_cert": str(files["client.crt"]),
            "tls_key": str(files["client.key"]),
        }
    elif kind == "unix":
        url = f"unix://{server.unix_path}"
    with running(server):
        tier = open_redis(url, LARGE, **options)
        put_large(tier, *WHOLE[:3])
        server.freeze()
        slot = make_slot(LARGE)
        for call in (
            lambda: tier.contains(WHOLE),
            lambda: tier.get([Transfer(WHOLE[0], slot)]),
            lambda: put_large(tier, WHOLE[4]),
            lambda: tier.remove(WHOLE[:1]),
            tier.clear,
        ):
            assert isinstance(ends(call), TierError)
        before = slot.copy()
        server.thaw()
        time.sleep(0.2)
        assert (slot == before).all(), "somebody wrote to the buffer after the call had ended"
        tier.clear()
        put_large(tier, *WHOLE[:3])
        assert all(get_large(tier, ref) is Outcome.HIT for ref in WHOLE[:3])
        server.freeze()
        stuck = threading.Thread(target=lambda: ends(lambda: get_large(tier, WHOLE[0])))
        stuck.start()
        ends(tier.close)
        stuck.join(BOUND_S)
        assert not stuck.is_alive()


def test_a_frozen_server_behind_a_deadline(server: RedisServer) -> None:
    """No call waits longer than the deadline, though the tier itself would."""
    tier = Guard(open_redis(f"redis://127.0.0.1:{server.port}", LARGE, timeout_s=5.0), 0.3, slow_timeout_s=8.0)
    put_large(tier, *WHOLE[:3])
    server.freeze()
    transfer = Transfer(WHOLE[0], make_slot(LARGE))
    with pytest.raises(TierTimeoutError) as caught:
        tier.get([transfer])
    server.thaw()
    assert caught.value.pending.result(BOUND_S) == [Outcome.HIT]
    assert (transfer.buffer == PAYLOADS[WHOLE[0]].buffer).all()
    tier.close()


@pytest.mark.parametrize("action", ["put", "get"])
def test_killed_in_the_middle(server: RedisServer, action: str) -> None:
    """Repeated kills under four threads lead to errors, and then the tier works again."""
    tier = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
    put_large(tier, *WHOLE)
    is_over = threading.Event()
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        while not is_over.is_set():
            ref = dice.choice(WHOLE)
            try:
                ends(partial(put_large if action == "put" else get_large, tier, ref))
            except BaseException as error:  # noqa: BLE001 - the test shows any error
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.3)
        server.restart()
    time.sleep(0.3)
    is_over.set()
    for thread in threads:
        thread.join(BOUND_S)
    assert not wrong
    assert set(put_large(tier, *WHOLE)) == {Outcome.STORED}
    assert all(get_large(tier, ref) is Outcome.HIT for ref in WHOLE)
    committed = [key for key in values(server) if b":w" not in key]
    assert len(committed) == sum(len(keys_of(server, ref)) for ref in WHOLE) == 6 * len(WHOLE)
    tier.close()


def test_loading(tmp_path: Path) -> None:
    """A server that loads its dump answers with an error, which the tier raises as a tier error."""
    server = RedisServer(tmp_path / "server", ["key-load-delay 20000", "loading-process-events-interval-bytes 1024"])
    with running(server):
        tier = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
        put_large(tier, *WHOLE[:4])
        admin = server.admin()
        for number in range(200):
            admin.set(f"other:{number}", b"x" * 2000)
        admin.save()
        server.kill()
        server.start(wait=False)

        def is_loading() -> bool:
            try:
                return not server.admin().ping()
            except redis.exceptions.BusyLoadingError:
                return True

        wait_for("the server loads", is_loading)
        result = ends(tier.check)
        assert isinstance(result, TierError)
        assert "loading" in str(result).lower()
        wait_for("the server has loaded", lambda: server.admin().ping())
        assert all(get_large(tier, ref) is Outcome.HIT for ref in WHOLE[:4])
        tier.close()


@pytest.mark.parametrize("parts", [0, 3])
def test_no_memory(tmp_path: Path, parts: int) -> None:
    """The put is answered with FULL, nothing of the chunk is left, and earlier chunks stay."""
    server = RedisServer(tmp_path / "server", ["maxmemory-policy noeviction"])
    with running(server):
        tier = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
        assert put_large(tier, *WHOLE[:2]) == [Outcome.STORED, Outcome.STORED]
        used = int(server.admin().info("memory")["used_memory"])
        server.admin().config_set("maxmemory", used + parts * PART_BYTES + 200_000 * bool(parts) - 1000)
        before = values(server)
        assert set(put_large(tier, WHOLE[2], WHOLE[0])) == {Outcome.FULL}
        tier.check()
        assert values(server) == before
        assert [get_large(tier, ref) for ref in WHOLE[:3]] == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
        tier.remove(WHOLE[:1])
        assert values(server) == {key: size for key, size in before.items() if key in keys_of(server, WHOLE[1])}
        tier.close()


def test_a_replica(server: RedisServer, tmp_path: Path) -> None:
    """The check reports a replica, and puts do not claim to have stored anything."""
    replica = RedisServer(tmp_path / "replica", [f"replicaof 127.0.0.1 {server.port}"])
    master = open_redis(f"redis://127.0.0.1:{server.port}")
    put(master, *REFS[:2])
    with running(replica):
        tier = open_redis(f"redis://127.0.0.1:{replica.port}")
        wait_for("the replica has it all", lambda: len(values(replica)) == len(values(server)))
        with pytest.raises(TierError, match="read-only replica"):
            tier.check()
        with pytest.raises(TierError, match="read-only replica"):
            put(tier, REFS[3])
        assert tier.counters.stored == 0
        tier.close()
    master.close()


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """The check reports wrong login, rights, database, TLS and cluster, and never the password."""
    files = make_certificates(tmp_path / "certificates")
    plain = RedisServer(tmp_path / "plain", ["requirepass hunter2", "user weak on >hunter2 ~kvs:* +get +ping"])
    secure = RedisServer(tmp_path / "secure", tls_options(files), tls=True)
    cluster = RedisServer(tmp_path / "cluster", ["cluster-enabled yes"])
    with running(secure, cluster):
        plain.start(wait=False)
        try:
            wait_for("the server", lambda: plain.admin(password="hunter2").ping())
            here = f"127.0.0.1:{plain.port}"
            for url, message in {
                f"redis://{here}": "refuses the login",
                f"redis://:wrong@{here}": "refuses the login",
                f"redis://nobody:hunter2@{here}": "refuses the login",
                f"redis://weak:hunter2@{here}": "rights in docs/redis.md",
                f"redis://:hunter2@{here}/99": "no such database",
                f"rediss://:hunter2@{here}": "with or without TLS",
                f"rediss://127.0.0.1:{secure.port}": "TLS fails",
                f"rediss://127.0.0.1:{secure.port}?tls_ca={tmp_path}/missing": "failed: ",
                f"redis-cluster://:hunter2@{here}": "use redis://",
                f"redis://127.0.0.1:{cluster.port}": "use redis-cluster://",
            }.items():
                tier = open_redis(url)
                with pytest.raises(TierError, match=message) as caught:
                    tier.check()
                assert isinstance(caught.value, ConfigError) == (message not in {"failed: ", "with or without TLS"})
                assert "hunter2" not in str(caught.value)
                assert "wrong@" not in str(caught.value)
                tier.close()
            with pytest.raises(TierError) as refused:
                open_redis(f"redis://127.0.0.1:{free_port()}").check()
            assert not isinstance(refused.value, TierSetupError)
        finally:
            plain.kill()
