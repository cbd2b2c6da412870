"""Administration of one engine: requests and their answers. ``admin_http.py`` serves them.

Objects to administer implement ``Controls``; ``answer`` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Final, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import KeyExtras

Tree = Mapping[str, object]

PROBE: Final = "/healthz"
DRAIN: Final = "/drain"
"""An order that cannot be taken back, and so needs a token."""
_EXAMPLE: Final = '{"tokens": [1, 2, 3], "salt": "a", "tags": {"tenant": "a"}}'


class Controls(Protocol):
    """Operations of a cache for its administrator. Methods are called from any thread and return soon."""

    def info(self) -> Tree:
        """Return versions, tiers and sizes."""

    def stats(self) -> Tree:
        """Return all counters since the start."""

    def config(self) -> Tree:
        """Return the configuration in effect, without secrets."""

    def health(self) -> Tree:
        """Return the health of all parts; ``status`` is ``ok`` or ``degraded``."""

    def kv(self, tokens: Sequence[int], extras: KeyExtras) -> Tree:
        """Return the number of leading tokens of a sequence that are known, and their tiers.

        Raises:
            InvalidCallError: a token id is out of range.
        """

    def clear(self) -> int | None:
        """Forget all chunks; return their number, or None if it will be done later."""

    def pins(self) -> Tree:
        """Return the pins of clients: ``pins``, a list."""

    def unpin(self) -> int | None:
        """End all pins; return their number, or None if it will be done later."""

    def drain(self) -> Tree:
        """Prepare the end of the engine; return ``unwritten``, the number of chunks that are still to be written."""

    def switch(self, *, enabled: bool) -> None:
        """Turn the cache on or off; stored chunks stay."""


class Reply(NamedTuple):
    """An answer: the HTTP status, and the body to be encoded as JSON."""

    status: HTTPStatus
    body: Tree


class _Sequence(BaseModel):
    """A sequence of tokens, and the other inputs that decide its KV."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: Annotated[list[int], FailFast()]
    salt: str | None = None
    tags: dict[str, str] | None = None


def _kv(controls: Controls, body: bytes) -> Reply:
    try:
        asked = _Sequence.model_validate_json(body)
        extras = KeyExtras(cache_salt=asked.salt, tags=tuple(sorted((asked.tags or {}).items())))
        return Reply(HTTPStatus.OK, controls.kv(asked.tokens, extras))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, ("body", *problem["loc"])))
        return Reply(HTTPStatus.BAD_REQUEST, {"error": f"{place}: {problem['msg']}; write it as {_EXAMPLE}"})
    except InvalidCallError as error:
        return Reply(HTTPStatus.BAD_REQUEST, {"error": str(error)})


def _done(count: int | None, status: str, things: str) -> Reply:
    if count is None:
        return Reply(HTTPStatus.ACCEPTED, {"status": "accepted: it is done when the next request arrives"})
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
    ("GET", PROBE): _probe,
    ("GET", "/pins"): lambda controls, _: Reply(HTTPStatus.OK, controls.pins()),
    ("POST", "/kv"): _kv,
    ("POST", "/clear"): lambda controls, _: _done(controls.clear(), "cleared", "chunks"),
    ("POST", DRAIN): lambda controls, _: Reply(HTTPStatus.OK, controls.drain()),
    ("POST", "/unpin"): lambda controls, _: _done(controls.unpin(), "unpinned", "pins"),
    ("POST", "/disable"): lambda controls, _: _switch(controls, enabled=False),
    ("POST", "/enable"): lambda controls, _: _switch(controls, enabled=True),
}


def answer(controls: Controls, method: str, path: str, body: bytes = b"") -> Reply:
    """Carry out a request of a client that may send it."""
    action = _ACTIONS.get((method, path))
    if action is not None:
        return action(controls, body)
    methods = [known for known, known_path in _ACTIONS if known_path == path]
    if methods:
        return Reply(HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{path} takes {methods[0]}, not {method}"})
    known = [f"{known} {known_path}" for known, known_path in _ACTIONS]
    return Reply(HTTPStatus.NOT_FOUND, {"error": "unknown path", "paths": known})
