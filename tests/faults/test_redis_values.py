"""Tests of damaged, evicted and replaced values in Redis, and of several clients: misses, and no wrong byte."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.diskwork import OTHER, get, make_ref, put
from support.redis_server import RedisServer, running
from support.redis_tiers import LARGE, REFS, WHOLE, ends, get_large, keys_of, killed, open_redis, put_large, values

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.redis.chunk import UNCOMMITTED_TTL_S, ChunkIO
from kvstore.tiers.redis.connection import RedisConnection, Reply, pack
from kvstore.tiers.redis.tier import RedisTier


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


@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("damage", ["flipped", "other type", "cut", "grown", "of another chunk", "gone", "expired"])
def test_a_damaged_key(server: RedisServer, tier: RedisTier, damage: str, number: int) -> None:
    """A chunk with a damaged commit, first part or last part is lost and removed as a whole; others are served."""
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
    assert len(values(server)) == 12
    assert put_large(tier, WHOLE[1]) == [Outcome.STORED]
    assert get_large(tier, WHOLE[1]) is Outcome.HIT


def test_half_a_chunk(server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that were never committed expire; parts that have lost their commit are removed by the next read."""
    put_large(tier, WHOLE[0])
    monkeypatch.setattr(tier._io, "commit", killed)
    with pytest.raises(TierError, match="killed"):
        put_large(tier, WHOLE[1])
    leftovers = [key for key in keys_of(server, WHOLE[1]) if b":w" in key]
    assert len(leftovers) == 5
    assert all(0 < server.admin().ttl(key) <= UNCOMMITTED_TTL_S for key in leftovers)
    again = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
    assert again.contains(WHOLE[:2]) == [True, False]
    assert get_large(again, WHOLE[1]) is Outcome.MISS
    server.admin().delete(*[key for key in keys_of(server, WHOLE[0]) if key.endswith(b"}:c")])
    assert len(keys_of(server, WHOLE[0])) == 5
    assert get_large(again, WHOLE[0]) is Outcome.MISS
    assert keys_of(server, WHOLE[0]) == []
    assert again.counters.corrupt == 0
    again.close()


def test_evicted_parts(tmp_path: Path) -> None:
    """A server that evicts any keys causes misses and no errors, and a read removes the rest of a chunk."""
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
            is_whole = get_large(tier, ref) is Outcome.HIT
            keys = tier._io.keys(tier._home, ref)  # not those of an epoch whose key was evicted
            there = [key in values(server) for key in keys]
            assert all(there) if is_whole else not any(there[:4]), "what nobody asked for ages out"
        tier.close()


def test_chunks_expire(server: RedisServer) -> None:
    tier = open_redis(f"redis://127.0.0.1:{server.port}", ttl_s=1)
    put(tier, *REFS)
    assert all(0 < server.admin().pttl(key) <= 1000 for key in values(server))
    time.sleep(1.1)
    assert not any(tier.contains(REFS))
    assert all(get(tier, ref) is Outcome.MISS for ref in REFS)
    tier.close()


def test_chunks_stay_for_good(server: RedisServer) -> None:
    """Committed chunks do not expire, although their parts were written under names that do."""
    tier = open_redis(f"redis://127.0.0.1:{server.port}")
    put(tier, *REFS)
    assert {server.admin().pttl(key) for key in values(server)} == {-1}
    tier.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_replaces_a_damaged_chunk_is_not_removed_with_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another client stores the chunk again just before or after a reader's second look at the damaged one."""
    one, other = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    put(one, REFS[0])
    part = next(key for key in values(server) if not key.endswith(b":c"))
    server.admin().setrange(part, 100, b"damaged")
    real_ask = RedisConnection.ask

    def ask(connection: RedisConnection, commands: Sequence[bytes]) -> list[Reply]:
        if not any(b"}:c" in command for command in commands):
            return real_ask(connection, commands)
        monkeypatch.undo()
        if when == "before":
            put(other, REFS[0])
        found = real_ask(connection, commands)
        if when == "after":
            put(other, REFS[0])
        return found

    monkeypatch.setattr(RedisConnection, "ask", ask)
    assert get(one, REFS[0]) is Outcome.HIT
    assert other.contains(REFS[:1]) == [True]
    for tier in (one, other):
        tier.close()


