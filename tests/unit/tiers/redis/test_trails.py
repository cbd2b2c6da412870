"""Queries for trails in Redis, and the meaning of answers; ``tests/faults/test_redis_trails.py`` asks real servers."""

from __future__ import annotations

import pytest
from support.diskwork import EVEN
from support.redis_tiers import ref_of, trail_of

from kvstore.model.errors import TierError
from kvstore.tiers.redis import trails
from kvstore.tiers.redis.connection import Reply, pack
from kvstore.tiers.redis.names import Home
from kvstore.tiers.redis.nodes import SlotMovingError
from kvstore.tiers.redis.trails import CALM, CALM_PUTS, CHECKED, REST_S, SETS, Exchange, TrailSets, _Doubt

HOME = Home(bytes(8), b"00112233445566ff")
PATHS = [(number, number) for number in range(200)]


@pytest.fixture
def sets() -> TrailSets:
    return TrailSets(EVEN, None)


def commands(exchange: Exchange) -> list[bytes]:
    return [command for _, asked in exchange.questions for command in asked]


def names(exchange: Exchange) -> set[bytes]:
    """Return the names of the commands."""
    return {command.split(b"\r\n")[2] for command in commands(exchange)}


def pick(sets: TrailSets, home: Home, *paths: tuple[int, ...]) -> None:
    """Let a put have seen trails."""
    told = (0, 0, 1)
    picked = sets.tell(home, ref_of(told), trail_of(told))
    picked.take([len(paths), [trail_of(path) for path in paths], *[1] * (len(picked.questions) - 2)])


def settle(sets: TrailSets, home: Home, reply: Reply | TierError) -> Exchange:
    """Return the next look, all of whose questions get the same answer."""
    exchange, _ = sets.look(home, [trail_of((7,))])
    exchange.take([reply] * len(exchange.questions))
    return exchange


def test_a_chunk_that_is_gone_is_taken_out_and_put_back_if_it_is_there_again(sets: TrailSets) -> None:
    pick(sets, HOME, (1, 2))
    assert names(settle(sets, HOME, 0)) >= {b"EXISTS"}
    exchange = settle(sets, HOME, 1)
    assert names(exchange) >= {b"ZREM", b"EXISTS"}
    assert pack("ZREM", HOME.trails_key(trail_of((1, 2))[0] % SETS), trail_of((1, 2))) in commands(exchange)
    assert names(settle(sets, HOME, 1)) >= {b"ZADD"}
    assert not names(settle(sets, HOME, 1)) & {b"ZADD", b"ZREM", b"EXISTS"}


def test_a_chunk_that_is_there_is_left_alone(sets: TrailSets) -> None:
    pick(sets, HOME, (1, 2))
    settle(sets, HOME, 1)
    assert not names(settle(sets, HOME, 1)) & {b"ZADD", b"ZREM", b"EXISTS"}


def test_a_chunk_that_is_put_is_in_no_doubt(sets: TrailSets) -> None:
    pick(sets, HOME, (1, 2))
    sets.tell(HOME, ref_of((1, 2)), trail_of((1, 2)))
    assert b"EXISTS" not in names(settle(sets, HOME, 0))


def test_another_epoch_has_other_doubts(sets: TrailSets) -> None:
    pick(sets, HOME, (1, 2))
    assert b"EXISTS" not in names(settle(sets, Home(bytes(8), b"ffffffffffffffff"), 0))


def test_a_put_goes_on_with_many_doubts_together(sets: TrailSets) -> None:
    pick(sets, HOME, *PATHS[1:CHECKED])
    assert b"EXISTS" not in names(sets.tell(HOME, ref_of((1,)), trail_of((1,))))
    pick(sets, HOME, *PATHS[CHECKED : CHECKED + 2])
    exchange = sets.tell(HOME, ref_of((1,)), trail_of((1,)))
    assert sum(b"EXISTS" in command for command in commands(exchange)) == CHECKED


def test_where_nothing_is_evicted_few_puts_look(sets: TrailSets) -> None:
    """They do so until one of them sees that a chunk is gone."""

    def looks() -> int:
        return sum(b"ZRANGE" in names(sets.tell(HOME, ref_of((1,)), trail_of((1,)))) for _ in range(2 * CALM_PUTS))

    assert looks() == 2 * CALM_PUTS
    for path in PATHS[:CALM]:
        pick(sets, HOME, path)
        settle(sets, HOME, 1)
    assert looks() == 2
    sets._doubt(HOME, [trail_of((1, 2))], _Doubt.UNSURE)
    settle(sets, HOME, 0)
    assert looks() == 2 * CALM_PUTS


def test_what_is_remembered_is_bounded(sets: TrailSets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trails, "_MAX_DOUBTS", 100)
    monkeypatch.setattr(trails, "_MAX_NAMED", 100)
    pick(sets, HOME, *PATHS)
    assert list(sets._known.doubts) == [trail_of(path) for path in PATHS[100:]]
    for path in PATHS:
        sets.name(HOME, [trail_of(path)], [[trail_of(path)]])
    assert list(sets._known.named) == [ref_of(path) for path in PATHS[100:]]
    sets.note_missing(HOME, [ref_of(path) for path in PATHS])
    assert len(sets._known.named) == 0
    assert len(sets._known.doubts) == 100


@pytest.mark.parametrize(("error", "rests"), [(TierError("no"), True), (SlotMovingError("soon"), False)])
def test_a_set_that_fails_rests(
    sets: TrailSets, monkeypatch: pytest.MonkeyPatch, error: TierError, *, rests: bool
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    other = next(path for path in PATHS if trail_of(path)[0] % SETS != trail_of((7,))[0] % SETS)
    settle(sets, HOME, error)
    assert bool(sets.look(HOME, [trail_of((7, 1))])[0].questions) is not rests
    assert bool(sets.tell(HOME, ref_of((7,)), trail_of((7,))).questions) is not rests
    assert sets.look(HOME, [trail_of(other)])[0].questions
    now_s += REST_S
    assert sets.look(HOME, [trail_of((7, 1))])[0].questions


def test_doubts_rest_while_chunks_cannot_be_looked_for(sets: TrailSets) -> None:
    """In a cluster every put would otherwise wait for a node that is down."""
    pick(sets, HOME, (1, 2))
    exchange, _ = sets.look(HOME, [trail_of((7,))])
    exchange.take([TierError("down"), [], []])
    pick(sets, HOME, (1, 2))
    assert b"EXISTS" not in names(settle(sets, HOME, 0))


@pytest.mark.parametrize("trail", [b"", trail_of((1,)), trail_of((2, 1)), trail_of((1, 2))[1:], trail_of((1,) * 9)])
def test_what_is_not_the_trail_of_the_chunk_is_not_written(sets: TrailSets, trail: bytes) -> None:
    assert sets.tell(HOME, ref_of((1, 2)), trail).questions == []
    assert sets.tell(HOME, ref_of((1, 2)), trail_of((1, 2))).questions != []


def test_the_last_key_of_all(sets: TrailSets) -> None:
    """It has no next one to end a range with."""
    last = b"\xff" * 16
    assert pack("ZRANGEBYLEX", HOME.trails_key(15), b"[" + last, b"+", "LIMIT", 0, 4) in commands(
        sets.look(HOME, [last])[0]
    )
