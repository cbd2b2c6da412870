"""Access to an HTTP server: programs of this machine, or those that have a token."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.model.keyfile import read_bounded, require_private
from kvstore.protocol.loopback import is_from_here, is_loopback

_TOKEN: Final = re.compile(rb"[\x21-\x7e]{16,512}")
_MAX_FILE_BYTES: Final = 1024


class Refusal(NamedTuple):
    """An answer to a request that may not be carried out."""

    status: HTTPStatus
    message: str


class Access:
    """Decides who may send a request. Thread-safe.

    Without a token these are programs on this machine, but no pages in its browsers. With one, whoever presents it may
    send requests from anywhere. Open pages, for probes and metrics, need no token.

    Args:
        host: the name or address that the server listens on.
        token: the token; None for none.
        remedy: what to do where a token is needed, and there is none.
    """

    def __init__(self, host: str, token: str | None, remedy: str) -> None:
        self.token = token
        self._is_local = is_loopback(host)
        self._remedy = remedy

    def refusal(
        self, headers: Mapping[str, str], *, is_open: bool = False, needs_token: bool = False
    ) -> Refusal | None:
        """Return the reason why a request with these headers, by lower-case names, may not be carried out.

        Args:
            headers: the headers.
            is_open: it is for an open page.
            needs_token: it is for an order that not every program of this machine may give.
        """
        token = self.token
        if is_open or token is None:
            if self._is_local and not is_from_here(headers):
                said = "only programs on this machine may send requests, to a loopback address"
                return Refusal(HTTPStatus.FORBIDDEN, said)
            if is_open or (self._is_local and not needs_token):
                return None
            return Refusal(HTTPStatus.FORBIDDEN, f"this needs a token: {self._remedy}")
        scheme, _, given = headers.get("authorization", "").encode("latin-1", "replace").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given, token.encode()):
            return None
        return Refusal(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong: send Authorization: Bearer TOKEN")


def read_token(path: Path) -> str:
    """Read the token in a file, on its only line.

    Raises:
        ConfigError: there is none, or others may read the file.
    """
    require_private(path)
    lines = read_bounded(path, _MAX_FILE_BYTES).split()
    if len(lines) != 1 or _TOKEN.fullmatch(lines[0]) is None:
        raise ConfigError(f"the file {path} holds no token: it must be 16 to 512 characters without spaces")
    return lines[0].decode()
