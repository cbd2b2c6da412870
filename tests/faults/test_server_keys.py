"""Tests of which clients may connect to a cache server, and with which keys."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cache_server import serving_tcp, short_folder
from support.redis_server import wait_for
from support.served import A, B, check_read, open_tier

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.server.hub import Hub
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.testing.harness import EVEN, make_transfer
from kvstore.tiers.server.tier import ServerTier


class TestKeys:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> Path:
        for name in ("server", "stranger", "other_server"):
            make_keys(tmp_path / name, name)
        make_keys(tmp_path / "clients", "engine")
        return tmp_path

    def options(self, keys: Path) -> dict[str, Any]:
        pair = read_pair(keys / "server/server.key")
        return {"keys": pair, "listed": read_list(keys / "clients")}

    def client(self, keys: Path, name: str, server: str = "server") -> dict[str, Any]:
        return {"client_key_file": str(keys / f"{name}.key"), "server_key_file": str(keys / f"{server}/{server}.pub")}

    @pytest.mark.parametrize("host", ["127.0.0.1", "this host"])
    def test_only_who_is_listed_comes_in(self, keys: Path, caplog: pytest.LogCaptureFixture, host: str) -> None:
        door = TcpAddress(host if host[0].isdigit() else other_address(), 0)
        with caplog.at_level(logging.WARNING), serving_tcp(tcp=door, **self.options(keys)) as server:
            tier = open_tier(server.url, **self.client(keys, "clients/engine"))
            assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
            assert check_read(tier, A) is Outcome.HIT
            strangers: list[dict[str, Any]] = [
                {},
                self.client(keys, "stranger/stranger"),
                self.client(keys, "clients/engine", "other_server"),
            ]
            client_keys = server.hub._client_keys
            assert client_keys is not None
            for options, noticed in zip(
                strangers,
                (
                    lambda: server.hub.num_strangers > 0,
                    lambda: client_keys.refused > 0,
                    lambda: server.hub.num_strangers > 1,
                ),
                strict=True,
            ):
                stranger = open_tier(server.url, timeout_s=1.0, **options)

                def is_noticed(stranger: ServerTier = stranger, noticed: Callable[[], bool] = noticed) -> bool:
                    with pytest.raises(TierError, match="cannot be reached"):
                        stranger.contains([A])
                    return noticed()

                wait_for("the stranger is refused", is_noticed)
                stranger.close()
            assert check_read(tier, A) is Outcome.HIT
            tier.close()
        lines = [record.getMessage() for record in caplog.records]
        assert sum(f"from {door.host}: its key is not in server_clients" in line for line in lines) == 1
        assert sum("has no keys" in line for line in lines) == 1

    def test_this_host_needs_none(self, keys: Path) -> None:
        """A folder of mode 0700 is enough, even if the server also has an address that needs keys."""
        with short_folder() as folder, serving_tcp(folder=folder, **self.options(keys)) as server:
            near = open_tier(f"kvs+ipc://{folder}")
            far = open_tier(f"kvs://127.0.0.1:{server.hub.tcp_port}", **self.client(keys, "clients/engine"))
            assert near.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
            assert far.put([make_transfer(EVEN, B)]) == [Outcome.STORED]
            assert check_read(near, B) is check_read(far, A) is Outcome.HIT
            near.close()
            far.close()

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
    def test_other_addresses_need_keys(self, keys: Path, host: str) -> None:
        door = TcpAddress(host, 0)
        for options in ({}, {"keys": read_pair(keys / "server/server.key")}):
            with pytest.raises(ConfigError, match="kvstore keygen"):
                Hub(ServerOptions(1 << 20, tcp=door, **options))  # type: ignore[arg-type]

    def test_a_secret_key_is_secret(self, keys: Path) -> None:
        path = keys / "server/server.key"
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_pair(path)
        with pytest.raises(ConfigError, match="already exists"):
            make_keys(keys / "server", "server")

    def test_an_open_folder_is_refused(self) -> None:
        with short_folder() as folder:
            folder.chmod(0o755)
            with pytest.raises(ConfigError, match="chmod 700"):
                Hub(ServerOptions(1 << 20, folder=folder))


def other_address() -> str:
    """Return an address of this host that other hosts can reach."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family is socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this host has no address but loopback")
