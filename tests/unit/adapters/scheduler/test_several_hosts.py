"""Workers on several hosts, each with a server that only the workers there use; `support/fake_vllm.py` checks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.divided import Worker
from support.fake_parts import BLOCK, CHUNK
from support.gate import Gate
from support.several_hosts import HostServers, HostsSetup, SeveralHosts

from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.adapters.vllm.scheduler.shards import check_hosts, shards_of, unreached
from kvstore.engine import opening
from kvstore.engine.options import RemoteOptions
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.hosts import this_host

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
WHOLE = len(PROMPT) - 1
LAYOUT = KVLayout(page_bytes=(64,), planes=1, block_tokens=16, chunk_tokens=32)
NEAR = WorkerFacts(16, 4096, 0, (0, 0), [], Namespace({"rank": 0}), LAYOUT)
FAR = replace(NEAR, host="far", namespace=Namespace({"rank": 1}), remote_url="kvs://far:5566")
IPC = RemoteOptions("kvs+ipc:///run/kvstore")

Build = Callable[..., SeveralHosts]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, which live side by side until the end of the test."""
    engines: list[SeveralHosts] = []

    def build_(servers: HostServers, **setup: object) -> SeveralHosts:
        engines.append(SeveralHosts(HostsSetup(server=servers, **setup)))  # type: ignore[arg-type]
        return engines[-1]

    yield build_
    for engine in engines:
        engine.settle()
        engine.assert_nothing_leaked()
        engine.close()


@pytest.fixture
def servers() -> HostServers:
    return HostServers("near", "far", "other")


def loaded(vllm: SeveralHosts, name: str, prompt: list[int] = PROMPT) -> int:
    """Ask with vLLM's own cache empty. Returns the tokens loaded."""
    vllm.forget_local()
    vllm.ask(name, prompt)
    return vllm.loaded_tokens[name]


def filled(build: Build, servers: HostServers, **setup: object) -> SeveralHosts:
    """Return an engine that has stored all of the prompt."""
    vllm = build(servers, **setup)
    vllm.ask("first", PROMPT)
    vllm.settle()
    return vllm


@pytest.mark.parametrize(
    ("hosts", "stages"),
    [(("near", "far"), ()), (("near", "near", "far", "far"), ()), (("far", "other"), ()), (("near", "far"), (2, 40))],
    ids=["two hosts", "two ranks on each", "none where the scheduler is", "stages"],
)
def test_each_host_keeps_the_parts_of_its_workers(
    build: Build, servers: HostServers, hosts: tuple[str, ...], stages: tuple[int, ...]
) -> None:
    how: dict[str, object] = {"hosts": hosts, "ranks": len(hosts), "stages": stages}
    filled(build, servers, **how)
    for host, server in servers.servers.items():
        assert [len(chunks) for chunks in server.chunks.values()] == [4] * hosts.count(host)
    reader = build(servers, **how)
    assert loaded(reader, "again") == WHOLE
    assert [worker._counters().chunks_loaded_from_remote for worker in reader.workers] == [4] * len(hosts)
    assert reader.recovered == 0


@pytest.mark.parametrize("host", ["near", "far"])
def test_a_chunk_that_one_host_lacks_is_not_there(build: Build, servers: HostServers, host: str) -> None:
    filled(build, servers)
    servers.servers[host].lose(servers.servers[host].all_chunks())
    reader = build(servers)
    assert loaded(reader, "again") == 0
    assert reader.recovered == 0, "it was not promised"


@pytest.mark.parametrize("replicas", [("near", "far"), ("near", "near", "far", "far")], ids=["two", "four"])
def test_workers_with_the_same_kv_send_it_once_on_each_host(
    build: Build, servers: HostServers, replicas: tuple[str, ...]
) -> None:
    how: dict[str, object] = {"hosts": replicas, "ranks": len(replicas), "replicas": True}
    filled(build, servers, **how)
    assert [len(servers.servers[host].puts) for host in ("near", "far")] == [4, 4]
    reader = build(servers, **how)
    assert loaded(reader, "again") == WHOLE
    assert [worker._counters().chunks_loaded_from_remote for worker in reader.workers] == [4] * len(replicas)
    servers.servers["far"].lose(servers.servers["far"].all_chunks())
    reader = build(servers, **how)
    assert loaded(reader, "lost there") == 0
    assert reader.recovered == 0, "it was not promised"


