"""Meaning of Redis URLs, and errors in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.diskwork import EVEN, MINE

from kvstore.model.errors import ConfigError
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.redis.calls import Calls
from kvstore.tiers.redis.nodes import SlotMovedError
from kvstore.tiers.redis.url import Address, Deployment, RedisTarget, parse_target

SINGLE, SENTINEL, CLUSTER = Deployment.SINGLE, Deployment.SENTINEL, Deployment.CLUSTER
HERE = (Address("here", 6379),)

GOOD = {
    "redis://here": RedisTarget(SINGLE, HERE),
    "redis://here:7/3": RedisTarget(SINGLE, (Address("here", 7),), db=3),
    "redis://[::1]:7": RedisTarget(SINGLE, (Address("::1", 7),)),
    "redis://me:p%40ss@here": RedisTarget(SINGLE, HERE, username="me", password="p@ss"),
    "redis://:p@s:s@here": RedisTarget(SINGLE, HERE, password="p@s:s"),
    "rediss://here?tls_ca=/a%20b&tls_check_hostname=no": RedisTarget(
        SINGLE, HERE, tls=True, tls_ca="/a b", tls_check_hostname=False
    ),
    "unix:///run/redis.sock?db=2": RedisTarget(SINGLE, (Address("/run/redis.sock", 0),), db=2),
    "unix://me:secret@/run/redis.sock": RedisTarget(
        SINGLE, (Address("/run/redis.sock", 0),), username="me", password="secret"
    ),
    "redis-sentinel://one,two:7/chunks/4": RedisTarget(
        SENTINEL, (Address("one", 26379), Address("two", 7)), "chunks", db=4
    ),
    "redis-cluster://me:secret@one:1,two?tls=true&connections=3&timeout_s=0.5&ttl_s=60": RedisTarget(
        CLUSTER,
        (Address("one", 1), Address("two", 6379)),
        username="me",
        password="secret",
        tls=True,
        connections=3,
        timeout_s=0.5,
        ttl_s=60,
    ),
}
BAD = {
    "http://here": "begins with redis://",
    "redis://": "names no host",
    "redis://one,two": "redis-cluster:// names several",
    "redis://here:99999": "wrong port",
    "redis://here/0/1": "at most the number of a database",
    "redis://here/zero": "'db' cannot be used: it must be a whole number of 0",
    "redis://here?connections=0": "'connections' cannot be used: it must be a whole number of 1",
    "redis://here?timeout_s=inf": "'timeout_s' cannot be used: it must be a positive number",
    "redis://here?tls_check_hostname=maybe": "'tls_check_hostname' cannot be used: it must be true or false",
    "redis://here?tsl_ca=x": "no option 'tsl_ca'",
    "unix://relative": "named by its whole path",
    "redis-sentinel://here": "the name of the service",
    "redis-cluster://here/1": "a cluster has no databases",
    "redis-cluster://here?db=1": "a cluster has no databases",
    "redis://[here": "cannot be read",
}


@pytest.mark.parametrize("url", GOOD)
def test_good_urls(url: str) -> None:
    assert parse_target(url, {}) == GOOD[url]


@pytest.mark.parametrize("url", BAD)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match=BAD[url]):
        parse_target(url, {})


def test_options_count_before_the_url() -> None:
    target = parse_target("redis://me:old@here?ttl_s=5", {"password": "new", "ttl_s": 6, "tls_ca": None})
    assert (target.username, target.password, target.ttl_s, target.tls_ca) == ("me", "new", 6, None)


def test_no_password_is_shown() -> None:
    target = parse_target("redis-sentinel://me:hunter2@here/x", {"sentinel_password": "hunter2"})
    assert "hunter2" not in repr(target) + str(target)


def test_options_of_the_tier() -> None:
    with pytest.raises(ConfigError, match="no option 'folder'"):
        open_tier("redis", TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": "redis://here", "folder": "/tmp"}))
    with pytest.raises(ConfigError, match="needs the option 'url'"):
        open_tier("redis", TierSetup(MINE, EVEN, UNBOUNDED_BYTES))
    with pytest.raises(ConfigError, match="1000 bytes: set maxmemory"):
        open_tier("redis", TierSetup(MINE, EVEN, 1000, {"url": "redis://here"}))


class MovingNodes:
    """Two nodes, of which the second has the slot; that is unknown until the map is requested again."""

    def __init__(self) -> None:
        self.known = "former"

    def node_of(self, tag: bytes) -> MovingNodes:
        return self

    def forget(self, failed: object = None) -> None:
        self.known = "present"

    @contextmanager
    def connection(self) -> Iterator[str]:
        yield self.known


def test_a_call_follows_a_slot_to_its_node() -> None:
    nodes: Any = MovingNodes()
    asked = []

    def action(connection: Any) -> str:
        asked.append(connection)
        if connection == "former":
            raise SlotMovedError("moved")
        return "done"

    assert Calls(parse_target("redis-cluster://here", {}), nodes).at(b"tag", action) == "done"
    assert asked == ["former", "present"]


def test_a_password_that_is_none_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"'password' cannot be used: it must be a text$") as caught:
        parse_target("redis://here", {"password": 271828})
    assert caught.value.__cause__ is None
