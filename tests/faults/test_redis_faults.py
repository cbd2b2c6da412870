"""Redis servers that freeze, die, evict, refuse, move and lie: misses and errors within bounds, never a wrong byte."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from support.diskwork import EVEN, MINE, OTHER, get, make_ref, make_slot, make_transfer, put
from support.redis_server import (
    RedisServer,
    free_port,
    make_certificates,
    running,
    start_cluster,
    start_sentinel,
    tls_options,
    wait_for,
)

from kvstore.chunks import Outcome
from kvstore.errors import ClosedError, ConfigError, TierError, TierSetupError, TierTimeoutError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.guards import Deadline
from kvstore.tiers.redis.chunk import PART_BYTES, UNCOMMITTED_TTL_S, ChunkIO
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.redis.wire import Link, Reply, pack

TIMEOUT_S = 0.5
BOUND_S = 15.0  # what must end at all; a time-out or two take 0.5 s each
LARGE = KVLayout(page_bytes=(1 << 16,) * 8, planes=1, block_tokens=16, chunk_tokens=128)  # 4 MiB: five parts
REFS = [make_ref(number) for number in range(16)]
WHOLE = [make_ref(number, LARGE.blocks_per_chunk) for number in range(12)]
_PAYLOADS = {ref: make_transfer(ref, LARGE) for ref in WHOLE}


def open_redis(url: str, layout: KVLayout = EVEN, namespace: Namespace = MINE, **options: object) -> RedisTier:
    capacity_bytes = options.pop("capacity_bytes", UNBOUNDED_BYTES)
    assert isinstance(capacity_bytes, int)
    given = {"url": url, "timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S, **options}
    tier = open_tier("redis", TierSetup(namespace, layout, capacity_bytes, given))
    assert isinstance(tier, RedisTier)
    return tier


def put_large(tier: Tier, *refs: Any) -> list[Outcome]:
    return tier.put([_PAYLOADS[ref] for ref in refs])


def get_large(tier: Tier, ref: Any) -> Outcome:
    """Read a chunk; a hit must have the right bytes."""
    slot = make_slot(LARGE)
    (outcome,) = tier.get([Transfer(ref, slot)])
    assert outcome is not Outcome.HIT or (slot == _PAYLOADS[ref].buffer).all()
    return outcome


def values(server: RedisServer, pattern: str = "kvs:{*:*") -> dict[bytes, int]:
    """All values of chunks, by key, and their lengths; the epoch's key is none."""
    admin = server.admin()
    return {key: admin.strlen(key) for key in admin.scan_iter(pattern, 1000) if b"}:epoch" not in key}


def ends(action: Callable[[], object]) -> object:
    """The result of an action, or the error that it ended in, within a bound."""
    begin_s = time.monotonic()
    try:
        return action()
    except (TierError, ClosedError) as error:
        return error
    finally:
        assert time.monotonic() - begin_s < BOUND_S


