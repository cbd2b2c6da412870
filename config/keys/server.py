"""Keys of ``kvstore serve``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstore.config.keys.base import Keys, Seconds, Text


class ServerKeys(Keys):
    """The cache server. An engine reads the key files only, for the server that its workers open."""

    server_listen: Text = None
    """Address of `kvstore serve`: `kvs+ipc:///folder` for this host, `kvs://host:port` for other hosts, or both with a
    comma between them ([server.md](server.md)). Engines ignore `server_` keys, except the key files where
    `pd_peer_init_port` is set."""
    server_key_file: Text = None
    """File with the server's secret key. Needed to listen for other hosts."""
    server_clients: Text = None
    """Folder with the public keys of the clients on other hosts, their rights and tenants
    ([server.md](server.md#who-may-do-what))."""
    server_operators: Text = None
    """Those of `server_clients` that have the right `operate`, too: names with commas between them, or `*` for all. The
    server's own user has it over `kvs+ipc://`."""
    server_quotas: Text = None
    """GiB that a tenant, a model or a namespace's id may hold at the server in all: `team-a=40, my-model=20, *=10`."""
    server_http_port: Annotated[int | None, Field(ge=0, le=65_535)] = None
    """Loopback port for `/metrics` and `/healthz` of the server; 0 for any free port."""
    server_drain_secs: Seconds = Field(default=30.0, ge=0)
    """Longest time that the server may go on writing to disk after it is told to end."""