def test_a_write_whose_answer_is_lost_may_be_there(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk is stored here, but the caller learns only that the outcome is unknown."""
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
    assert sum(values(server).values()) == 2 * tier.counters.bytes_written
    assert get(tier, REFS[0]) is Outcome.HIT
    tier.close()


def test_half_a_reply_is_read_by_nobody_else(server: RedisServer, tier: RedisTier) -> None:
    """Otherwise it would be taken for the answer to the next request on that connection."""
    (node,) = tier._calls.nodes.masters()

    def cut() -> None:
        with node.connection() as connection:
            connection.send([pack("ECHO", "of the call that was cut")])
            raise ConnectionResetError

    with node.connection() as connection:
        connection.call("PING")
    server.admin().execute_command("CLIENT PAUSE", 300, "ALL")  # so that nothing has arrived at its next use
    with pytest.raises(TierError):
        cut()
    with node.connection() as connection:
        assert connection.call("ECHO", "mine") == b"mine"


def test_a_sweep_that_began_before_a_clear_leaves_what_came_after_it(server: RedisServer) -> None:
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    put(one, *REFS)
    before = one._home
    two.clear()
    put(two, *REFS[:2])
    one._calls.sweep(before)
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
        two._calls.renew(two._current_home())  # as a clear that has not swept yet
        return ended

    monkeypatch.setattr(ChunkIO, "commit", commit)
    assert put(one, REFS[0]) == [Outcome.FAILED]
    assert values(server) == {}
    for tier in (one, two):
        tier.close()


def test_clear_is_for_everybody(server: RedisServer) -> None:
    """Chunks cleared by another client are gone at once, and chunks that it stores afterwards are found."""
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    put(one, *REFS)
    assert all(two.contains(REFS))
    two.clear()
    assert not any(one.contains(REFS))
    assert values(server) == {}
    put(two, REFS[0])
    assert get(one, REFS[0]) is Outcome.HIT
    other = open_redis(f"redis://127.0.0.1:{server.port}", namespace=OTHER)
    put(other, REFS[1])
    one.clear()
    assert get(other, REFS[1]) is Outcome.HIT
    for tier in (one, two, other):
        tier.close()


def test_chunks_of_an_epoch_that_has_ended_are_not_there(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are misses although their keys are still there, because the clear was not finished."""
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    put(one, *REFS)
    monkeypatch.setattr(two._calls, "sweep", lambda _home: None)
    two.clear()
    assert values(server)
    assert not any(one.contains(REFS) + two.contains(REFS))
    for tier in (one, two):
        tier.close()


def test_a_put_under_way_during_a_clear(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put of another client during a clear stores nothing, and leaves no bytes."""
    one, two = (open_redis(f"redis://127.0.0.1:{server.port}") for _ in range(2))
    commit = one._io.commit

    def late(*arguments: Any) -> Any:
        two.clear()
        return commit(*arguments)

    monkeypatch.setattr(one._io, "commit", late)
    assert put(one, REFS[0]) == [Outcome.FAILED]
    assert not any(two.contains(REFS) + one.contains(REFS))
    assert values(server) == {}
    one.close()
    two.close()


def test_killed_in_the_middle_of_a_clear(server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks are unreachable although nothing was deleted; the next clear deletes them."""
    put_large(tier, *WHOLE[:3])
    monkeypatch.setattr(tier._calls, "sweep", killed)
    with pytest.raises(TierError, match="killed"):
        tier.clear()
    assert len(values(server)) == 18
    again = open_redis(f"redis://127.0.0.1:{server.port}", LARGE)
    assert not any(again.contains(WHOLE))
    assert get_large(again, WHOLE[0]) is Outcome.MISS
    again.clear()
    assert values(server) == {}
    again.close()


def test_a_lost_epoch_loses_the_chunks(server: RedisServer, tier: RedisTier) -> None:
    """Without the epoch it is unknown if the chunks were cleared, so they are misses."""
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
    put(tier, REFS[0])
    old = open_redis(f"redis://127.0.0.1:{server.port}")
    assert not any(old.contains(REFS))
    new = open_redis(f"redis://127.0.0.1:{server.port}", namespace=OTHER)
    assert get(new, REFS[0]) is Outcome.HIT
    for one in (tier, old, new):
        one.close()


def test_nothing_is_left_after_2000_random_operations(server: RedisServer) -> None:
    """Under two clients of one namespace with restarts, the server holds their last puts, to the byte."""
    url = f"redis://127.0.0.1:{server.port}"
    dice = random.Random(5)
    tiers = [open_redis(url), open_redis(url)]
    held: dict[ChunkRef, int] = {}
    for number in range(2000):
        which = dice.randrange(2)
        tier, ref = tiers[which], make_ref(dice.randrange(30), dice.choice([1, 3, 8, 8]))
        action = dice.random()
        if action < 0.5:
            before = tier.counters.bytes_written
            assert put(tier, ref) == [Outcome.STORED]
            held[ref] = tier.counters.bytes_written - before
        elif action < 0.8:
            assert get(tier, ref) is (Outcome.HIT if ref in held else Outcome.MISS)
        elif action < 0.97:
            gone = [ref, make_ref(dice.randrange(30))]
            tier.remove(gone)
            for one in gone:
                held.pop(one, None)
        elif action < 0.98:
            tier.clear()
            held.clear()
        elif action < 0.985:
            tier.close()
            tiers[which] = open_redis(url)
        if number % 100 == 99:
            assert all(tier.contains(list(held)))
            assert sum(values(server).values()) == sum(held.values())
    for tier in tiers:
        tier.close()