def killed(*_: object) -> None:
    """In the place of something that the process does not live to do."""
    raise TierError("killed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    one = RedisServer(tmp_path / "server")
    with running(one):
        yield one


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    one = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
    yield one
    ends(one.close)


# Servers that do not answer


def test_a_tier_outlives_its_server(server: RedisServer) -> None:
    """It can be opened while the server is down, and needs no help to find it again."""
    server.kill()
    tier = open_redis(f"redis://127.0.0.1:{server.port}")
    for _ in range(2):
        for call in (tier.scan, tier.clear, tier.check, partial(put, tier, *REFS), partial(get, tier, REFS[0])):
            assert isinstance(ends(call), TierError)
        assert isinstance(ends(partial(tier.contains, REFS)), TierError)
        assert tier.used_bytes == 0
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
    """Every call ends within its time-outs, also close; afterwards the tier goes on as if nothing had been."""
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
            tier.scan,
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
    tier = Deadline(open_redis(f"redis://127.0.0.1:{server.port}", LARGE, timeout_s=5.0), 0.3, slow_timeout_s=8.0)
    put_large(tier, *WHOLE[:3])
    server.freeze()
    transfer = Transfer(WHOLE[0], make_slot(LARGE))
    with pytest.raises(TierTimeoutError) as caught:
        tier.get([transfer])
    server.thaw()
    assert caught.value.pending.result(BOUND_S) == [Outcome.HIT]
    assert (transfer.buffer == _PAYLOADS[WHOLE[0]].buffer).all()
    tier.close()


@pytest.mark.parametrize("action", ["put", "get"])
def test_killed_in_the_middle(server: RedisServer, action: str) -> None:
    """Again and again, while four threads are at it: errors, and then a tier that works."""
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
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
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
    tier.scan()
    assert tier.used_bytes == sum(values(server, "kvs:{*}:[c0-9]*").values())
    tier.close()


def test_loading(tmp_path: Path) -> None:
    """A server that reads its dump answers with an error, which is one of the tier."""
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


# Servers that refuse


@pytest.mark.parametrize("parts", [0, 3])
def test_no_memory(tmp_path: Path, parts: int) -> None:
    """Full is an answer, nothing is left of the chunk, and what was there stays."""
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
        assert tier.used_bytes == sum(before.values())
        assert [get_large(tier, ref) for ref in WHOLE[:3]] == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
        tier.remove(WHOLE[:1])
        assert tier.used_bytes == sum(values(server).values())
        tier.close()


def test_a_replica(server: RedisServer, tmp_path: Path) -> None:
    """It says so at the check, and does not pretend to have stored anything."""
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
        assert tier.used_bytes == 0
        tier.close()
    master.close()


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """At the check: login, rights, database, TLS, cluster; and never with the password."""
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
                f"rediss://127.0.0.1:{secure.port}?tls_ca={tmp_path}/missing": "does not work",
                f"redis-cluster://:hunter2@{here}": "use redis://",
                f"redis://127.0.0.1:{cluster.port}": "use redis-cluster://",
            }.items():
                tier = open_redis(url)
                with pytest.raises(TierError, match=message) as caught:
                    tier.check()
                assert isinstance(caught.value, ConfigError) == (
                    message not in {"does not work", "with or without TLS"}
                )
                assert "hunter2" not in str(caught.value)
                assert "wrong@" not in str(caught.value)
                tier.close()
            with pytest.raises(TierError) as refused:
                open_redis(f"redis://127.0.0.1:{free_port()}").check()
            assert not isinstance(refused.value, TierSetupError)
        finally:
            plain.kill()


# Values that are not what they were


def keys_of(server: RedisServer, ref: Any) -> list[bytes]:
    found = [key for key in values(server) if ref.prefix_key.hex().encode() in key]
    return sorted(found, key=lambda key: (not key.endswith(b"}:c"), key))


@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("damage", ["flipped", "other type", "cut", "grown", "of another chunk", "gone", "expired"])
def test_a_damaged_key(server: RedisServer, tier: RedisTier, damage: str, number: int) -> None:
    """The commit, the first part, the last: one chunk is lost, all of it is removed, the others are served."""
    put_large(tier, *WHOLE[:3])
    admin: Any = server.admin()
    key, other = keys_of(server, WHOLE[1])[number], keys_of(server, WHOLE[2])[number]
    value = admin.get(key)
    if damage == "other type":
        admin.delete(key)
        admin.lpush(key, "x")
    elif damage == "gone":
        admin.delete(key)
    elif damage == "expired":
        admin.pexpire(key, 1)
        time.sleep(0.05)
    else:
        flipped = value[:100] + bytes([value[100] ^ 1]) + value[101:]
        changed = {"flipped": flipped, "cut": value[:-1], "grown": value + b" ", "of another chunk": admin.get(other)}
        admin.set(key, changed[damage])
    expected = Outcome.MISS if damage in {"gone", "expired"} else Outcome.CORRUPT
    assert [get_large(tier, ref) for ref in WHOLE[:3]] == [Outcome.HIT, expected, Outcome.HIT]
    assert keys_of(server, WHOLE[1]) == []
    assert tier.used_bytes == sum(values(server).values())
    assert put_large(tier, WHOLE[1]) == [Outcome.STORED]
    assert get_large(tier, WHOLE[1]) is Outcome.HIT


