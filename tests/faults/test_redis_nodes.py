"""Tests of Redis behind Sentinel and as a cluster, while masters and slots move."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from support.diskwork import get, make_slot, put
from support.redis_server import (
    RedisServer,
    running,
    start_cluster,
    start_sentinel,
    wait_for,
)
from support.redis_tiers import (
    LARGE,
    REFS,
    WHOLE,
    ends,
    get_large,
    open_redis,
    put_large,
    values,
)

from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.base import Transfer
from kvstore.tiers.redis.tier import RedisTier


def test_sentinel_failover(tmp_path: Path) -> None:
    """The tier follows the master; the old one returns as a replica, and nothing is written to it."""
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
    """During the move the chunk cannot be read, and others can; then it is found at its new node."""
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
        assert sum(len(values(server)) for server in servers) == 2 * len(REFS), "a commit and a part each"
        tier.close()
    finally:
        for server in servers:
            server.kill()


def test_a_node_is_lost(tmp_path: Path) -> None:
    """The node's chunks cannot be read, and others can, until the node is back, empty."""
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
            assert isinstance(ends(partial(get, tier, lost[0])), TierError)
            assert ends(lambda: tier.contains(REFS)) == [ref not in lost for ref in REFS]
            assert isinstance(ends(partial(put, tier, lost[0])), TierError)
            for ref in REFS:
                if ref not in lost:
                    assert ends(partial(get, tier, ref)) is Outcome.HIT
                    assert ends(partial(put, tier, ref)) == [Outcome.STORED]
            assert isinstance(ends(tier.clear), TierError | None)
            victim.thaw()
            if harm == victim.freeze:
                wait_for("the node is back", lambda: ends(tier.clear) is None)
                assert set(put(tier, *REFS)) == {Outcome.STORED}
        next(server for server in servers if server.port == epoch_owner).kill()
        assert isinstance(ends(lambda: tier.contains(REFS)), TierError)
        ends(tier.close)
    finally:
        for server in servers:
            server.kill()
