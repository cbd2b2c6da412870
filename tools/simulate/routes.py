"""Routes of a simulated fleet: the choice of the replica that answers a request, by the code of ``kvstore proxy``."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

from kvstore.policies.traces import Request
from kvstore.tools.proxy.choice import MOST_BYTES, Beginning, Choosable, Rota, beginnings_of, session_beginning
from kvstore.tools.simulate.fleetfile import Router

_TOKEN_BYTES: Final = 4  # of text
_SEED: Final = 1

E = TypeVar("E", bound=Choosable)


class Routes(Generic[E]):
    """Router over replicas.

    A trace has no text, so a text is made up in which equal prefixes are equal, for the proxy's code to hash.
    """

    def __init__(self, router: Router, replicas: Sequence[E]) -> None:
        self._router = router
        self._rota = Rota(replicas)
        self._chooser = random.Random(_SEED)  # noqa: S311 - no secret

    def choose(self, request: Request) -> E:
        """Return the replica that answers a request."""
        if self._router == "random":
            return self._chooser.choice(self._rota.engines)
        return self._rota.candidates(self._beginnings(request))[0]

    def _beginnings(self, request: Request) -> list[Beginning]:
        if self._router == "load":
            return []
        session = request.session if self._router == "session" else ""
        return [*session_beginning((), session), *beginnings_of((), text_of(request))]


def text_of(request: Request) -> bytes:
    """Return a made-up text of the length of a request's prompt, as far as routers read it."""
    return b"".join(_pieces(request))


def _pieces(request: Request) -> Iterator[bytes]:
    left_bytes = MOST_BYTES
    for place, key in enumerate(request.keys):
        size_bytes = min(left_bytes, request.tokens_of(place) * _TOKEN_BYTES)
        yield (key * (size_bytes // len(key) + 1))[:size_bytes] if key else bytes(size_bytes)
        left_bytes -= size_bytes
        if not left_bytes:
            return
