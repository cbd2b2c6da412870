"""Between clients and the routes of a proxy: who may ask, how much, and for how long."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.protocol.loopback import is_from_here
from kvstore.tools.proxy.meters import ProxyMeters
from kvstore.tools.proxy.options import ProxyOptions
from kvstore.tools.proxy.reply import AnswerError, ClientGoneError, Reason, Reply

HEALTH: Final = "/health"

# Without ___: after it, engines would look for addresses to send KV to.
_REQUEST_ID: Final = re.compile(r"(?!.*___)[A-Za-z0-9._:\-]{1,128}")
_BODY_TIMEOUT_S: Final = 60.0


class Call(NamedTuple):
    """A client's request.

    Attributes:
        method: HTTP's.
        path: without the query.
        content: the body.
        headers: for the engines.
        request_id: the client's, or a new one.
    """

    method: str
    path: str
    content: bytearray
    headers: Mapping[str, str]
    request_id: str


Answer = Callable[[Call, Reply], Coroutine[Any, Any, None]]


class Doorkeeper:
    """Turns away who may not ask, and counts all answers. An ASGI middleware.

    If there is a key, everything but ``/health`` needs it. Otherwise only programs on this machine may ask, see
    ``is_from_here``.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, paths: frozenset[str], meters: ProxyMeters) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._paths = paths
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._meters.requests.labels(path, str(message["status"])).inc()
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(path, headers)
        if refusal is None:
            await self._app(scope, receive, counted)
        else:
            self._meters.errors.labels(refusal.reason.label).inc()
            await Reply(counted, request_id_of(headers), _BODY_TIMEOUT_S).error(refusal)

    def _refusal(self, path: str, headers: Headers) -> AnswerError | None:
        if self._expected is None:
            message = "only programs on this machine may ask, under a loopback name"
            return None if is_from_here(headers) else AnswerError(Reason.FROM_A_BROWSER, message)
        given = headers.get("authorization", "").encode("latin-1")
        if path == HEALTH or hmac.compare_digest(given, self._expected):
            return None
        return AnswerError(Reason.WRONG_KEY, "the API key is missing or wrong", {"www-authenticate": "Bearer"})


class Gate:
    """Carries out requests within the limits. Belongs to one event loop.

    A request ends when it is answered, when its client hangs up, or with ``halt``.
    """

    def __init__(self, options: ProxyOptions, meters: ProxyMeters) -> None:
        self.cut = 0  # requests ended by ``halt``
        self._options = options
        self._meters = meters
        self._in_flight = 0
        self._halted = asyncio.Event()

    def halt(self) -> None:
        """End all running requests, each with an error."""
        self._halted.set()

    async def carry_out(self, answer: Answer, request: Request, send: Send) -> None:
        """Answer a request, whatever happens."""
        reply = Reply(send, request_id_of(request.headers), self._options.timeout_s)
        self._in_flight += 1
        try:
            with self._meters.in_flight.track_inprogress():
                try:
                    await self._attend(answer, request, reply)
                except AnswerError as error:
                    await reply.error(error)
        except (ClientGoneError, ClientDisconnect):
            reply.failure = "client_gone"
        finally:
            self._in_flight -= 1
            if reply.failure is not None:
                self._meters.errors.labels(reply.failure).inc()

    async def _attend(self, answer: Answer, request: Request, reply: Reply) -> None:
        if self._in_flight > self._options.max_requests:
            message = f"{self._options.max_requests} requests are under way: try again soon"
            raise AnswerError(Reason.BUSY, message, {"retry-after": "1"})
        call = Call(
            request.method,
            request.scope["path"],
            await self._body(request),
            self._headers(request.headers, reply.request_id),
            reply.request_id,
        )
        await self._while_wanted(answer(call, reply), request.receive, reply)

    async def _body(self, request: Request) -> bytearray:
        most = int(self._options.max_body_mb * (1 << 20))
        content = bytearray()
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise AnswerError(Reason.TOO_LARGE, f"the body has more than {most} bytes")
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for piece in request.stream():
                    content += piece
                    if len(content) > most:
                        raise AnswerError(Reason.TOO_LARGE, f"the body has more than {most} bytes")
        except TimeoutError as error:
            message = f"the body did not come within {_BODY_TIMEOUT_S:.0f} s"
            raise AnswerError(Reason.SLOW_BODY, message) from error
        return content

    def _headers(self, headers: Headers, request_id: str) -> dict[str, str]:
        key = self._options.engine_api_key
        authorization = headers.get("authorization", "") if key is None else f"Bearer {key}"
        told = {"content-type": "application/json", "x-request-id": request_id}
        # No engine's key has characters beyond ASCII, and an HTTP client would refuse to send them.
        return {**told, "authorization": authorization} if authorization and authorization.isascii() else told

    async def _while_wanted(self, work: Coroutine[Any, Any, None], receive: Receive, reply: Reply) -> None:
        answered = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(receive))
        halted = asyncio.ensure_future(self._halted.wait())
        tasks = (answered, gone, halted)
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reply.has_ended:  # the client may go now; only the engine's connection remains to be released
                ended, _ = await asyncio.wait((answered,))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if answered in ended:
            answered.result()
        elif gone in ended:
            raise ClientGoneError("the client hung up")
        else:
            self.cut += 1
            raise AnswerError(Reason.ENDING, "the proxy is shutting down")


class Endpoint:
    """An ASGI application that ``answer`` answers for. A class, because a route takes no function for one."""

    def __init__(self, gate: Gate, answer: Answer) -> None:
        self._gate = gate
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._gate.carry_out(self._answer, Request(scope, receive), send)


def request_id_of(headers: Headers) -> str:
    """The client's id of its request, if that is valid; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


async def _gone(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
