"""Keys of processes: an engine's start, administration and weights, and ``kvstore serve``."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvstore.config.keys.base import Keys, Seconds, Text
from kvstore.protocol.loopback import is_loopback

_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


class OperationKeys(Keys):
    """Start, administration, identity."""

    required: bool = True
    """Stop vLLM if memory, the folder or another tier is not available at start. If false, vLLM runs without the cache,
    and a warning says why. A wrong key or flag always stops it."""
    allow_untested_vllm: bool = True
    """Serve a version of vLLM that was not tested if it has all that kvstore uses ([versions.md](versions.md)); a line
    in the log says so."""
    internal_api_server_enabled: bool = False
    """Serve [administration](operations.md#the-admin-endpoint) over HTTP. Needs the extra `admin`, whose packages vLLM
    brings along."""
    internal_api_server_token_file: Text = None
    """File with a token that all requests but `GET /healthz` must send as `Authorization: Bearer`."""
    internal_api_server_host: str = Field(default="127.0.0.1", validate_default=True)
    """Address to listen on; beyond loopback only with `internal_api_server_token_file`."""
    internal_api_server_port_start: Annotated[int, Field(ge=0, le=65_000)] = 6999
    """Port to listen on; a data-parallel replica adds its rank. 0 for any free port, which the log names."""
    log_request_sample: Annotated[int, Field(ge=0)] = 0
    """One request of so many gets a [line in the log](operations.md#logs) when it ends. 0 for none."""
    model_id: Text = None
    """Identity of the weights, in place of the one [derived from the model's files](warming.md#packs). Engines with the
    same identity share KV. Needed with vLLM's `load_format=dummy`."""

    @field_validator("internal_api_server_host")
    @classmethod
    def _loopback_without_token(cls, value: str, info: ValidationInfo) -> str:
        has_token = info.data.get("internal_api_server_token_file")
        if info.data.get("internal_api_server_enabled") and not is_loopback(value) and not has_token:
            message = "must be a loopback address such as 127.0.0.1, or name internal_api_server_token_file"
            raise PydanticCustomError("loopback", message, {"because_of": "internal_api_server_enabled"})
        return value


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
    """GiB that a tenant, model, namespace's id, tag or salt may hold at the server: `team-a=40, my-model=20, *=10`
    ([server.md](server.md#quotas))."""
    server_http_port: Annotated[int | None, Field(ge=0, le=65_535)] = None
    """Port for `/metrics`, `/healthz` and `/readyz` of the server; 0 for any free port."""
    server_http_host: str = "127.0.0.1"
    """Address for `server_http_port`."""
    server_http_token_file: Text = None
    """File with a token that orders over HTTP, and beyond loopback the status, must send as `Authorization: Bearer`."""
    server_log_level: str = "INFO"
    """Level of the server's log: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    server_drain_secs: Seconds = Field(default=30.0, ge=0)
    """Longest time that the server may go on writing to disk after it is told to end."""

    @field_validator("server_log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.upper() not in _LEVELS:
            raise PydanticCustomError("level", "must be one of {levels}", {"levels": ", ".join(_LEVELS)})
        return value.upper()
