"""The engines behind a proxy: which are healthy, whose turn it is, and how to talk to them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import httpx

from kvstore.tools.proxy.objects import Parts
from kvstore.tools.proxy.options import ProxyOptions, Receiver
from kvstore.tools.proxy.reply import AnswerError, Reason

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S: Final = 10.0
_KEPT_S: Final = 2.0  # vLLM closes connections after 5 idle seconds, even if a request is about to arrive
_KEPT_CONNECTIONS: Final = 64
_PIECE_BYTES: Final = 256 << 10


class EngineError(AnswerError):
    """An engine did not answer as it should."""


class EngineUnreachableError(EngineError):
    """No connection: the engine has seen nothing of the request."""


class EngineSilentError(EngineError):
    """The engine said nothing for too long."""


@dataclass(eq=False)
class Engine:
    """One vLLM.

    Attributes:
        role: ``prefill`` or ``decode``.
        url: where it answers.
        receiver: where it receives KV.
        is_well: whether it answered the last time.
    """

    role: str
    url: str
    receiver: Receiver | None = None
    is_well: bool = False

    def note(self, *, is_well: bool, why: str = "") -> None:
        """Remember its health, and log a change."""
        if is_well != self.is_well:
            log = logger.info if is_well else logger.warning
            log("%s engine %s %s", self.role, self.url, "answers" if is_well else f"is left out: {why}")
        self.is_well = is_well


class Rota:
    """The engines of one role, in turn."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.engines = tuple(engines)
        self._queue = deque(self.engines)

    def candidates(self) -> list[Engine]:
        """The healthy engines, in the order to try them. The first one then goes to the end of the queue."""
        well = [engine for engine in self._queue if engine.is_well]
        for engine in well[:1]:
            self._queue.remove(engine)
            self._queue.append(engine)
        return well

    @property
    def num_well(self) -> int:
        """How many of them are healthy."""
        return sum(engine.is_well for engine in self.engines)


class EngineClient:
    """Speaks HTTP with engines. Belongs to one event loop, from ``open`` to ``close``."""

    def __init__(self, options: ProxyOptions) -> None:
        self._interval_s = options.health_interval_s
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(options.timeout_s, connect=options.connect_timeout_s),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS, keepalive_expiry=_KEPT_S
            ),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def asked(
        self, engine: Engine, method: str, path: str, headers: Mapping[str, str], content: Parts
    ) -> AsyncIterator[httpx.Response]:
        """The engine's answer, of any status, with its body unread. If the caller leaves early, the engine aborts.

        Raises:
            EngineError: it does not answer. Wrap reading the body in ``translated``.
        """
        told = {**headers, "accept-encoding": "identity"}  # the answer is passed on as it is
        length = sum(map(len, content))
        if length:
            told["content-length"] = str(length)
        body = _pieces(content) if length else None
        request = self._client.build_request(method, engine.url + path, headers=told, content=body)
        with translated(engine):
            response = await self._client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    async def check(self, engine: Engine) -> None:
        """Check an engine's health once."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                answer = await self._client.get(f"{engine.url}/health")
        except (httpx.HTTPError, TimeoutError) as error:
            engine.note(is_well=False, why=f"/health: {type(error).__name__}")
        else:
            engine.note(is_well=answer.is_success, why=f"/health says {answer.status_code}")

    async def watch(self, engine: Engine) -> None:
        """Check an engine's health again and again."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check(engine)


async def _pieces(content: Parts) -> AsyncIterator[bytes]:
    """A body in pieces of bounded length, so that other requests proceed between them."""
    piece = bytearray()
    for part in content:
        view = memoryview(part)
        for begin in range(0, len(view), _PIECE_BYTES):
            piece += view[begin : begin + _PIECE_BYTES]
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Translate errors of the HTTP library, and mark an engine that cannot be reached at once.

    Raises:
        EngineError: instead of the library's errors.
    """
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        engine.note(is_well=False, why=type(error).__name__)
        raise EngineUnreachableError(Reason.UNREACHABLE, f"the {engine.role} engine cannot be reached") from error
    except httpx.TimeoutException as error:
        raise EngineSilentError(Reason.TIMEOUT, f"the {engine.role} engine took too long") from error
    except httpx.HTTPError as error:
        raise EngineError(Reason.BROKEN, f"the {engine.role} engine ended in the middle of a request") from error
