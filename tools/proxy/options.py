"""The options of ``kvstore proxy``: engines, limits, keys. They are checked before anything starts."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Self
from urllib.parse import urlsplit

import typer

from kvstore.errors import ConfigError
from kvstore.protocol.loopback import is_loopback

_KEY: Final = re.compile(r"[\x21-\x7e]{8,512}")
_MAX_FILE_BYTES: Final = 4096


class Receiver(NamedTuple):
    """Where a decode engine receives KV."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"kvs://[{self.host}]:{self.port}" if ":" in self.host else f"kvs://{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse ``kvs://host:port``.

        Raises:
            ConfigError: it is something else.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--decode-kv {url!r} cannot be read: {error}") from error
        rest = (parts.path, parts.query, parts.fragment, parts.username)
        if parts.scheme != "kvs" or not host or not port or any(rest):
            raise ConfigError(f"--decode-kv is {url!r}: it must be kvs://HOST:PORT")
        return cls(host, port)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much, and how long: each is an option of the command. A client may leave a piece unread for ``timeout_s``."""

    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest body of a request, in MiB.")] = 32.0
    max_requests: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 256
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two bytes of an answer.")] = 600.0
    connect_timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to connect to an engine.")] = 5.0
    prefill_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a prefill; after that the decode engine computes.")
    ] = 300.0
    health_interval_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two health checks.")] = 3.0
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds that running answers get at the end.")] = 30.0


@dataclass(frozen=True)
class ProxyOptions(Limits):
    """The options of a proxy.

    Attributes:
        prefill: addresses of the engines that compute prompts.
        decode: addresses of the engines that answer.
        receivers: where each of ``decode`` receives KV, in the same order; empty if engines only share a store.
        bidirectional: tell clients of streams where the KV of an answer is.
        host: where to listen; beyond loopback only with ``api_key``.
        port: 0 for any free one.
        api_key: what clients must present.
        engine_api_key: what the proxy presents to engines; None passes on the client's.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    receivers: tuple[Receiver, ...] = ()
    bidirectional: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    engine_api_key: str | None = None

    def check(self) -> None:
        """Check the options, each and together.

        Raises:
            ConfigError: says what is wrong, and what to do.
        """
        for name, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not urls:
                raise ConfigError(f"name at least one engine with {name}, such as http://127.0.0.1:8000")
            for url in urls:
                _check_url(name, url)
            if len({url.rstrip("/") for url in urls}) < len(urls):
                raise ConfigError(f"{name} names an engine twice: name each of {', '.join(sorted(set(urls)))} once")
        if self.receivers and len(self.receivers) != len(self.decode):
            raise ConfigError(
                f"--decode-kv is given {len(self.receivers)} times and --decode {len(self.decode)} times: give one for "
                "each, in the same order, or none"
            )
        if self.bidirectional and not self.receivers:
            raise ConfigError("--bidirectional needs --decode-kv: it tells clients where the KV of an answer is")
        if not is_loopback(self.host) and self.api_key is None:
            raise ConfigError(
                f"--host is {self.host!r}, which other machines can reach: give --api-key-file too, or leave it out"
            )


def read_key(path: Path) -> str:
    """The API key in a file, on its only line.

    Raises:
        ConfigError: there is none, or other users can read the file.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        with path.open("rb") as file:
            key = file.read(_MAX_FILE_BYTES).strip().decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"the key file {path} can be read by others: chmod 600 it")
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"the file {path} holds no API key: it must be 8 to 512 characters without spaces")
    return key


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{name} is {url!r}: it must be http://HOST:PORT or https://HOST:PORT, and nothing behind it")
