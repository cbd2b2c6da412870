"""Memory, sends and addresses of a worker of an engine on several hosts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_objects import cache_config, configured, worker_config
from vllm.config import KVTransferConfig

from kvstore.adapters.vllm.glue import capabilities, parallel
from kvstore.adapters.vllm.glue import options as glue_options
from kvstore.adapters.vllm.glue.opening import open_worker
from kvstore.adapters.vllm.glue.options import engine_options, fitting_config, worker_options
from kvstore.config.schema import StoreConfig
from kvstore.memory import limits
from kvstore.model.errors import ConfigError

pytestmark = pytest.mark.vllm


SOCKET: dict[str, Any] = {"remote_url": "kvs+ipc:///run/kvstore"}
NAMED: dict[str, Any] = {**SOCKET, "remote_host_url": "kvs://{host}:5566"}


@pytest.mark.parametrize(
    ("keys", "first", "sends"),
    [
        (SOCKET, True, True),
        (SOCKET, False, False),
        ({"remote_url": "kvs://10.0.0.5:1", "remote_host_url": "kvs://{host}:1"}, True, True),
        ({"remote_url": "redis://host"}, True, False),
    ],
    ids=["its host's server", "another sends there", "its host's over TCP", "one for all hosts"],
)
def test_of_ranks_that_hold_the_same_one_sends_to_each_hosts_server(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], *, first: bool, sends: bool
) -> None:
    if not capabilities.FOUND[capabilities.COUNTS_REPLICAS]:
        pytest.skip("this vLLM does not tell")
    monkeypatch.setattr(glue_options, "is_first_here", lambda: first)
    cache = cache_config()
    cache.kv_tp_replicas = 4
    remote = engine_options(worker_config(rank=2, tp=4), cache, StoreConfig(**keys)).remote
    assert remote is not None
    assert remote.sends is sends


@pytest.mark.parametrize(
    ("keys", "address", "url"),
    [
        (SOCKET, "10.0.0.6", None),
        (
            NAMED,
            "10.0.0.6",
            "kvs://10.0.0.6:5566",
        ),
        (
            NAMED,
            "fd00::6",
            "kvs://[fd00::6]:5566",
        ),
        (NAMED, "127.0.0.1", None),
        ({"remote_url": "redis://cache"}, "10.0.0.6", "redis://cache"),
        ({}, "10.0.0.6", None),
    ],
    ids=["a socket", "named", "IPv6", "loopback", "shared", "none"],
)
def test_a_worker_tells_where_other_hosts_reach_its_tier(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], address: str, url: str | None
) -> None:
    monkeypatch.setattr(parallel, "get_ip", lambda: address)
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both"))
    assert worker_options(config, cache_config(), StoreConfig(**keys)).remote_url == url


@pytest.mark.parametrize(
    ("host", "url"),
    [("{host}", "kvs://10.0.0.6:7302"), ("10.0.0.5", "kvs://10.0.0.5:7302"), ("127.0.0.1", None)],
    ids=["its own", "named", "loopback"],
)
def test_a_worker_that_takes_kv_tells_where_other_hosts_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, url: str | None
) -> None:
    monkeypatch.setattr(glue_options, "host_address", lambda: "10.0.0.6")
    keys: dict[str, Any] = {"server_key_file": "/k/server.key", "server_clients": "/k/clients"}
    store = StoreConfig(enable_pd=True, pd_peer_init_port=7300, pd_peer_host=host, **keys)
    store = fitting_config(store, cache_config(), logs_change=False)
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_consumer"))
    config.parallel_config = worker_config(rank=2, tp=4).parallel_config
    config.parallel_config.data_parallel_rank = 0
    config.parallel_config.use_ubatching = False
    assert worker_options(config, cache_config(), store).remote_url == url


@pytest.mark.parametrize(
    ("tp", "replicas", "hosts", "here"),
    [(8, 1, 1, 8), (16, 1, 2, 8), (3, 1, 2, 2), (4, 2, 1, 4), (4, 2, 2, 4), (4, 2, 4, 2)],
    ids=["one host", "two", "uneven", "replicas on one host", "replicas on two", "replicas on two each"],
)
def test_memory_is_asked_for_the_workers_of_this_host(
    monkeypatch: pytest.MonkeyPatch, tp: int, replicas: int, hosts: int, here: int
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel, "get_node_count", lambda: hosts)
    config = worker_config(tp=tp)
    config.parallel_config.data_parallel_size = replicas
    asked: list[int] = []

    def require(needed_bytes: int, _purpose: str) -> None:
        asked.append(needed_bytes)
        raise ConfigError("enough for this test")

    monkeypatch.setattr(limits, "require_memory", require)
    config.kv_transfer_config = SimpleNamespace(is_kv_producer=False)
    with pytest.raises(ConfigError, match="enough"):
        open_worker(config, cache_config(), StoreConfig(max_local_cpu_size=1.0), {})
    assert asked == [here << 30]
