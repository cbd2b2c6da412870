"""Quotas of salts and tags at running cache servers: engines name them, keys bind them, and no restart forgets them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import ServerProcess, serving_tcp, short_folder
from support.members import Cluster, open_members
from support.redis_server import wait_for
from support.rig import CHUNK, Rig, tokens_of
from support.served import check_quiet, check_read, open_tier, settle
from support.succession import a_line

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import RemoteOptions
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import KeyExtras
from kvstore.model.quotas import QuotaRules, owner_id
from kvstore.protocol import messages
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.exposition import Exposition
from kvstore.server.hub import Hub
from kvstore.testing.harness import EVEN, make_ref, make_transfer
from kvstore.tiers.base import Tier
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.url import parse_server
from kvstore.tools.processes import free_port

RED, BLUE = (KeyExtras(cache_salt=f"a secret of {name}") for name in ("red", "blue"))
PLAIN = KeyExtras()
OLD_VERSION = 4
WAIT_S = 30.0


def gib(chunks: int) -> str:
    """Return the size of chunks of the rig, which take a page each."""
    return repr(chunks * PAGE_BYTES / 2**30)


def quotas(red: int, blue: int) -> str:
    return f"server_quotas: salt:{RED.salt_name}={gib(red)}, salt:{BLUE.salt_name}={gib(blue)}, *={gib(8)}\n"


class Site:
    """A server's process, and the engines at its two addresses, each of one salt."""

    def __init__(self, folder: Path) -> None:
        disk = f"local_disk: {folder}/disk\nmax_local_disk_size: 1\n"
        self.server = ServerProcess(folder, disk, port=free_port())
        self.usual = self.server.config.read_text()
        self.rig = Rig()

    def start(self, red: int, blue: int, *options: str) -> None:
        self.server.config.write_text(self.usual + quotas(red, blue))
        self.server.start(*options)

    def engine(self, url: str) -> CacheEngine:
        return self.rig.open(remote=RemoteOptions(url, {"timeout_s": 10.0}, hold_s=0.0, max_queue=64))

    def store(self, url: str, extras: KeyExtras, seeds: Sequence[int]) -> None:
        with self.engine(url) as engine:
            for seed in seeds:
                self.rig.store(engine, tokens_of(seed, CHUNK), extras=extras)
                assert engine.flush(WAIT_S)
                self.settle()  # what is being written to disk cannot be evicted

    def found(self, extras: KeyExtras, seeds: Sequence[int]) -> list[int]:
        """Return the seeds whose tokens a fresh engine loads; the rig checks every byte."""
        with self.engine(self.server.url) as engine:
            return [seed for seed in seeds if self.rig.retrieve(engine, tokens_of(seed, CHUNK), extras=extras)]

    def stats(self) -> dict[str, Any]:
        with closing(Operator(parse_server(self.server.url, {}))) as operator:
            return operator.stats()

    def counted(self) -> dict[str, int]:
        """Return the chunks that count against each quota."""
        return {quota["name"]: quota["used_bytes"] // PAGE_BYTES for quota in self.stats()["quotas"]}

    def settle(self) -> None:
        wait_for("all is on disk", lambda: self.stats()["tiers"]["disk"]["unwritten"] == 0)


@pytest.fixture
def site() -> Iterator[Site]:
    with short_folder() as folder:
        site = Site(folder)
        try:
            yield site
        finally:
            site.server.kill()


def names(red: int, blue: int, others: int) -> dict[str, int]:
    return {f"salt:{RED.salt_name}": red, f"salt:{BLUE.salt_name}": blue, "*": others}


def test_two_salts_are_bounded_and_no_end_of_the_server_forgets_it(site: Site) -> None:
    site.start(3, 5)
    url, tcp_url = site.server.url, site.server.tcp_url
    site.store(tcp_url, BLUE, range(2))
    site.store(url, PLAIN, range(3))
    site.store(url, RED, range(10))
    assert site.counted() == names(3, 2, 3)
    for end in (site.server.terminate, site.server.kill):
        end()
        site.start(3, 5)
        assert site.counted() == names(3, 2, 3)
    site.start(3, 5, "--take-over")
    assert site.counted() == names(3, 2, 3)
    site.store(tcp_url, RED, [20])
    assert site.counted() == names(3, 2, 3)
    kept = site.found(RED, range(10))
    assert len(kept) == 2
    assert set(kept) < {7, 8, 9}
    assert site.found(RED, [20]) == [20]
    assert site.found(BLUE, range(2)) == [0, 1]
    assert site.found(PLAIN, range(3)) == [0, 1, 2]
    log = site.server.log.read_text()
    assert "secret" not in log
    files = [path for path in site.server.folder.rglob("*") if path.is_file()]
    assert any(path.name == "owners" for path in files)
    assert not any(b"a secret of" in path.read_bytes() for path in files)


def test_what_exceeds_new_quotas_goes_and_what_has_none_any_more_counts_for_all(site: Site) -> None:
    site.start(6, 6)
    site.store(site.server.url, RED, range(6))
    site.store(site.server.url, BLUE, range(4))
    assert site.counted() == names(6, 4, 0)
    for text, expected in (
        (quotas(2, 6), names(2, 4, 0)),
        (f"server_quotas: salt:{RED.salt_name}={gib(2)}, *={gib(3)}\n", {f"salt:{RED.salt_name}": 2, "*": 3}),
        (quotas(2, 1), names(2, 1, 0)),
    ):
        site.server.config.write_text(site.usual + text)
        assert site.server.process is not None
        os.kill(site.server.process.pid, signal.SIGHUP)
        wait_for("the quotas hold", lambda expected=expected: site.counted() == expected)
    assert site.found(RED, range(6)) == [4, 5]
    assert site.found(BLUE, range(4)) == [3]


def used(hub: Hub) -> dict[tuple[str, str], int]:
    return {(of.tenant, of.name): of.used_bytes // PAGE_BYTES for of in hub.stock.spaces.quotas if of.used_bytes}


def put(tier: Tier, refs: Sequence[ChunkRef], owner: bytes) -> None:
    assert tier.put([make_transfer(EVEN, ref)._replace(owner=owner) for ref in refs]) == [Outcome.STORED] * len(refs)


def refs(count: int, first: int = 0) -> list[ChunkRef]:
    return [make_ref(number) for number in range(first, first + count)]


TAGGED = QuotaRules("customer").owner_of("red")
SIZES = {"a/tag:customer/red": 2, "tag:customer/red": 3, "b": 4, "*": 5}
BYTES = {name: count * PAGE_BYTES for name, count in SIZES.items()}


def test_a_key_of_another_tenant_reaches_no_quota_of_this_one(tmp_path: Path) -> None:
    """It names the same owner, and neither fills the quota nor makes room in it, nor reads its chunks."""
    make_keys(tmp_path, "server")
    for name, lines in {"a": "tenant: a", "b": "tenant: b", "none": ""}.items():
        public, _ = make_keys(tmp_path / "clients", name)
        public.write_text(public.read_text() + lines + "\n")
    locks: dict[str, Any] = {"keys": read_pair(tmp_path / "server.key"), "listed": read_list(tmp_path / "clients")}
    disk = DiskOptions(tmp_path / "disk", 64 << 20)
    expected = {("a", "tag:customer/red"): 2, ("b", "b"): 4, ("", "tag:customer/red"): 3}
    with serving_tcp(quotas=BYTES, disk=disk, **locks) as server:
        tiers = {
            name: open_tier(
                server.url,
                client_key_file=str(tmp_path / f"clients/{name}.key"),
                server_key_file=str(tmp_path / "server.pub"),
            )
            for name in ("a", "b", "none")
        }
        put(tiers["a"], refs(2), TAGGED)
        for ref in refs(6):
            for name in ("b", "none"):
                put(tiers[name], [ref], TAGGED)
            settle(server)  # what is being written to disk cannot be evicted
        assert used(server.hub) == expected
        assert tiers["a"].contains(refs(6)) == [True, True, False, False, False, False]
        put(tiers["a"], refs(1, 9), TAGGED)
        assert tiers["b"].contains(refs(10)) == [number in range(2, 6) for number in range(10)]
        assert used(server.hub) == expected
        page = Exposition().page(server.hub.snapshot(WAIT_S))
        assert f'quota_used_bytes{{tenant="a",quota="tag:customer/red"}} {2 * PAGE_BYTES}\n' in page
        assert f'quota_capacity_bytes{{tenant="",quota="tag:customer/red"}} {3 * PAGE_BYTES}\n' in page
        settle(server)
        for tier in tiers.values():
            tier.close()
    with serving_tcp(quotas=BYTES, disk=disk, **locks) as server:
        assert used(server.hub) == expected, "a restart binds them to the tenants, too"


def test_ids_that_nobody_configured_count_for_the_namespace() -> None:
    with serving_tcp(quotas=BYTES) as server:
        tier = open_tier(server.url)
        for number, ref in enumerate(refs(20)):
            put(tier, [ref], owner_id("salt", str(number)))
        assert used(server.hub) == {("", "*"): 5}
        (space,) = server.hub.stock.spaces.values()
        assert not space.accounts
        put(tier, refs(2, 30), b"no id")
        assert used(server.hub) == {("", "*"): 5}
        tier.close()
        check_quiet(server)


def test_other_versions_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client and a server that are one version apart do as before, and a newer client's id stays with the chunk."""
    say_hello = ServerConnection.hello
    versions = {"client": messages.PROTOCOL_VERSION}

    def hello(connection: ServerConnection, *arguments: object) -> object:
        connection.version = versions["client"]
        return say_hello(connection, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerConnection, "hello", hello)
    with serving_tcp(quotas=BYTES) as server:
        new = open_tier(server.url)
        put(new, refs(1), TAGGED)
        versions["client"] = OLD_VERSION
        old = open_tier(server.url)
        put(old, refs(2), TAGGED)
        assert used(server.hub) == {("", "tag:customer/red"): 1, ("", "*"): 1}
        for tier in (old, new):
            assert {check_read(tier, ref) for ref in refs(2)} == {Outcome.HIT}
            tier.close()
    versions["client"] = messages.PROTOCOL_VERSION
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", OLD_VERSION)
    with serving_tcp(quotas=BYTES) as server, closing(open_tier(server.url)) as tier:
        put(tier, refs(2), TAGGED)
        assert {check_read(tier, ref) for ref in refs(2)} == {Outcome.HIT}
        assert used(server.hub) == {("", "*"): 2}


def test_a_successor_counts_the_same_and_its_own_quotas_hold_from_then_on() -> None:
    with a_line(quotas=BYTES) as line:
        tier = open_tier(line.now.url)
        put(tier, refs(3), TAGGED)
        put(tier, refs(2, 10), b"")
        line.succeed()
        assert used(line.now.hub) == {("", "tag:customer/red"): 3, ("", "*"): 2}
        line.succeed(quotas={"tag:customer/red": PAGE_BYTES})
        put(tier, refs(1, 20), TAGGED)
        assert used(line.now.hub) == {("", "tag:customer/red"): 1, ("", ""): 2}
        tier.close()


def test_several_servers_hear_of_owners(tmp_path: Path) -> None:
    with closing(Cluster(tmp_path, 2)) as cluster:
        for server in cluster.servers:
            server.hub.change(replace(server.hub.options, quotas={"tag:customer/red": PAGE_BYTES}), WAIT_S)
        with closing(open_members(cluster.url)) as tier:
            put(tier, refs(12), TAGGED)
            assert [used(server.hub) for server in cluster.servers] == [{("", "tag:customer/red"): 1}] * 2


def test_an_engine_names_what_quota_by_says_without_quotas_of_its_own() -> None:
    rig, tags = Rig(), (("customer", "red"),)
    salted = f"salt:{RED.salt_name}"
    with serving_tcp(quotas=dict.fromkeys([salted, "tag:customer/red"], 4 * PAGE_BYTES)) as server:
        for by, extras in (("salt", RED), ("tag:customer", KeyExtras(tags=tags, cache_salt="another"))):
            remote = RemoteOptions(server.url, {"timeout_s": 10.0}, hold_s=0.0, max_queue=64)
            with rig.open(remote=remote, quotas=QuotaRules.parse(by, None, None)) as engine:
                rig.store(engine, tokens_of(1, 4 * CHUNK), extras=extras)
                assert engine.flush(WAIT_S)
        assert used(server.hub) == {("", salted): 4, ("", "tag:customer/red"): 4}
