"""Tests of trails in real Redis servers: lookups, leftovers of evictions, and servers without sorted sets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.diskwork import EVEN, OTHER, get, make_transfer
from support.redis_server import ACL_USER, RedisServer, running, start_cluster
from support.redis_tiers import Path, ends, key_of, most_shared, open_redis, ref_of, shared_blocks, trail_of, values
from support.schedules import schedules

from kvstore.model.chunks import Outcome, chunk_of
from kvstore.model.keys import Namespace
from kvstore.tiers.base import MAX_NEAREST
from kvstore.tiers.redis.connection import Buffer, RedisConnection
from kvstore.tiers.redis.inventory import RedisInventory
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.redis.trails import CHECKED, SETS

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=EVEN.blocks_per_chunk).map(tuple)
LOOK_ROUNDS = 40  # each removes the missing chunks that the last ones named
STORED = [Outcome.STORED]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    one = RedisServer(tmp_path_factory.mktemp("redis"))
    with running(one):
        yield one


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.admin().flushall()
    return shared_server


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    one = open_redis(url_of(server))
    yield one
    ends(one.close)


def url_of(server: RedisServer) -> str:
    return f"redis://127.0.0.1:{server.port}"


def put(tier: RedisTier, *paths: Path) -> list[Outcome]:
    return tier.put([make_transfer(ref_of(path))._replace(trail=trail_of(path)) for path in paths])


def put_as_before(tier: RedisTier, *paths: Path) -> list[Outcome]:
    """Put chunks like an engine without trails."""
    return tier.put([make_transfer(ref_of(path)) for path in paths])


def near(tier: RedisTier, path: Path) -> tuple[bytes, ...]:
    (found,) = tier.nearest([trail_of(path)])
    return found


def look(tier: RedisTier, path: Path) -> tuple[bytes, ...]:
    """Return the trails named for a path, once all of the chunks named are there."""
    for _ in range(LOOK_ROUNDS):
        found = near(tier, path)
        if all(tier.contains([chunk_of(trail) for trail in found])):
            return found
    pytest.fail("the tier names chunks that are missing, again and again")


def members(server: RedisServer) -> list[bytes]:
    """Return the members of all sets of trails."""
    admin: Any = server.admin()
    return [member for key in admin.scan_iter("kvs:{*}:t", 1000) for member in admin.zrange(key, 0, -1)]


def random_paths(rng: random.Random, number: int) -> list[Path]:
    """Return paths of chunks, of which some share leading blocks."""
    stems = [tuple(rng.randrange(256) for _ in range(4)) for _ in range(40)]
    return [rng.choice(stems) + tuple(rng.randrange(256) for _ in range(4)) for _ in range(number)]


def test_those_that_share_most_are_named(tier: RedisTier) -> None:
    put(tier, (1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 7), (1, 8), (1, 9), (2, 2, 3))
    found = near(tier, (1, 2, 3, 4, 9))
    assert found[:3] == (trail_of((1, 2, 3, 4)), trail_of((1, 2, 3, 5, 6)), trail_of((1, 2, 7)))
    assert found[3] in (trail_of((1, 8)), trail_of((1, 9)))
    assert tier.nearest([trail_of((3,)), trail_of((2, 2)), b"", b"x" * 15, trail_of((1,) * 9)]) == [
        (),
        (trail_of((2, 2, 3)),),
        (),
        (),
        (),
    ]
    assert tier.nearest([]) == []


def test_another_engine_and_a_codec(server: RedisServer) -> None:
    coded = open_redis(url_of(server), replace(EVEN, element="bf16"), codec="lz4")
    other = open_redis(url_of(server), replace(EVEN, element="bf16"), codec="lz4")
    put(coded, (1, 2, 3))
    assert near(other, (1, 2, 4)) == (trail_of((1, 2, 3)),)
    ends(coded.close)
    ends(other.close)


@schedules(60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put"] * 4 + ["put as before", "remove", "clear"]), PATHS), max_size=30)
)
def test_whatever_happens_the_longest_are_found(shared_server: RedisServer, steps: list[tuple[str, Path]]) -> None:
    server, there, told, left = shared_server, set[Path](), set[Path](), set[Path]()
    server.admin().flushall()
    writer, reader = open_redis(url_of(server)), open_redis(url_of(server))
    for step, path in steps:
        if step == "put":
            put(writer, path)
            there.add(path)
            told.add(path)
        elif step == "put as before":
            put_as_before(writer, path)
            there.add(path)
        elif step == "remove":
            writer.remove([ref_of(path)])
            there.discard(path)
            left |= told & {path}  # its trail may be removed, or serve an engine that does not send it again
            told.discard(path)
        else:
            writer.clear()
            there, told, left = set(), set(), set()
        found = look(reader, path)
        shared = [shared_blocks(path, other) for trail in found for other in there if trail_of(other) == trail]
        assert shared == sorted(shared, reverse=True)
        assert len(shared) == len(found)
        assert most_shared(path, there & told, MAX_NEAREST) <= shared
        assert shared <= most_shared(path, there & (told | left), MAX_NEAREST)
    assert {trail_of(path) for path in there & told} <= set(members(server))
    writer.close()
    reader.close()


def test_what_is_missing_is_taken_out(server: RedisServer, tier: RedisTier) -> None:
    """Chunks that are gone hide one that is there, until an engine has looked for them."""
    gone = [(1, 2, 3, number) for number in range(MAX_NEAREST * 2)]
    put(tier, *gone, (1, 9))
    tier.remove([ref_of(path) for path in gone])
    reader = open_redis(url_of(server))
    assert trail_of((1, 9)) not in near(reader, (1, 2, 3, 4))
    assert look(reader, (1, 2, 3, 4)) == (trail_of((1, 9)),)
    assert members(server) == [trail_of((1, 9))]
    reader.close()


def test_a_chunk_that_came_back_is_named_again(server: RedisServer, tier: RedisTier) -> None:
    """The chunk was computed again between the check that it is gone and the removal of its trail."""
    reader = open_redis(url_of(server))
    put(tier, (1, 2, 3))
    tier.remove([ref_of((1, 2, 3))])
    near(reader, (1, 2))
    assert reader.contains([ref_of((1, 2, 3))]) == [False]
    near(reader, (1, 2))  # finds that it is gone
    put(tier, (1, 2, 3))
    near(reader, (1, 2))  # removes it, and sees that it is there
    assert members(server) == []
    assert near(reader, (1, 2)) == (trail_of((1, 2, 3)),)
    reader.close()


def test_chunks_that_are_evicted_leave_few_trails(server: RedisServer) -> None:
    """Without lookups, the puts of any engine remove trails. The oldest chunk makes room for the newest."""
    tiers, admin = [open_redis(url_of(server)) for _ in range(2)], server.admin()
    paths = random_paths(random.Random(1), 1000)
    for number, path in enumerate(paths):
        assert put(tiers[number % 2], path) == STORED
        if number >= 200:
            admin.unlink(*tiers[0]._io.keys(tiers[0]._home, ref_of(paths[number - 200])))
        if number % 100 == 99:
            told = set(members(server))
            assert {trail_of(path) for path in paths[max(0, number - 199) : number + 1]} <= told
            assert len(told) < 2 * 200, "a third more, and those that engines are about to take out"
    for tier in tiers:
        tier.close()


def test_a_server_that_evicts(tmp_path: FilePath) -> None:
    """The server evicts by frequency, because by age it distinguishes only seconds, and sets are as old as chunks."""
    server = RedisServer(tmp_path / "server", ["maxmemory 24mb", "maxmemory-policy allkeys-lfu"])
    with running(server):
        tier = open_redis(url_of(server))
        paths = random_paths(random.Random(1), 600)
        for path in paths:
            assert put(tier, path) in (STORED, [Outcome.FAILED])
        held = tier.contains([*map(ref_of, paths)])
        there = {trail_of(path) for path, is_there in zip(paths, held, strict=True) if is_there}
        told = set(members(server))
        assert there & told, "but for a set that it may have taken by chance"
        assert len(told) < 2 * len(there) + 4 * CHECKED
        tier.close()


def test_keys_and_bytes(server: RedisServer, tier: RedisTier) -> None:
    """Trails take at most 5% more, with 300 chunks that hardly share first blocks."""
    admin: Any = server.admin()
    rng = random.Random(2)
    paths = [tuple(rng.randrange(256) for _ in range(8)) for _ in range(300)]
    assert set(put(tier, *paths)) == {Outcome.STORED}
    used = {key: admin.memory_usage(key, samples=0) for key in admin.scan_iter("*", 1000)}
    more = {key: size for key, size in used.items() if key.endswith(b"}:t")}
    assert len(more) == SETS
    assert len(more) <= 0.05 * (len(used) - len(more))
    assert sum(more.values()) <= 0.05 * (sum(used.values()) - sum(more.values()))
    assert sum(more.values()) <= 1024 * len(paths)


def test_no_round_trip_more(server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trails add no round trips to a put, even if it looks for chunks of others; ``nearest`` costs one."""
    sent: list[RedisConnection] = []
    send = RedisConnection.send

    def counted(connection: RedisConnection, pieces: Iterable[Buffer]) -> None:
        sent.append(connection)
        send(connection, pieces)

    monkeypatch.setattr(RedisConnection, "send", counted)

    def cost(action: Any) -> int:
        sent.clear()
        action()
        return len(sent)

    paths = random_paths(random.Random(3), 40)
    put_as_before(tier, (1, 2))  # connects
    before = cost(lambda: put_as_before(tier, (1, 2)))
    assert [cost(lambda path=path: put(tier, path)) for path in paths] == [before] * 40
    tier.remove([*map(ref_of, paths)])
    assert [cost(lambda path=path: near(tier, path)) for path in paths] == [1] * 40
    tier.contains([*map(ref_of, paths)])
    assert [cost(lambda path=path: near(tier, path)) for path in paths] == [1] * 40
    assert members(server) == []


