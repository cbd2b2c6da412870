"""Options of ``kvstore proxy``: engines, limits, keys, TLS. They are checked before the proxy starts."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.model.errors import ConfigError
from kvstore.model.keyfile import require_private
from kvstore.protocol.loopback import is_loopback
from kvstore.tools.proxy.listing import Listed, Listing, Receiver

_KEY: Final = re.compile(r"[\x21-\x7e]{8,512}")
_MAX_FILE_BYTES: Final = 16 << 10


class Choice(StrEnum):
    """Criterion by which the engine of a request is chosen."""

    PREFIX = "prefix"
    LOAD = "load"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Size limits and timeouts, each an option of the command; a client may leave a piece unread for ``timeout_s``."""

    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest body of a request, in MiB.")] = 32.0
    max_bodies_mb: Annotated[
        float, typer.Option(min=0.001, help="Bodies of all requests under way, those still coming included, in MiB.")
    ] = 512.0
    max_requests: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 256
    key_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="How much of these two one of several API keys may take.")
    ] = 0.5
    max_connections: Annotated[int, typer.Option(min=1, help="Connections of clients, idle ones included.")] = 4096
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two bytes of an answer.")] = 600.0
    connect_timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to connect to an engine.")] = 5.0
    prefill_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a prefill; after that the decode engine computes.")
    ] = 300.0
    health_interval_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two health checks.")] = 3.0
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds that running answers get at the end.")] = 30.0


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files of certificates, each an option of the command. Clients use plain HTTP without ``tls_cert``."""

    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with the certificate that clients see.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None
    engine_ca: Annotated[
        Path | None, typer.Option(help="PEM file with the authority of engines with https://; else the system's.")
    ] = None


@dataclass(frozen=True)
class ProxyOptions(Limits, Tls):
    """Options of a proxy.

    Attributes:
        prefill: addresses of the engines that compute prompts.
        decode: addresses of the engines that answer.
        receivers: addresses at which ``decode`` receive KV, in the same order; empty if engines only share a store.
        engines_file: file that names the engines instead, and may change.
        choice: criterion by which the engine of a request is chosen.
        retain: ask engines to retain prompts as clients of OpenAI and Anthropic wish.
        bidirectional: tell clients of streams the address of an answer's KV.
        first_token: begin streams with the prefill engine's token, if the stream is the same.
        host: address to listen on; beyond loopback only with ``api_keys``.
        port: port to listen on; 0 for any free one.
        api_keys: keys of which clients must present one; with several, none may take more than ``key_share``.
        api_key_file: their file, which is read again when it has changed.
        engine_api_key: key that the proxy presents to engines; None forwards the client's.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    receivers: tuple[Receiver, ...] = ()
    engines_file: Path | None = None
    choice: Choice = Choice.PREFIX
    retain: bool = False
    bidirectional: bool = False
    first_token: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    engine_api_key: str | None = None

    def check(self) -> None:
        """Check each option, and their combinations.

        Raises:
            ConfigError: an option is invalid; the message gives the reason and a remedy.
        """
        if self.engines_file is not None and (self.prefill or self.decode or self.receivers):
            raise ConfigError("--engines names all engines: give either it, or --prefill, --decode and --decode-kv")
        if self.engines_file is None:
            for name, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
                if not urls:
                    raise ConfigError(f"name at least one engine with {name}, such as http://127.0.0.1:8000")
        if self.receivers and len(self.receivers) != len(self.decode):
            raise ConfigError(
                f"--decode-kv is given {len(self.receivers)} times and --decode {len(self.decode)} times: give one for "
                "each, in the same order, or none"
            )
        if self.max_bodies_mb < self.max_body_mb:
            raise ConfigError(
                f"--max-bodies-mb is {self.max_bodies_mb:g}, less than one body may have: raise it, or lower "
                f"--max-body-mb, which is {self.max_body_mb:g}"
            )
        listing = self.listing()
        if self.bidirectional and self.engines_file is None and not self.receivers:
            raise ConfigError("--bidirectional needs --decode-kv: it tells clients where the KV of an answer is")
        if self.first_token and self.engines_file is None and not self.receivers:
            raise ConfigError("--first-token needs --decode-kv: it is for prompts whose KV is handed over")
        if not is_loopback(self.host) and not self.api_keys:
            raise ConfigError(
                f"--host is {self.host!r}, which other machines can reach: give --api-key-file too, or leave it out"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both, or none")
        self.server_context()
        is_tls = any(engine.url.startswith("https:") for engine in (*listing.prefill, *listing.decode))
        if self.engine_ca is not None and self.engines_file is None and not is_tls:
            raise ConfigError("--engine-ca is for engines with https://, and none is: leave it out, or mend their URLs")
        self.engine_context()

    def listing(self) -> Listing:
        """Return the engines that are listed now.

        Raises:
            ConfigError: the listing is invalid.
        """
        if self.engines_file is not None:
            from kvstore.tools.proxy.enginesfile import read_listing  # noqa: PLC0415 - costs what a command costs

            return read_listing(self.engines_file)
        receivers = self.receivers or (None,) * len(self.decode)
        listing = Listing(
            tuple(Listed(url.rstrip("/")) for url in self.prefill),
            tuple(Listed(url.rstrip("/"), to) for url, to in zip(self.decode, receivers, strict=True)),
        )
        listing.check("--prefill", "--decode")
        return listing

    def server_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for clients; None for plain HTTP.

        Raises:
            ConfigError: the files cannot be used.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        require_private(self.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")  # prevents a prompt on the terminal
        except OSError as error:  # includes SSLError
            raise ConfigError(
                f"--tls-cert {self.tls_cert} and --tls-key {self.tls_key} cannot be used together "
                f"({error.strerror}): give PEM files of a certificate and of its key, without a password"
            ) from error
        return context

    def engine_context(self) -> ssl.SSLContext:
        """Return the TLS context for engines.

        Raises:
            ConfigError: the file cannot be used.
        """
        try:
            return ssl.create_default_context(cafile=self.engine_ca)
        except OSError as error:
            raise ConfigError(
                f"--engine-ca {self.engine_ca} cannot be used ({error.strerror}): give a PEM file of certificates"
            ) from error


def read_key(path: Path) -> str:
    """Read the API key in a file, on its only line.

    Raises:
        ConfigError: there is no key, or several, or other users can read the file.
    """
    keys = read_keys(path)
    if len(keys) > 1:
        raise ConfigError(f"the file {path} holds {len(keys)} API keys: it must be one")
    return keys[0]


def read_keys(path: Path) -> tuple[str, ...]:
    """Read the API keys in a file, one per line.

    Raises:
        ConfigError: there is no key, a line is not a key, or other users can read the file.
    """
    require_private(path)
    try:
        with path.open("rb") as file:
            keys = file.read(_MAX_FILE_BYTES + 1).decode("ascii", "replace").split("\n")
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    found = tuple(dict.fromkeys(key for line in keys if (key := line.strip())))
    if not found or not all(map(_KEY.fullmatch, found)):
        raise ConfigError(f"the file {path} holds no API key: it must be 8 to 512 characters without spaces")
    if sum(map(len, keys)) + len(keys) > _MAX_FILE_BYTES:
        raise ConfigError(f"the file {path} has more than {_MAX_FILE_BYTES} bytes: use fewer API keys")
    return found