def test_half_a_chunk(server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that were uploaded and never committed are nobody's, expire, and go at once where a scan can tell."""
    put_large(tier, WHOLE[0])
    monkeypatch.setattr(tier._io, "commit", killed)
    with pytest.raises(TierError, match="killed"):
        put_large(tier, WHOLE[1])
    leftovers = [key for key in keys_of(server, WHOLE[1]) if b":w" in key]
    assert len(leftovers) == 5
    assert all(0 < server.admin().ttl(key) <= UNCOMMITTED_TTL_S for key in leftovers)
    again = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
    assert [ref for ref, _ in again.scan()] == WHOLE[:1]
    assert get_large(again, WHOLE[1]) is Outcome.MISS
    server.admin().delete(*[key for key in keys_of(server, WHOLE[0]) if key.endswith(b"}:c")])
    assert again.scan() == []  # and the parts without a commit are swept
    assert keys_of(server, WHOLE[0]) == []
    assert again.counters.swept == 1
    again.close()


def test_evicted_parts(tmp_path: Path) -> None:
    """A server that evicts whatever it likes: misses, no errors, and the accounts come right with a scan."""
    server = RedisServer(tmp_path / "server", ["maxmemory 24mb", "maxmemory-policy allkeys-random"])
    with running(server):
        tier = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
        seen = set()
        for round_ in range(40):
            assert put_large(tier, WHOLE[round_ % 12]) in ([Outcome.STORED], [Outcome.FAILED], [Outcome.FULL])
            seen.add(get_large(tier, WHOLE[(round_ * 5) % 12]))
            seen.add(get_large(tier, WHOLE[round_ % 12]))
        assert {Outcome.HIT, Outcome.MISS} <= seen
        assert Outcome.CORRUPT not in seen
        server.admin().config_set("maxmemory", 0)
        for ref in WHOLE:
            get_large(tier, ref)
        tier.scan()
        assert tier.used_bytes == sum(values(server, "kvs:{*}:[c0-9]*").values())
        tier.close()


def test_chunks_expire(server: RedisServer) -> None:
    tier = open_redis(f"redis://127.0.0.1:{server.port}", ttl_s=1)
    put(tier, *REFS)
    assert all(0 < server.admin().pttl(key) <= 1000 for key in values(server))
    time.sleep(1.1)
    assert not any(tier.contains(REFS))
    assert all(get(tier, ref) is Outcome.MISS for ref in REFS)
    assert tier.used_bytes == 0
    tier.close()


def test_chunks_stay_for_good(server: RedisServer) -> None:
    """Their parts were written under names that expire."""
    tier = open_redis(f"redis://127.0.0.1:{server.port}")
    put(tier, *REFS)
    assert {server.admin().pttl(key) for key in values(server)} == {-1}
    tier.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_replaces_a_damaged_chunk_is_not_removed_with_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another client stores it anew just before, or after, a reader looks once more at what it found damaged."""
    one, other = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    put(one, REFS[0])
    part = next(key for key in values(server) if not key.endswith(b":c"))
    server.admin().setrange(part, 100, b"damaged")
    real_ask = Link.ask

    def ask(link: Link, commands: Sequence[bytes]) -> list[Reply]:
        if not any(b"}:c" in command for command in commands):
            return real_ask(link, commands)
        monkeypatch.undo()
        if when == "before":
            put(other, REFS[0])
        found = real_ask(link, commands)
        if when == "after":
            put(other, REFS[0])
        return found

    monkeypatch.setattr(Link, "ask", ask)
    assert get(one, REFS[0]) is Outcome.HIT
    assert other.contains(REFS[:1]) == [True]
    for tier in (one, other):
        tier.close()


def test_a_write_whose_answer_is_lost_counts(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be there, and here it is."""
    tier = open_redis(f"redis://127.0.0.1:{server.port}")
    put(tier, REFS[1])
    real_commit = ChunkIO.commit

    def commit(*arguments: Any) -> None:
        real_commit(*arguments)
        raise ConnectionResetError

    monkeypatch.setattr(ChunkIO, "commit", commit)
    with pytest.raises(TierError):
        put(tier, REFS[0])
    monkeypatch.undo()
    assert tier.used_bytes == sum(values(server).values()) == 2 * tier.stored_bytes(REFS[0].num_blocks)
    assert get(tier, REFS[0]) is Outcome.HIT
    tier.close()


def test_half_a_reply_is_read_by_nobody_else(server: RedisServer, tier: RedisTier) -> None:
    """It would be taken for the answer to the next question on that connection."""
    (node,) = tier._calls.nodes.masters()

    def cut() -> None:
        with node.link() as link:
            link.send([pack("ECHO", "of the call that was cut")])
            raise ConnectionResetError

    with node.link() as link:
        link.call("PING")
    server.admin().execute_command("CLIENT PAUSE", 300, "ALL")  # so that nothing has come when it is used again
    with pytest.raises(TierError):
        cut()
    with node.link() as link:
        assert link.call("ECHO", "mine") == b"mine"


def test_a_walk_that_began_before_a_clear_leaves_what_came_after_it(server: RedisServer) -> None:
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    put(one, *REFS)
    before = one._home
    two.clear()
    put(two, *REFS[:2])
    assert one._sweeper.walk(before) == ({}, 0)
    assert two.contains(REFS[:2]) == [True, True]
    for tier in (one, two):
        tier.close()


def test_a_put_that_was_cleared_before_it_ended_does_not_say_that_it_stored(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    real_commit = ChunkIO.commit

    def commit(*arguments: Any) -> Any:
        ended = real_commit(*arguments)
        monkeypatch.undo()
        two._sweeper.renew(two._current_home())  # as a clear that has not swept yet
        return ended

    monkeypatch.setattr(ChunkIO, "commit", commit)
    assert put(one, REFS[0]) == [Outcome.FAILED]
    assert (values(server), one.used_bytes) == ({}, 0)
    for tier in (one, two):
        tier.close()


# Several clients


def test_clear_is_for_everybody(server: RedisServer) -> None:
    """What another client has cleared is gone at once, and what it stores afterwards is found."""
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    put(one, *REFS)
    two.scan()
    assert all(two.contains(REFS))
    two.clear()
    assert not any(one.contains(REFS))
    assert one.used_bytes == two.used_bytes == sum(values(server).values()) == 0
    put(two, REFS[0])
    assert get(one, REFS[0]) is Outcome.HIT
    other = open_redis(f"redis://127.0.0.1:{server.port}", namespace=OTHER)
    put(other, REFS[1])
    one.clear()
    assert get(other, REFS[1]) is Outcome.HIT
    for tier in (one, two, other):
        tier.close()


def test_a_put_under_way_during_a_clear(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another client: its chunk does not come back, and leaves no bytes."""
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    commit = one._io.commit

    def late(*arguments: Any) -> Any:
        two.clear()
        return commit(*arguments)

    monkeypatch.setattr(one._io, "commit", late)
    assert put(one, REFS[0]) == [Outcome.FAILED]
    assert not any(two.contains(REFS) + one.contains(REFS))
    assert values(server) == {}
    assert one.used_bytes == 0
    one.close()
    two.close()


def test_killed_in_the_middle_of_a_clear(server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is unreachable though nothing was deleted; the next scan deletes it."""
    put_large(tier, *WHOLE[:3])
    monkeypatch.setattr(tier._sweeper, "sweep", killed)
    with pytest.raises(TierError, match="killed"):
        tier.clear()
    assert len(values(server)) == 18
    again = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
    assert not any(again.contains(WHOLE))
    assert get_large(again, WHOLE[0]) is Outcome.MISS
    assert again.scan() == []
    assert values(server) == {}
    again.close()


def test_a_lost_epoch_loses_the_chunks(server: RedisServer, tier: RedisTier) -> None:
    """Nobody knows whether they had been cleared."""
    put_large(tier, WHOLE[0])
    (key,) = server.admin().keys("kvs:{*}:epoch")
    server.admin().delete(key)
    assert get_large(tier, WHOLE[0]) is Outcome.MISS
    server.admin().set(key, "nonsense")
    assert put_large(tier, WHOLE[1]) == [Outcome.STORED]
    assert get_large(tier, WHOLE[1]) is Outcome.HIT


def test_reset_changes_the_namespace(server: RedisServer) -> None:
    tier = open_redis(f"redis://127.0.0.1:{server.port}")
    put(tier, *REFS)
    tier.reset(OTHER)
    assert not any(tier.contains(REFS))
    assert values(server) == {}
    assert tier.used_bytes == 0
    put(tier, REFS[0])
    old = open_redis(f"redis://127.0.0.1:{server.port}")
    assert not any(old.contains(REFS))
    new = open_redis(f"redis://127.0.0.1:{server.port}", namespace=OTHER)
    assert get(new, REFS[0]) is Outcome.HIT
    for one in (tier, old, new):
        one.close()


def test_accounts_after_2000_random_operations(server: RedisServer) -> None:
    """Two clients of one namespace, now and then a restart: what is counted is what is there, to the byte."""
    url = f"redis://127.0.0.1:{server.port}"
    size = open_redis(url).stored_bytes(8)
    dice = random.Random(5)
    tiers = [open_redis(url, capacity_bytes=20 * size), open_redis(url)]
    for number in range(2000):
        which = dice.randrange(2)
        tier, ref = tiers[which], make_ref(dice.randrange(30), dice.choice([1, 3, 8, 8]))
        action = dice.random()
        if action < 0.5:
            assert put(tier, ref) in ([Outcome.STORED], [Outcome.FULL])
        elif action < 0.8:
            assert get(tier, ref) in (Outcome.HIT, Outcome.MISS)
        elif action < 0.97:
            tier.remove([ref, make_ref(dice.randrange(30))])
        elif action < 0.98:
            tier.clear()
        elif action < 0.985:
            tier.close()
            tiers[which] = open_redis(url, capacity_bytes=20 * size if which == 0 else UNBOUNDED_BYTES)
        assert tiers[0].used_bytes <= 20 * size
        if number % 100 == 99:
            for one in tiers:
                held = dict(one.scan())
                assert one.used_bytes == sum(held.values()) == sum(values(server).values())
    for one in tiers:
        one.close()


# Sentinel and cluster


def test_sentinel_failover(tmp_path: Path) -> None:
    """The tier follows the master; the old one comes back as a replica, and nothing is written to it."""
    master = RedisServer(tmp_path / "master")
    replica = RedisServer(tmp_path / "replica", [f"replicaof 127.0.0.1 {master.port}"])
    with running(master, replica):
        sentinel = start_sentinel(tmp_path / "sentinel", master)
        try:
            tier = open_redis(f"redis-sentinel://127.0.0.1:{sentinel.port}/chunks", LARGE)
            tier.check()
            assert set(put_large(tier, *WHOLE[:4])) == {Outcome.STORED}
            wait_for("the replica has it all", lambda: len(values(replica)) == len(values(master)))
            wait_for("the Sentinel knows it", lambda: len(sentinel.admin().sentinel_slaves("chunks")) == 1)
            master.kill()
            assert isinstance(ends(lambda: put_large(tier, WHOLE[5])), TierError)
            wait_for("the failover", lambda: replica.admin().info("replication")["role"] == "master")

            def works() -> bool:
                result = ends(lambda: put_large(tier, WHOLE[5]))
                return result == [Outcome.STORED]

            wait_for("the tier finds the new master", works)
            assert all(get_large(tier, ref) is Outcome.HIT for ref in [*WHOLE[:4], WHOLE[5]])
            sentinel.freeze()
            assert get_large(tier, WHOLE[5]) is Outcome.HIT
            tier._calls.nodes.forget()
            assert isinstance(ends(lambda: get_large(tier, WHOLE[5])), TierError)
            ends(tier.close)
        finally:
            sentinel.kill()


def slot_of(ref: Any, tier: RedisTier) -> int:
    from redis.crc import key_slot

    return int(key_slot(tier._home.tag(ref)))


def owner_of(ref: Any, tier: RedisTier) -> int:
    return tier._calls.nodes.node_of(tier._home.tag(ref)).address.port


def test_a_slot_moves(tmp_path: Path) -> None:
    """While it is on its way the chunk cannot be had, and others can; then it is found where it is."""
    servers = start_cluster(tmp_path)
    try:
        tier = open_redis(f"redis-cluster://127.0.0.1:{servers[0].port}")
        tier.check()
        assert set(put(tier, *REFS)) == {Outcome.STORED}
        by_port = {server.port: server for server in servers}
        epoch_owner = tier._calls.nodes.node_of(tier._home.epoch_tag).address.port
        moving = next(ref for ref in REFS if slot_of(ref, tier) != 0 and owner_of(ref, tier) != epoch_owner)
        slot, source = slot_of(moving, tier), by_port[owner_of(moving, tier)]
        target = next(server for server in servers if server.port not in (source.port, epoch_owner))
        names = {server.port: server.admin().execute_command("CLUSTER MYID").decode() for server in servers}
        target.admin().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source.port])
        source.admin().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target.port])
        keys = source.admin().execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
        source.admin().execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        outcomes = tier.get([Transfer(ref, make_slot()) for ref in REFS])
        assert outcomes == [Outcome.FAILED if ref == moving else Outcome.HIT for ref in REFS]
        assert put(tier, moving, *REFS[:3])[0] is Outcome.FAILED
        for server in (target, source, by_port[epoch_owner]):
            server.admin().execute_command("CLUSTER SETSLOT", slot, "NODE", names[target.port])
        assert tier.contains(REFS) == [True] * 16
        assert all(get(tier, ref) is Outcome.HIT for ref in REFS)
        assert put(tier, moving) == [Outcome.STORED]
        assert owner_of(moving, tier) == target.port
        assert tier.used_bytes == sum(sum(values(server).values()) for server in servers)
        tier.close()
    finally:
        for server in servers:
            server.kill()


