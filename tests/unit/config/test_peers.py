"""Keys of disaggregated prefill and of peers: LMCache's forms, refusals, and engines that may be named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import StoreConfig, load_config
from kvstore.model.errors import ConfigError

# As in LMCache's own examples.
SENDER = """\
local_cpu: false
max_local_cpu_size: 5.0
enable_pd: true
transfer_channel: "nixl"
pd_role: "sender"
pd_proxy_host: "localhost"
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
"""
RECEIVER = """\
local_cpu: false
max_local_cpu_size: 5.0
enable_pd: true
transfer_channel: "nixl"
pd_role: "receiver"
pd_peer_host: "localhost"
pd_peer_init_port: 7300
pd_peer_alloc_port: 7400
pd_buffer_size: 2147483648
pd_buffer_device: "cuda"
nixl_backends: [UCX]
"""
KEYS_GIVEN = {"server_key_file": "/k/server.key", "server_clients": "/k/clients"}


def load(**values: object) -> StoreConfig:
    return load_config({f"kvstore.{key}": value for key, value in values.items()}, environ={}).config


class TestLMCachesFiles:
    def test_a_receiver(self, tmp_path: Path) -> None:
        file = tmp_path / "decoder.yaml"
        file.write_text(RECEIVER)
        loaded = load_config(path=file, environ={})
        config = loaded.config
        assert config.listens
        assert (config.pd_role, config.pd_peer_host, config.pd_peer_init_port) == ("receiver", "localhost", 7300)
        assert config.pd_buffer_size == 2 << 30
        named = {warning.split(": ")[1] for warning in loaded.warnings}
        assert named == {"pd_peer_alloc_port", "pd_buffer_device", "nixl_backends"}
        assert config.transfer_channel == "nixl"

    def test_a_sender(self, tmp_path: Path) -> None:
        file = tmp_path / "prefiller.yaml"
        file.write_text(SENDER)
        loaded = load_config(path=file, environ={})
        assert not loaded.config.listens
        assert loaded.config.has_remote
        named = {warning.split(": ")[1] for warning in loaded.warnings}
        assert named == {"pd_proxy_host", "pd_proxy_port", "pd_buffer_device"}

    def test_a_sender_that_names_the_receivers_port_does_not_listen_there(self) -> None:
        values = {"enable_pd": True, "pd_role": "sender", "pd_peer_host": "10.0.0.1", "pd_peer_init_port": [7300]}
        assert not load(**values).listens
        with pytest.raises(ConfigError, match="so it needs server_key_file"):
            load(**values, pd_bidirectional=True)
        assert load(**{**values, "pd_peer_host": "localhost"}, pd_bidirectional=True).listens

    @pytest.mark.parametrize("size", ["0", "0.0"])
    def test_without_memory(self, tmp_path: Path, size: str) -> None:
        """KV passes through memory, so there must be some."""
        file = tmp_path / "pd.yaml"
        file.write_text(f"max_local_cpu_size: {size}\nenable_pd: true\n")
        loaded = load_config(path=file, environ={})
        assert loaded.config.max_local_cpu_size == 5.0
        assert loaded.origins["max_local_cpu_size"] == "default"
        assert loaded.warnings == (
            f"file {file}, line 1: max_local_cpu_size: 5.0 GiB instead of 0: hand-overs need it",
        )
        with pytest.raises(ConfigError, match="must be greater than 0"):
            load(max_local_cpu_size=0)

    @pytest.mark.parametrize(("given", "expected"), [([7300], (7300,)), ([7300, 7310], (7300, 7310)), (7300, 7300)])
    def test_ports(self, given: object, expected: object) -> None:
        assert load(enable_pd=True, pd_peer_init_port=given).pd_peer_init_port == expected

    def test_switched_off_it_warns_of_nothing(self, tmp_path: Path) -> None:
        file = tmp_path / "off.yaml"
        file.write_text("enable_pd: false\npd_peer_init_port: 7300\npd_peer_host: 10.0.0.1\n")
        loaded = load_config(path=file, environ={})
        assert loaded.warnings == ()
        assert not loaded.config.listens

    def test_a_port_without_the_switch_warns(self) -> None:
        (warning,) = load_config({"kvstore.pd_peer_init_port": 7300}, environ={}).warnings
        assert "pd_peer_init_port: ignored: enable_pd is not set" in warning

    def test_without_a_pool_of_its_own_an_engine_with_peers_keeps_something(self) -> None:
        assert load_config({"kvstore.local_cpu": False, "kvstore.enable_pd": True}, environ={}).warnings == ()
        assert len(load_config({"kvstore.local_cpu": False}, environ={}).warnings) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"enable_pd": True, "pd_peer_init_port": 0}, "pd_peer_init_port: 0: must be a port"),
            ({"enable_pd": True, "pd_peer_init_port": 70_000}, "must be a port"),
            ({"enable_pd": True, "pd_peer_init_port": []}, "must be a port"),
            ({"pd_role": "prefill"}, "must be one of sender, receiver, both"),
            ({"pd_buffer_size": 0}, "must be greater than 0"),
            ({"peers": "host:7300"}, "kvs://10.0.0.5:7300"),
            ({"peers": "kvs+ipc:///run/kvstore"}, "kvs://10.0.0.5:7300"),
            ({"peers": ["kvs://host:x"]}, "kvs://10.0.0.5:7300"),
        ],
    )
    def test_values(self, values: dict[str, object], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            load(**values)

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "node-7", "::"])
    def test_addresses_that_others_can_reach_need_keys(self, host: str) -> None:
        values = {"enable_pd": True, "pd_peer_init_port": 7300, "pd_peer_host": host}
        with pytest.raises(ConfigError, match="so it needs server_key_file and server_clients"):
            load(**values)
        with pytest.raises(ConfigError, match="so it needs server_key_file and server_clients"):
            load(**values, server_key_file="/k/server.key")
        assert load(**values, **KEYS_GIVEN).listens
        assert not load(enable_pd=True, pd_peer_host=host).listens, "it does not listen"

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("redis://Cache:6379/2", "redis://cache:6379/2"),
            ("redis://me:se/cr@t@cache:6379?password=secret", "redis://cache:6379"),
            ("redis://cache?password=sec@ret", None),
            ("kvs+ipc:///run/kvstore", "kvs+ipc:///run/kvstore"),
            ("pack:///where/nothing/is/written", None),
            ("lm://host:1", None),
        ],
    )
    def test_a_shared_tier_has_a_name_without_a_login(self, url: str, name: str | None) -> None:
        for port in (None, 7300):
            assert load(enable_pd=True, pd_peer_init_port=port, remote_url=url).shared_name == name

    def test_a_tier_of_lmcaches_is_no_remote_tier(self) -> None:
        assert load(enable_pd=True, pd_peer_init_port=7300, remote_url="lm://host:1").listens


class TestPeers:
    @pytest.mark.parametrize(
        "value",
        ["kvs://a:1, kvs://b:2", ["kvs://a:1", "kvs://b:2"], ("kvs://a:1", "kvs://b:2"), " kvs://a:1,kvs://b:2,"],
    )
    def test_forms(self, value: object) -> None:
        assert load(peers=value).peers == ("kvs://a:1", "kvs://b:2")

    def test_from_the_environment_and_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "kv.yaml"
        file.write_text("peers:\n  - kvs://[::1]:7300\n")
        assert load_config(path=file, environ={}).config.peers == ("kvs://[::1]:7300",)
        environ = {"KVSTORE_PEERS": "kvs://a:1,kvs://b:2", "KVSTORE_PD_ALLOWED_HOSTS": "a, b"}
        config = load_config(path=file, environ=environ).config
        assert config.peers == ("kvs://a:1", "kvs://b:2")
        assert config.pd_allowed_hosts == ("a", "b")

    def test_engines_that_come_and_go(self) -> None:
        """They are no listed hosts, as only the engine that runs knows them."""
        config = load(peers="kvs+dns://engines:7300, kvs://a:1, kvs+file:///run/peers", **PAIRS)
        assert config.watched_peers == ("kvs+dns://engines:7300", "kvs+file:///run/peers")
        assert (config.fixed_peers, config.has_remote) == (("kvs://a:1",), True)
        assert config.sources == {("a", 1)}
        assert not config.allows_host("engines")
        assert load(peers="kvs+dns://engines:7300").has_remote

    @pytest.mark.parametrize(
        "url",
        ["kvs+dns://engines", "kvs+srv://engines:1", "kvs+file:run", "kvs://a:1?x=1#,", "kvs+dns://e:1?nameserver=x"],
    )
    def test_a_wrong_one_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="peers"):
            load(peers=[url, "redis://h:1"])

    def test_none(self) -> None:
        assert load(peers="").peers == ()
        assert not load().has_remote

    def test_options_in_their_addresses_are_not_shown(self) -> None:
        shown = load(peers="kvs://a:1?client_key_file=/secret").shown()
        assert shown["peers"] == ["kvs://a:1?client_key_file=***"]


@pytest.mark.parametrize(
    ("values", "host", "is_allowed"),
    [
        ({}, "127.0.0.1", True),
        ({}, "localhost", True),
        ({}, "::1", True),
        ({}, "10.0.0.1", False),
        ({"pd_peer_host": "Node-7"}, "node-7", True),
        ({"peers": "kvs://Node-8:7300,kvs://10.0.0.1:7300"}, "NODE-8", True),
        ({"peers": "kvs://Node-8:7300,kvs://10.0.0.1:7300"}, "10.0.0.1", True),
        ({"peers": "kvs://Node-8:7300"}, "node-9", False),
        ({"pd_allowed_hosts": "node-9"}, "node-9", True),
        ({"pd_allowed_hosts": "node-9"}, "127.0.0.1", False),
        ({"pd_allowed_hosts": []}, "localhost", False),
        ({}, "", False),
    ],
)
def test_hosts_that_requests_may_name(values: dict[str, object], host: str, *, is_allowed: bool) -> None:
    assert load(**values).allows_host(host) is is_allowed


PAIRS = {"enable_pd": True, "pd_bidirectional": True}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (PAIRS, set()),
        ({**PAIRS, "pd_peer_host": "node-1"}, set()),
        ({**PAIRS, "pd_allowed_hosts": "node-1, 127.0.0.1"}, set()),
        ({**PAIRS, "pd_allowed_hosts": "Node-1:7300, node-2"}, {("node-1", 7300)}),
        ({**PAIRS, "pd_allowed_hosts": ["[::1]:7300", "::1", "fe80::1"]}, {("::1", 7300)}),
        ({**PAIRS, "peers": "kvs://Node-1:7300,kvs://10.0.0.1:7301"}, {("node-1", 7300), ("10.0.0.1", 7301)}),
        ({**PAIRS, "enable_pd": False, "pd_allowed_hosts": "node-1:7300"}, set()),
        ({**PAIRS, "pd_bidirectional": False, "pd_allowed_hosts": "node-1:7300", "peers": "kvs://b:1"}, set()),
    ],
)
def test_engines_that_requests_may_name_are_listed_with_their_ports(
    values: dict[str, object], expected: set[tuple[str, int]]
) -> None:
    """A host alone is not enough, not even loopback, and none may be named without `pd_bidirectional`."""
    assert load(**values).sources == expected


def test_a_host_with_a_port_may_also_be_sent_to() -> None:
    config = load(pd_allowed_hosts=["node-1:7300", "[::1]:7300", "fe80::1"])
    assert [config.allows_host(host) for host in ("NODE-1", "::1", "FE80::1", "7300")] == [True, True, True, False]


@pytest.mark.parametrize("place", ["node:port", "node:0", "node:65536", ":7300", "node:-1", "[::1]:x"])
def test_a_host_with_what_is_no_port_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"must name hosts, or hosts with a port: 10\.0\.0\.5:7300"):
        load(pd_allowed_hosts=place)
