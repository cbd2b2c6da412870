"""Meaning of cache server URLs, and errors in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.protocol.keyfiles import make_keys
from kvstore.tiers.server.url import ServerTarget, parse_server

GOOD = {
    "kvs+ipc:///run/a%20b": ServerTarget(Path("/run/a b"), "ipc:///run/a b/control"),
    "kvs://host:7?connections=3&timeout_s=0.5": ServerTarget(None, "tcp://host:7", connections=3, timeout_s=0.5),
    "kvs://[::1]:7": ServerTarget(None, "tcp://[::1]:7"),
}
BAD = {
    "kvs+ipc://run/kvstore": "named by a whole path",
    "kvs://host": "kvs://host:port",
    "kvs://host:7/path": "kvs://host:port",
    "kvs://host:99999": "names a wrong port",
    "kvs://[host": "cannot be read",
    "kvs://host:7?connections=0": "'connections' cannot be used: it must be a whole number of 1",
    "kvs://host:7?timeout_s=nan": "'timeout_s' cannot be used: it must be a positive number",
    "kvs://host:7?timeout=1": "no option 'timeout'",
    "kvs://host:7?client_key_file=/no/such.key": "go together",
}


@pytest.mark.parametrize("url", GOOD)
def test_good_urls(url: str) -> None:
    assert parse_server(url, {"connections": None}) == GOOD[url]


@pytest.mark.parametrize("url", BAD)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match=BAD[url]):
        parse_server(url, {})


def test_there_must_be_one() -> None:
    with pytest.raises(ConfigError, match="needs the option 'url'"):
        parse_server(None, {})


def test_keys_are_read_for_the_network_only(tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path, "mine")
    files = {"client_key_file": secret, "server_key_file": str(public)}
    target = parse_server("kvs://host:7", files)
    assert target.keys is not None
    assert target.keys.public == target.server_key == public.read_bytes().strip()
    assert parse_server("kvs+ipc:///run", {"client_key_file": tmp_path / "gone"}).keys is None