def test_a_node_is_lost(tmp_path: Path) -> None:
    """Its chunks cannot be had, the others can; until the node is back, empty."""
    servers = start_cluster(tmp_path, options=["cluster-require-full-coverage no"])
    try:
        tier = open_redis(",".join([f"redis-cluster://127.0.0.1:{servers[0].port}", f"127.0.0.1:{servers[1].port}"]))
        assert set(put(tier, *REFS)) == {Outcome.STORED}
        epoch_owner = tier._calls.nodes.node_of(tier._home.epoch_tag).address.port
        victim = next(server for server in servers if server.port != epoch_owner)
        for harm in (victim.freeze, victim.kill):
            lost = [ref for ref in REFS if owner_of(ref, tier) == victim.port]  # another epoch is another slot
            assert 0 < len(lost) < len(REFS)
            harm()
            outcomes = ends(lambda: tier.get([Transfer(ref, make_slot()) for ref in REFS]))
            assert outcomes == [Outcome.FAILED if ref in lost else Outcome.HIT for ref in REFS]
            assert ends(lambda: tier.contains(REFS)) == [ref not in lost for ref in REFS]
            outcomes = ends(lambda: put(tier, *REFS))
            assert outcomes == [Outcome.FAILED if ref in lost else Outcome.STORED for ref in REFS]
            assert isinstance(ends(partial(tier.get, [Transfer(ref, make_slot()) for ref in lost])), TierError)
            assert isinstance(ends(tier.clear), TierError | None)
            victim.thaw()
            if harm == victim.freeze:
                wait_for("the node is back", lambda: ends(tier.scan) == [])
                assert set(put(tier, *REFS)) == {Outcome.STORED}
        next(server for server in servers if server.port == epoch_owner).kill()
        assert isinstance(ends(lambda: tier.contains(REFS)), TierError)
        ends(tier.close)
    finally:
        for server in servers:
            server.kill()