def test_a_server_that_fails_makes_a_miss_until_it_is_back(
    build: Build, servers: HostServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PROBE_INTERVAL_S", 0.01)
    filled(build, servers)
    far = servers.servers["far"]

    def broken() -> None:
        raise TierError("broken on purpose")

    far.before_contains = broken
    reader = build(servers, hold_s=0.0, local_cpu=False)
    assert loaded(reader, "broken") == 0
    reader.settle()
    far.before_contains = lambda: None
    assert any(loaded(reader, f"back {number}") == WHOLE for number in range(100))


def test_the_servers_are_asked_at_once_and_one_that_hangs_costs_one_deadline(
    build: Build, servers: HostServers
) -> None:
    filled(build, servers)
    reader, gates = build(servers, lookup_timeout_s=1.0), [Gate(), Gate()]
    for server, gate in zip((servers.servers["near"], servers.servers["far"]), gates, strict=True):
        server.before_contains = gate.before(lambda: None)
    reader.add("hangs", PROMPT)
    reader.step()
    assert all(gate.reached.wait(30) for gate in gates), "both are asked, although neither has answered"
    gates[0].open()
    reader.run()
    assert reader.loaded_tokens["hangs"] == 0
    gates[1].open()


def test_what_cannot_be_asked_for_is_neither_promised_nor_sent(build: Build, servers: HostServers) -> None:
    vllm = filled(build, servers, reached=False)
    assert not any(server.puts or server.questions for server in servers.servers.values())
    assert loaded(vllm, "from memory") == WHOLE


def test_new_weights_on_all_hosts(build: Build, servers: HostServers) -> None:
    vllm = filled(build, servers, local_cpu=False)
    vllm.reset()
    assert loaded(vllm, "again") == 0
    vllm.settle()
    assert loaded(vllm, "once more") == WHOLE
    assert [worker._counters().chunks_loaded_from_remote for worker in vllm.workers] == [4, 4]


# -- addresses --------------------------------------------------------------------------------------------------------


def test_a_worker_elsewhere_is_asked_at_the_address_that_it_told() -> None:
    shards = shards_of([NEAR, FAR], IPC)
    assert [(shard.remote.url, shard.remote.rank) for shard in shards] == [(IPC.url, 0), ("kvs://far:5566", 1)]
    assert unreached([NEAR, FAR]) == []


def test_a_tier_without_an_address_is_not_asked() -> None:
    facts = [NEAR, replace(FAR, remote_url=None)]
    assert shards_of(facts, IPC) == []
    assert unreached(facts) == [1]
    assert shards_of(facts, None) == []


def test_workers_with_the_same_kv_and_one_shared_tier_are_asked_once() -> None:
    shared = RemoteOptions("redis://cache")
    facts = [NEAR, replace(FAR, namespace=NEAR.namespace, remote_url="redis://cache")]
    assert [shard.remote.url for shard in shards_of(facts, shared)] == ["redis://cache"]


def test_other_engines_on_loopback_are_those_of_each_host() -> None:
    peers = ("kvs://127.0.0.1:7300", "kvs://other:7300")
    both = RemoteOptions(None, peers=peers, sources=("kvs://localhost:7400", "kvs://other:7400"))
    near, far = (shard.remote for shard in shards_of([NEAR, replace(FAR, remote_url=None)], both))
    assert (near.peers, len(near.sources)) == (peers, 2)
    assert (far.url, far.peers, far.sources) == (None, peers[1:], ("kvs://other:7400",))
    assert shards_of([NEAR, FAR], replace(both, peers=peers[:1], sources=())) == []


def test_a_worker_elsewhere_that_takes_kv_is_asked_with_the_keys_of_its_server() -> None:
    """The tier that it reads beside its server is that of its host."""
    own = RemoteOptions(None, {"timeout_s": 1.0}, shared=IPC.url, peers=(), peer_settings={"client_key_file": "/k"})
    facts = [replace(worker, server_url=f"kvs+ipc:///run/{worker.host}") for worker in (NEAR, FAR)]
    near, far = (shard.remote for shard in shards_of(facts, own))
    assert (near.url, near.shared, near.settings) == (facts[0].server_url, IPC.url, own.settings)
    assert (far.url, far.shared, far.settings) == ("kvs://far:5566", None, own.peer_settings)
    _, far = (shard.remote for shard in shards_of(facts, replace(own, shared="redis://cache")))
    assert far.shared == "redis://cache"


def test_folders_of_another_host_are_not_looked_at(tmp_path: Path) -> None:
    division = Worker(0, 2).division(1)
    division = replace(division, parts=tuple(part._replace(folders=(tmp_path,)) for part in division.parts))
    facts = [replace(worker, divisions=(division,)) for worker in (NEAR, FAR)]
    near, far = (shard.remote for shard in shards_of(facts, IPC))
    assert [part.folders for part in near.divisions[0].parts] == [(tmp_path,)] * len(division.parts)
    assert not any(part.folders for part in far.divisions[0].parts)
    assert shards_of(facts, RemoteOptions(None, peers=())) == [], "nothing is left to ask for the second"


def test_servers_for_other_engines_are_reached_from_all_hosts() -> None:
    facts = [replace(worker, server_url="kvs+ipc:///run/own") for worker in (NEAR, FAR)]
    check_hosts(facts, IPC)
    with pytest.raises(ConfigError, match="do not reach each other at pd_peer_host"):
        check_hosts([facts[0], replace(facts[1], remote_url=None)], IPC)
    check_hosts([facts[0], replace(facts[1], remote_url=None, host=this_host())], IPC)
    divided = [replace(worker, divisions=(Worker(0, 2).division(1),)) for worker in facts]
    with pytest.raises(ConfigError, match="they cannot divide it"):
        check_hosts(divided, IPC)
    check_hosts([replace(worker, host=this_host()) for worker in divided], IPC)


def test_a_tier_that_is_required_can_be_asked() -> None:
    required, facts = replace(IPC, required=True), [NEAR, replace(FAR, remote_url=None)]
    with pytest.raises(ConfigError, match="worker 1 cannot be asked from here"):
        check_hosts(facts, required)
    check_hosts(facts, IPC)
    check_hosts([NEAR, FAR], required)
    check_hosts(facts, replace(required, url=None, peers=("kvs://other:1",)))


def test_logs_show_no_password_of_a_tier() -> None:
    assert "secret" not in repr(replace(FAR, remote_url="redis://me:secret@cache"))
