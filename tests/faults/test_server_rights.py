"""Tests of keys with rights and tenants at a running cache server, from the view of their engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cache_server import serving_tcp
from support.redis_server import wait_for
from support.served import A, B, check_read, open_tier, settle

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.testing.harness import EVEN, MINE, make_transfer
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path, "server")
    said = {"usual": "", "reader": "rights: read", "writer": "rights: write", "root": "rights: operate"}
    said |= {"a": "tenant: a", "b": "tenant: b", "head-of-b": "rights: operate\ntenant: b"}
    for name, lines in said.items():
        public, _ = make_keys(tmp_path / "clients", name)
        public.write_text(public.read_text() + lines + "\n")
    return tmp_path


def locks(keys: Path) -> dict[str, Any]:
    return {"keys": read_pair(keys / "server.key"), "listed": read_list(keys / "clients")}


def files(keys: Path, name: str) -> dict[str, Any]:
    return {"client_key_file": str(keys / f"clients/{name}.key"), "server_key_file": str(keys / "server.pub")}


def test_what_a_key_may_not_is_a_value_and_costs_no_connection(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving_tcp(**locks(keys)) as server:
        tiers = {name: open_tier(server.url, **files(keys, name)) for name in ("usual", "reader", "writer")}
        usual, reader, writer = tiers.values()
        assert usual.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        for _ in range(3):
            assert reader.put([make_transfer(EVEN, A, 1), make_transfer(EVEN, B)]) == [Outcome.FULL] * 2
            reader.remove([A])
        assert check_read(reader, A) is Outcome.HIT
        assert writer.put([make_transfer(EVEN, B)]) == [Outcome.STORED]
        assert check_read(writer, A) is Outcome.MISS
        assert writer.nearest([bytes(16)]) == [()]
        for tier in tiers.values():
            with pytest.raises(TierError, match="Clear needs the right clear, operate"):
                tier.clear()
        assert usual.contains([A, B]) == [True, True]
        assert server.hub.core.denied["reader", "write"] == 9
        assert server.hub.reception.num_malformed == 0
        operator = Operator(parse_server(server.url, files(keys, "root")))
        assert operator.stats()["clients"] >= 1
        assert operator.clear() == 2
        operator.close()
        for tier in tiers.values():
            tier.close()
    assert any("Reserve needs the right write, and this client has read" in r.getMessage() for r in caplog.records)


def test_a_reset_without_the_right_to_clear_leaves_old_chunks_unread(keys: Path) -> None:
    with serving_tcp(**locks(keys)) as server:
        tier = open_tier(server.url, **files(keys, "usual"))
        tier.put([make_transfer(EVEN, A)])
        tier.reset(MINE.at_epoch("next"))
        assert tier.contains([A]) == [False]
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        tier.close()


def test_tenants_are_apart_also_on_disk_and_after_a_restart(keys: Path) -> None:
    disk = DiskOptions(keys / "disk", 64 << 20)

    def each(url: str) -> tuple[ServerTier, ServerTier]:
        one, two = (open_tier(url, **files(keys, name)) for name in ("a", "b"))
        return one, two

    with serving_tcp(disk=disk, **locks(keys)) as server:
        one, two = each(server.url)
        assert one.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        assert two.contains([A]) == [False]
        assert two.put([make_transfer(EVEN, A, 1)]) == [Outcome.STORED]
        settle(server)
        one.close()
        two.close()
    with serving_tcp(disk=disk, **locks(keys)) as server:
        one, two = each(server.url)
        assert check_read(one, A) is Outcome.HIT
        assert check_read(two, A, version=1) is Outcome.HIT
        operator = Operator(parse_server(server.url, files(keys, "head-of-b")))
        assert [space["tenant"] for space in operator.stats()["namespaces"]] == ["b"]
        assert operator.clear() == 1
        operator.close()
        wait_for("those of b are gone", lambda: two.contains([A]) == [False])
        assert check_read(one, A) is Outcome.HIT
        one.close()
        two.close()


def test_an_engines_own_server_serves_one_tenant(keys: Path) -> None:
    options = EmbeddedOptions(1 << 20, "127.0.0.1", 0, **locks(keys))
    with pytest.raises(ConfigError, match=r"several tenants \(none, a, b\)"):
        EmbeddedServer(Namespace({"model": "x"}), EVEN, options)
