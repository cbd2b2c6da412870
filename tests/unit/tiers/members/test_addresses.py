"""Addresses of several cache servers, asked from a real name server, the system, and a file."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.name_server import NameServer

from kvstore.model.errors import ConfigError, TierError
from kvstore.tiers import tier_behind
from kvstore.tiers.members.addresses import MAX_MEMBERS, parse_members
from kvstore.tiers.server.url import parse_server

SERVICE = "_kvs._tcp.cache"
BAD = {
    "kvs://a:1,b": "'b' is no address of a cache server: write host:port",
    "kvs://a:1,": "'' is no address",
    "kvs://a:1,b:0": "'b:0' is no address",
    "kvs://a:1,me@b:1": "'me@b:1' is no address",
    "kvs://a:1,b:99999": "'b:99999' is no address",
    "kvs://a:1,A:1": "each once",
    "kvs://a:1,b:1/path": "names no cache servers: write kvs://host:port,host:port",
    "kvs://" + ",".join(f"h:{port}" for port in range(1, MAX_MEMBERS + 2)): f"at most {MAX_MEMBERS}",
    "kvs://a:1,b:1?nameserver=127.0.0.1": "nameserver=ip:port is for dns and srv only",
    "kvs+dns://cache": "names no cache servers",
    "kvs+dns://cache?nameserver=127.0.0.1": "names no cache servers",
    "kvs+dns://cache:5566/path": "names no cache servers",
    "kvs+dns://cache:99999": "names a wrong port",
    "kvs+dns://cache:1?nameserver=dns.example": "nameserver is 'dns.example': it must be an IP address",
    "kvs+dns://cache:1?nameserver=": "names no cache servers|nameserver is ''",
    "kvs+srv://_kvs._tcp.cache:5566": "names no cache servers",
    "kvs+srv://": "names no cache servers",
    "kvs+file://members": "names no cache servers",
    "kvs+file://": "names no cache servers",
}


@pytest.fixture
def names() -> Iterator[NameServer]:
    with NameServer({}) as server:
        yield server


@pytest.mark.parametrize("url", BAD)
def test_wrong_urls_are_refused(url: str) -> None:
    assert tier_behind(url) == "members"
    with pytest.raises(ConfigError, match=BAD[url]):
        parse_members(url)


@pytest.mark.parametrize("url", ["kvs://a:1,b:1", "kvs+dns://a:1", "kvs+srv://_kvs._tcp.a", "kvs+file:///a"])
def test_commands_for_one_server_refuse_several(url: str) -> None:
    with pytest.raises(ConfigError, match="must be that of one: kvs://host:port"):
        parse_server(url, {})


def test_a_list_is_what_it_says() -> None:
    members = parse_members("kvs://Cache-1:5566,[::1]:7?connections=2&timeout_s=3")
    assert members.find() == [("cache-1:5566", "kvs://Cache-1:5566"), ("[::1]:7", "kvs://[::1]:7")]
    assert members.query == "connections=2&timeout_s=3"


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (["10.0.0.2", "10.0.0.1"], ["10.0.0.1:55", "10.0.0.2:55"]),
        (["fd00::2", "fd00::1"], ["[fd00::1]:55", "[fd00::2]:55"]),
        (["10.0.0.1", "fd00::1"], ["10.0.0.1:55"]),
        ([], []),
    ],
    ids=["IPv4", "IPv6", "both, and each server is one member", "neither"],
)
def test_addresses_of_a_host(names: NameServer, records: list[str], expected: list[str]) -> None:
    names.records["cache.svc"] = records
    members = parse_members(f"kvs+dns://cache.svc:55?nameserver=127.0.0.1:{names.port}&connections=3")
    assert [member.name for member in members.find()] == expected
    assert [member.url for member in members.find()] == [f"kvs://{address}" for address in expected]
    assert members.query == "connections=3"
    assert not members.keeps_names, "addresses change hands"


def test_an_answer_too_long_for_a_datagram(names: NameServer) -> None:
    names.records["cache"] = [f"10.0.{high}.{low}" for high in range(4) for low in range(100)]
    members = parse_members(f"kvs+dns://cache:55?nameserver=127.0.0.1:{names.port}")
    assert len(members.find()) == 400


def test_targets_of_a_service_keep_their_names(names: NameServer) -> None:
    names.records |= {SERVICE: [("KVS-0.cache", 1), ("kvs-1.cache", 2), ("no-address", 3)]}
    names.records |= {"kvs-0.cache": ["10.0.0.1"], "kvs-1.cache": ["fd00::1"], "no-address": []}
    members = parse_members(f"kvs+srv://{SERVICE}?nameserver=127.0.0.1:{names.port}")
    assert members.find() == [("kvs-0.cache:1", "kvs://10.0.0.1:1"), ("kvs-1.cache:2", "kvs://[fd00::1]:2")]
    names.records["kvs-0.cache"] = ["10.0.0.9"]
    assert members.find()[0] == ("kvs-0.cache:1", "kvs://10.0.0.9:1")


@pytest.mark.parametrize("how", ["unknown", "failing", "silent"])
def test_no_answer_is_an_error(names: NameServer, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.members.addresses._ANSWER_WITHIN_S", 0.3)
    names.fails = how == "failing"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1] if how == "silent" else names.port
        for url in (f"kvs+srv://{SERVICE}?", "kvs+dns://cache:1?"):
            with pytest.raises(TierError, match=r"records of .* are not known"):
                parse_members(f"{url}nameserver=127.0.0.1:{port}").find()


def test_the_system_knows_names_of_its_own() -> None:
    """Such as those in /etc/hosts."""
    assert parse_members("kvs+dns://localhost:55").find() == [("127.0.0.1:55", "kvs://127.0.0.1:55")]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70], ids=["unknown", "no name"])
def test_names_that_the_system_does_not_know(host: str) -> None:
    with pytest.raises(TierError, match=r"addresses of .* are not known"):
        parse_members(f"kvs+dns://{host}:55").find()


def test_services_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.resolver", None)
    with pytest.raises(ConfigError, match=r"needs dns.resolver: pip install 'vllm-kvstore\[discovery\]'"):
        parse_members(f"kvs+srv://{SERVICE}")
    parse_members("kvs+dns://cache:55")


def test_a_file_is_read_again_each_time(tmp_path: Path) -> None:
    path = tmp_path / "the members"
    members = parse_members(f"kvs+file://{tmp_path}/the%20members")
    with pytest.raises(TierError, match=r"cannot be read: No such file"):
        members.find()
    path.write_text("# cache servers\n a:1 # the first\n\nb:2\r\n")
    assert [member.name for member in members.find()] == ["a:1", "b:2"]
    new = tmp_path / "new"
    new.write_text("b:2\n")
    new.replace(path)
    assert [member.name for member in members.find()] == ["b:2"]
    path.write_bytes(b"b:2\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="is no address of a cache server"):
        members.find()
    path.write_text("a:1 b:1\n")
    with pytest.raises(ConfigError, match="'a:1 b:1' is no address"):
        members.find()
