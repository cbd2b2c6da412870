"""Engines behind a proxy: their health, their load, and requests to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from kvstore.tools.proxy.listing import Listed
from kvstore.tools.proxy.objects import Parts
from kvstore.tools.proxy.reply import AnswerError, Reason
from kvstore.tools.proxy.upstream import Exchange, NoConnectionError, Pool, SilenceError, UpstreamAnswer, UpstreamError

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES: Final = 256 << 20
_HEALTH_TIMEOUT_S: Final = 10.0


class EngineError(AnswerError):
    """An engine gave no valid answer."""


class EngineUnreachableError(EngineError):
    """No connection to the engine, so it has received nothing of the request."""


class EngineSilentError(EngineError):
    """The engine sent nothing for too long."""


class Engine:
    """One vLLM engine, for use on one event loop.

    Attributes:
        role: ``prefill`` or ``decode``.
        url: address of the engine.
        receiver: address at which it receives KV; None if it receives none.
        weight: share of requests, relative to other engines.
        load: requests that it has from this proxy; for decode engines also those that are still in prefill.
        is_well: whether its last health check or connection succeeded.
        credit: see ``Rota``.
    """

    def __init__(self, role: str, listed: Listed, pool: Pool) -> None:
        self.role = role
        self.url = listed.url
        self.receiver = listed.receiver
        self.weight = listed.weight
        self.load = 0
        self.is_well = False
        self.credit = 0.0
        self._noted: bool | None = None
        self._pool = pool

    def note(self, *, is_well: bool, why: str = "") -> None:
        """Store its health, and log a change."""
        if is_well != self._noted:
            log = logger.info if is_well else logger.warning
            log("%s engine %s %s", self.role, self.url, "answers" if is_well else f"is left out: {why}")
        self.is_well = self._noted = is_well

    def taken(self) -> _Taken:
        """Count a request in its load until the end of the block."""
        return _Taken(self)

    def asked(self, method: str, path: str, headers: Mapping[str, str], content: Parts) -> Asked:
        """Return a request as an async context manager that yields the answer."""
        return Asked(self, self._pool.asked(method, path, headers, content))

    async def check(self) -> None:
        """Check its health once."""
        self._pool.sweep()
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S), self._pool.asked("GET", "/health", {}, ()) as answer:
                status = answer.status
                await answer.read(MAX_ANSWER_BYTES)
        except (UpstreamError, TimeoutError) as error:
            self.note(is_well=False, why=f"/health: {str(error) or type(error).__name__}")
        else:
            self.note(is_well=200 <= status < 300, why=f"/health says {status}")

    def close(self) -> None:
        """Close its connections, each after its request has ended."""
        self._pool.close()


class _Taken:
    """Request that an engine has. It is a class because that takes a third of a generator's time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.load += 1

    def __exit__(self, *_error: object) -> None:
        self._engine.load -= 1


class Asked:
    """Exchange with an engine, whose errors are converted for clients and metrics.

    Entering it, and reading the answer inside the block, raise ``EngineError``.
    """

    def __init__(self, engine: Engine, exchange: Exchange) -> None:
        self._engine = engine
        self._exchange = exchange

    async def __aenter__(self) -> UpstreamAnswer:
        try:
            return await self._exchange.__aenter__()
        except UpstreamError as error:
            raise self._told(error) from error

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        await self._exchange.__aexit__()
        if isinstance(error, UpstreamError):
            raise self._told(error) from error

    def _told(self, error: UpstreamError) -> EngineError:
        name = f"the {self._engine.role} engine"
        if isinstance(error, NoConnectionError):
            self._engine.note(is_well=False, why=str(error))
            return EngineUnreachableError(Reason.UNREACHABLE, f"{name} cannot be reached")
        if isinstance(error, SilenceError):
            return EngineSilentError(Reason.TIMEOUT, f"{name} took too long")
        return EngineError(Reason.BROKEN, f"{name} ended in the middle of a request")
