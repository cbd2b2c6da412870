"""The administration of one engine: what may be asked and done, apart from how it is asked.

Whoever has something to administer implements ``Controls``; ``answer`` is the rest. ``admin_http.py`` serves it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol

from kvstore.errors import InvalidCallError
from kvstore.keys import KeyExtras
from kvstore.protocol.loopback import is_from_here

Tree = Mapping[str, object]


_EXAMPLE: Final = '{"tokens": [1, 2, 3], "salt": "a"}'


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

    def kv(self, tokens: Sequence[int], extras: KeyExtras) -> Tree:
        """How many leading tokens of a sequence are there, and in which tier.

        Raises:
            InvalidCallError: they are no token ids.
        """

    def clear(self) -> int | None:
        """Forget all chunks. Returns how many there were, or None if it will be done later."""

    def pins(self) -> Tree:
        """What clients have pinned: ``pins``, a list."""

    def unpin(self) -> int | None:
        """End all pins. Returns how many there were, or None if it will be done later."""

    def switch(self, *, enabled: bool) -> None:
        """Turn the cache on or off; what is stored stays."""


class Reply(NamedTuple):
    """An answer: HTTP's number, and what becomes JSON."""

    status: HTTPStatus
    body: Tree


def _kv(controls: Controls, body: bytes) -> Reply:
    try:
        return Reply(HTTPStatus.OK, controls.kv(*_sequence(body)))
    except InvalidCallError as error:
        return Reply(HTTPStatus.BAD_REQUEST, {"error": str(error)})


def _sequence(body: bytes) -> tuple[list[int], KeyExtras]:
    """The tokens that a body is about, and what else decides their KV.

    Raises:
        InvalidCallError: it is not about any.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidCallError(f"the body must be JSON, {_EXAMPLE}") from error
    if not isinstance(asked, dict) or not asked.keys() <= {"tokens", "salt", "tags"}:
        raise InvalidCallError(f"the body must be tokens, and salt and tags if any: {_EXAMPLE}")
    tokens, salt, tags = asked.get("tokens"), asked.get("salt"), asked.get("tags") or {}
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InvalidCallError(f"tokens must be a list of token ids: {_EXAMPLE}")
    if not isinstance(salt, str | None):
        raise InvalidCallError("salt must be text, as in the cache_salt of a request")
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise InvalidCallError('tags must be texts by name: {"tenant": "a"}')
    return tokens, KeyExtras(cache_salt=salt, tags=tuple(sorted(tags.items())))


def _clear(controls: Controls, _: bytes) -> Reply:
    return _done(controls.clear(), "cleared", "chunks")


def _unpin(controls: Controls, _: bytes) -> Reply:
    return _done(controls.unpin(), "unpinned", "pins")


def _done(count: int | None, status: str, things: str) -> Reply:
    if count is None:
        return Reply(HTTPStatus.ACCEPTED, {"status": "accepted: it is done when the next request comes"})
    return Reply(HTTPStatus.OK, {"status": status, things: count})


def _probe(controls: Controls, _: bytes) -> Reply:
    health = controls.health()
    return Reply(HTTPStatus.OK if health["status"] == "ok" else HTTPStatus.SERVICE_UNAVAILABLE, health)


def _switch(controls: Controls, *, enabled: bool) -> Reply:
    controls.switch(enabled=enabled)
    return Reply(HTTPStatus.OK, {"status": "enabled" if enabled else "disabled"})


_ACTIONS: Final[Mapping[tuple[str, str], Callable[[Controls, bytes], Reply]]] = {
    ("GET", "/info"): lambda controls, _: Reply(HTTPStatus.OK, controls.info()),
    ("GET", "/stats"): lambda controls, _: Reply(HTTPStatus.OK, controls.stats()),
    ("GET", "/config"): lambda controls, _: Reply(HTTPStatus.OK, controls.config()),
    ("GET", "/health"): lambda controls, _: Reply(HTTPStatus.OK, controls.health()),
    ("GET", "/healthz"): _probe,
    ("GET", "/pins"): lambda controls, _: Reply(HTTPStatus.OK, controls.pins()),
    ("POST", "/kv"): _kv,
    ("POST", "/clear"): _clear,
    ("POST", "/unpin"): _unpin,
    ("POST", "/disable"): lambda controls, _: _switch(controls, enabled=False),
    ("POST", "/enable"): lambda controls, _: _switch(controls, enabled=True),
}


def answer(controls: Controls, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Reply:
    """Carry out a request. ``headers`` has lower-case names.

    Browsers are turned away, see ``is_from_here``.
    """
    if not is_from_here(headers):
        return Reply(HTTPStatus.FORBIDDEN, {"error": "only programs on this machine may ask, under a loopback name"})
    action = _ACTIONS.get((method, path))
    if action is not None:
        return action(controls, body)
    methods = [known for known, known_path in _ACTIONS if known_path == path]
    if methods:
        return Reply(HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{path} takes {methods[0]}, not {method}"})
    known = [f"{known} {known_path}" for known, known_path in _ACTIONS]
    return Reply(HTTPStatus.NOT_FOUND, {"error": "there is no such path", "paths": known})
