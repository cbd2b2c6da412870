"""The administration of one engine: what may be asked and done, apart from how it is asked.

Whoever has something to administer implements ``Controls``; ``answer`` is the rest. ``admin_http.py`` serves it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

Tree = Mapping[str, object]


class Controls(Protocol):
    """What an administrator may ask of something that caches. Methods are called from any thread, and return soon."""

    def info(self) -> Tree:
        """What it is: versions, tiers, sizes."""

    def stats(self) -> Tree:
        """Everything counted since its start."""

    def config(self) -> Tree:
        """The configuration in effect, without secrets."""

    def health(self) -> Tree:
        """Whether its parts work; ``status`` is ``ok`` or ``degraded``."""

    def clear(self) -> int | None:
        """Forget all chunks. Returns how many there were, or None if it will be done later."""

    def switch(self, *, enabled: bool) -> None:
        """Turn the cache on or off; what is stored stays."""


class Reply(NamedTuple):
    """An answer: HTTP's number, and what becomes JSON."""

    status: HTTPStatus
    body: Tree


def _clear(controls: Controls) -> Reply:
    count = controls.clear()
    if count is None:
        return Reply(HTTPStatus.ACCEPTED, {"status": "accepted: it is done when the next request comes"})
    return Reply(HTTPStatus.OK, {"status": "cleared", "chunks": count})


def _switch(controls: Controls, *, enabled: bool) -> Reply:
    controls.switch(enabled=enabled)
    return Reply(HTTPStatus.OK, {"status": "enabled" if enabled else "disabled"})


_ACTIONS: Final[Mapping[tuple[str, str], Callable[[Controls], Reply]]] = {
    ("GET", "/info"): lambda controls: Reply(HTTPStatus.OK, controls.info()),
    ("GET", "/stats"): lambda controls: Reply(HTTPStatus.OK, controls.stats()),
    ("GET", "/config"): lambda controls: Reply(HTTPStatus.OK, controls.config()),
    ("GET", "/health"): lambda controls: Reply(HTTPStatus.OK, controls.health()),
    ("POST", "/clear"): _clear,
    ("POST", "/disable"): lambda controls: _switch(controls, enabled=False),
    ("POST", "/enable"): lambda controls: _switch(controls, enabled=True),
}


def answer(controls: Controls, method: str, path: str, headers: Mapping[str, str]) -> Reply:
    """Carry out a request. ``headers`` has lower-case names.

    Browsers are turned away, see ``is_from_here``.
    """
    if not is_from_here(headers):
        return Reply(HTTPStatus.FORBIDDEN, {"error": "only programs on this machine may ask, under a loopback name"})
    action = _ACTIONS.get((method, path))
    if action is not None:
        return action(controls)
    methods = [known for known, known_path in _ACTIONS if known_path == path]
    if methods:
        return Reply(HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{path} takes {methods[0]}, not {method}"})
    known = [f"{known} {known_path}" for known, known_path in _ACTIONS]
    return Reply(HTTPStatus.NOT_FOUND, {"error": "there is no such path", "paths": known})


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Whether a program on this machine asks, and not a browser: any page that a user looks at could make that ask.

    Pages of other sites name themselves in ``Origin``, and one whose name was made to point here (DNS rebinding) asks
    for another ``Host``.
    """
    return "origin" not in headers and is_loopback(_host_name(headers.get("host", "")))


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(header: str) -> str:
    """The name in a ``Host`` header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
