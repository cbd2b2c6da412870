"""Keys of ``kvstore serve``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstore.config.keys.base import Keys, Seconds, Text


class ServerKeys(Keys):
    """The cache server. An engine reads the key files only, for the server that its workers open."""

    server_listen: Text = None
    """Where `kvstore serve` listens: `kvs+ipc:///folder` for this host, `kvs://host:port` for other hosts, or both with
    a comma between them (see [server.md](server.md)). Engines ignore keys that begin with `server_`, except the key
    files where `pd_peer_init_port` is set."""
    server_key_file: Text = None
    """File with the server's secret key. Needed to listen on an address that other hosts can reach."""
    server_clients: Text = None
    """Folder with the public keys of the clients on other hosts."""
    server_operators: Text = None
    """Which of `server_clients` may also clear, pin and explain from another host: names with commas between them, or
    `*` for all that may connect. If null, only the server's own user may, over `kvs+ipc://`."""
    server_quotas: Text = None
    """How many GiB a namespace may hold at the server, by model or by id: `my-model=40, *=10`. If null, there is no
    limit but the server's size."""
    server_http_port: Annotated[int | None, Field(ge=0, le=65_535)] = None
    """Loopback port for `/metrics` and `/healthz` of the server; 0 for any free port. If null, none."""
    server_drain_secs: Seconds = Field(default=30.0, ge=0)
    """How long the server may go on writing to disk after it is told to end."""