def test_a_clear_takes_the_trails_with_it(server: RedisServer, tier: RedisTier) -> None:
    put(tier, (1, 2, 3))
    other = open_redis(url_of(server), namespace=OTHER)
    put(other, (1, 2, 3))
    tier.clear()
    assert near(tier, (1, 2, 3)) == ()
    assert near(other, (1, 2, 3)) == (trail_of((1, 2, 3)),)
    assert members(server) == [trail_of((1, 2, 3))]
    other.reset(Namespace({"model": "third"}))
    assert members(server) == []
    other.close()


def test_a_put_that_a_clear_overtook_leaves_no_trail(
    server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clear and its sweep run between the write of the chunk and that of its trail."""
    tell = tier._trails.tell

    def after_a_clear(*arguments: Any) -> Any:
        monkeypatch.undo()
        tier.clear()
        return tell(*arguments)

    monkeypatch.setattr(tier._trails, "tell", after_a_clear)
    assert put(tier, (1, 2, 3)) == [Outcome.FAILED]
    assert members(server) == []
    assert values(server) == {}
    assert put(tier, (1, 2, 3)) == STORED
    assert near(tier, (1, 2, 3)) == (trail_of((1, 2, 3)),)


def test_sweeps_and_tools_take_a_set_for_a_chunk_without_blocks(server: RedisServer, tier: RedisTier) -> None:
    """Even sweeps and tools of engines without trails do, because ``parse``, which they use, has not changed."""
    put(tier, (1, 2, 3), (2, 3))
    home = tier._home
    (found,) = (
        home.parse(key) for key in server.admin().keys("kvs:{*}:t") if key == home.trails_key(key_of((1,))[0] % 16)
    )
    assert found is not None
    tier._calls.sweep(home)
    assert len(members(server)) == 2
    inventory = RedisInventory(url_of(server), {})
    places = inventory.places()
    assert {place.ref for place in places} == {ref_of((1, 2, 3)), ref_of((2, 3))}
    inventory.layout(home, places)
    assert [inventory.check(place) for place in places] == [None, None]
    inventory.remove(places)
    assert len(members(server)) == 2
    inventory.close()
    assert look(tier, (1, 2, 3)) == ()


def test_a_time_to_live(server: RedisServer) -> None:
    tier = open_redis(url_of(server), ttl_s=100)
    put(tier, (1, 2, 3))
    (key,) = server.admin().keys("kvs:{*}:t")
    assert 0 < server.admin().ttl(key) <= 100
    tier.close()


@pytest.mark.parametrize("foreign", ["other type", "junk"])
def test_something_else_is_in_their_place(server: RedisServer, tier: RedisTier, foreign: str) -> None:
    admin: Any = server.admin()
    put(tier, (1, 2, 3))
    own = trail_of((1, 2, 3))
    for number in range(SETS):
        key = tier._home.trails_key(number)
        if foreign == "other type":
            admin.set(key, "x")
        else:
            junk = [b"", b"x", own[:16] + b"x", own[:16] + bytes(range(256)) * 40, own + own[:16] * 9, bytes(16 * 8)]
            admin.zadd(key, dict.fromkeys(junk, 0))
    assert near(tier, (1, 2, 9)) == ((own,) if foreign == "junk" else ())
    assert set(put(tier, *random_paths(random.Random(4), 40))) == {Outcome.STORED}
    assert get(tier, ref_of((1, 2, 3))) is Outcome.HIT
    assert tier.contains([ref_of((1, 2, 3))]) == [True]


@pytest.mark.parametrize("lack", ["no rights", "no such commands"])
def test_a_server_without_sorted_sets(tmp_path: FilePath, lack: str, caplog: pytest.LogCaptureFixture) -> None:
    """All else works, and one line of the log says what does not."""
    names = ("ZADD", "ZCARD", "ZRANGE", "ZRANGEBYLEX", "ZREVRANGEBYLEX", "ZREM")
    user = " ".join(right for right in ACL_USER.split() if not right.startswith("+z"))
    options = [user] if lack == "no rights" else [f'rename-command {name} ""' for name in names]
    login = "kvstore:s3cret@" if lack == "no rights" else ""
    server = RedisServer(tmp_path / "server", options)
    with running(server):
        tier = open_redis(f"redis://{login}127.0.0.1:{server.port}")
        tier.check()
        paths = random_paths(random.Random(5), 40)
        assert set(put(tier, *paths)) == {Outcome.STORED}
        assert {near(tier, path) for path in paths} == {()}
        assert all(tier.contains([*map(ref_of, paths)]))
        assert get(tier, ref_of(paths[0])) is Outcome.HIT
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "parts of chunks" in caplog.text
        tier.clear()
        tier.close()


def test_a_cluster(tmp_path: FilePath) -> None:
    """The sets are spread over the nodes. While a node is down, those of the others answer, and chunks are stored."""
    servers = start_cluster(tmp_path, options=["cluster-require-full-coverage no"])
    try:
        tier = open_redis(f"redis-cluster://127.0.0.1:{servers[0].port},127.0.0.1:{servers[1].port}")
        paths = random_paths(random.Random(6), 60)
        assert set(put(tier, *paths)) == {Outcome.STORED}
        assert all(members(server) for server in servers)
        assert all(near(tier, path)[0] == trail_of(path) for path in paths)
        assert tier.nearest([trail_of(path) for path in paths]) == [near(tier, path) for path in paths]
        epoch_owner = tier._calls.nodes.node_of(tier._home.epoch_tag).address.port
        victim = next(server for server in servers if server.port != epoch_owner)
        lost = {trail_of(path) for path in paths if trail_of(path) in members(victim)}
        tags = {path: tier._home.tag(ref_of(path)) for path in paths}
        reached = [path for path in paths if tier._calls.nodes.node_of(tags[path]).address.port != victim.port]
        victim.kill()
        assert all(near(tier, path)[:1] == (() if trail_of(path) in lost else (trail_of(path),)) for path in paths)
        assert set(put(tier, *reached)) == {Outcome.STORED}
        ends(tier.close)
    finally:
        for server in servers:
            server.kill()
