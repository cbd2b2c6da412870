"""Gate between clients and the routes of a proxy, which enforces API keys, size limits and timeouts."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NamedTuple, Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.ops.http_limits import HANG_UP
from kvstore.protocol.loopback import is_from_here
from kvstore.tools.proxy.meters import ProxyMeters
from kvstore.tools.proxy.options import ProxyOptions
from kvstore.tools.proxy.reply import AnswerError, ClientGoneError, Reason, Reply
from kvstore.tools.proxy.sessions import SESSION_HEADER, SESSION_ID
from kvstore.tools.proxy.shares import Bound, Taken

HEALTH: Final = "/health"

# Without ___, because engines would parse the text after it as addresses to send KV to.
_REQUEST_ID: Final = re.compile(r"(?!.*___)[A-Za-z0-9._:\-]{1,128}")
_TRACE_PARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_STATE: Final = re.compile(r"[\x20-\x7e]{1,512}")
_BODY_TIMEOUT_S: Final = 60.0
_MIB: Final = 1 << 20

Headers = Mapping[str, str]
"""Headers of a request by lower-case name; of several with one name the last."""


class Call(NamedTuple):
    """Client's request.

    Attributes:
        method: HTTP method.
        path: path without the query.
        content: body.
        headers: headers for the engines.
        request_id: the client's request id, or a new one.
    """

    method: str
    path: str
    content: bytearray
    headers: Mapping[str, str]
    request_id: str


Answer = Callable[[Call, Reply], Coroutine[Any, Any, None]]


class Doorkeeper:
    """ASGI middleware that refuses unauthorized clients, and counts all answers.

    If there are keys, every path but ``/health`` needs one. Otherwise only programs on this machine may send requests,
    see ``is_from_here``.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str], paths: frozenset[str], meters: ProxyMeters) -> None:
        self._app = app
        self._paths = paths
        self._meters = meters
        self.change(api_keys)

    def change(self, api_keys: Iterable[str]) -> None:
        """Replace the keys. Requests that were admitted go on."""
        self._expected = [f"Bearer {key}".encode() for key in api_keys]

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

        headers = headers_of(scope)
        refusal = self._refusal(path, headers)
        if refusal is None:
            await self._app(scope, receive, counted)
        else:
            self._meters.errors.labels(refusal.reason.label).inc()
            await Reply(counted, request_id_of(headers), path).error(refusal)

    def _refusal(self, path: str, headers: Headers) -> AnswerError | None:
        if not self._expected:
            message = "only programs on this machine may ask, under a loopback name"
            return None if is_from_here(headers) else AnswerError(Reason.FROM_A_BROWSER, message)
        given = authorization_of(headers).encode("latin-1")
        if path == HEALTH or sum(hmac.compare_digest(given, expected) for expected in self._expected):
            return None
        return AnswerError(Reason.WRONG_KEY, "the API key is missing or wrong", {"www-authenticate": "Bearer"})


class _Running:
    """Context manager of a running request, whose task may be cancelled before the request is answered.

    ``halt``, a hang-up of its client or a timer may end it; its cancellation is converted to the reason.
    """

    def __init__(self, reply: Reply, all_: set[_Running]) -> None:
        self.why: ClientGoneError | AnswerError | None = None
        self._is_over = False
        self._all = all_
        self._reply = reply

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._all.add(self)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._is_over = True
        self._all.discard(self)
        if isinstance(error, asyncio.CancelledError) and self.why is not None and self._task.uncancel() == 0:
            raise self.why from None

    def end(self, why: ClientGoneError | AnswerError) -> None:
        """Cancel the request, unless it is answered and only the engine's connection remains to be released."""
        if self.why is None and not self._is_over and not self._reply.has_ended:
            self.why = why
            self._task.cancel()


class Gate:
    """Gate that carries out requests within the limits, for use on one event loop.

    A request ends when it is answered, when its client hangs up, or by ``halt``.
    """

    def __init__(self, options: ProxyOptions, meters: ProxyMeters) -> None:
        self.cut = 0  # requests ended by ``halt``
        self._options = options
        self._meters = meters
        self._most_body_bytes = int(options.max_body_mb * _MIB)
        self._most_bodies_bytes = int(options.max_bodies_mb * _MIB)
        self._requests = Bound(options.max_requests, options.max_requests)
        self._bodies = Bound(self._most_bodies_bytes, self._most_bodies_bytes)
        self.share_between(len(options.api_keys))
        meters.in_flight.set_function(lambda: self._requests.taken)
        self._running: set[_Running] = set()
        self._is_halted = False

    def share_between(self, num_keys: int) -> None:
        """Change the number of API keys."""
        share = self._options.key_share if num_keys > 1 else 1.0
        self._requests.bound_key(max(1, int(self._options.max_requests * share)))
        self._bodies.bound_key(max(self._most_body_bytes, int(self._most_bodies_bytes * share)))

    def halt(self) -> None:
        """End all running requests, each with an error."""
        self._is_halted = True
        for running in self._running:
            running.end(_ending())

    async def carry_out(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with an error answer for every ``AnswerError``, and count failures."""
        headers = headers_of(scope)
        reply = Reply(send, request_id_of(headers), scope["path"])
        try:
            try:
                await self._attend(answer, scope, headers, receive, reply)
            except AnswerError as error:
                self.cut += error.reason is Reason.ENDING
                await reply.error(error)
        except ClientGoneError:
            reply.failure = "client_gone"
        finally:
            if reply.failure is not None:
                self._meters.errors.labels(reply.failure).inc()

    async def _attend(self, answer: Answer, scope: Scope, headers: Headers, receive: Receive, reply: Reply) -> None:
        key = authorization_of(headers) if self._options.api_keys else ""
        running = _Running(reply, self._running)
        with Taken(self._bodies, key) as bodies, Taken(self._requests, key) as requests, running:
            if self._is_halted:
                running.end(_ending())
            content = await self._body(headers, receive, running, bodies)
            if not requests.take():  # only now, so that a request without its body does not block others
                raise _busy("too many requests are under way, or too many of this key")
            told = self._told(headers, reply.request_id)
            call = Call(scope["method"], scope["path"], content, told, reply.request_id)
            unwatch = scope["state"][HANG_UP](lambda: running.end(ClientGoneError("the client hung up")))
            try:
                await answer(call, reply)
            finally:
                unwatch()

    async def _body(self, headers: Headers, receive: Receive, running: _Running, bodies: Taken) -> bytearray:
        most = self._most_body_bytes
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise AnswerError(Reason.TOO_LARGE, f"the body has more than {most} bytes")
        timer = asyncio.get_running_loop().call_later(_BODY_TIMEOUT_S, lambda: running.end(_late()))
        content = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError("the client hung up")
                piece = message.get("body", b"")
                if len(content) + len(piece) > most:
                    raise AnswerError(Reason.TOO_LARGE, f"the body has more than {most} bytes")
                if not bodies.take(len(piece)):
                    raise _busy("the bodies under way are too large, or those of this key")
                content += piece
                if not message.get("more_body", False):
                    return content
        finally:
            timer.cancel()

    def _told(self, headers: Headers, request_id: str) -> dict[str, str]:
        """Return the headers for engines."""
        key = self._options.engine_api_key
        authorization = authorization_of(headers) if key is None else f"Bearer {key}"
        told = {"content-type": "application/json", "x-request-id": request_id, "accept-encoding": "identity"}
        if authorization and authorization.isascii():  # engines' keys are ASCII
            told["authorization"] = authorization
        if SESSION_ID.fullmatch(session := headers.get(SESSION_HEADER, "")):
            told[SESSION_HEADER] = session
        parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
        if _TRACE_PARENT.fullmatch(parent):
            told["traceparent"] = parent
            if _TRACE_STATE.fullmatch(state):
                told["tracestate"] = state
        return told


def headers_of(scope: Scope) -> Headers:
    """Return the headers of a request."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def authorization_of(headers: Headers) -> str:
    """Return how a client authorizes itself; Anthropic's clients send a key in a header of their own."""
    key = headers.get("x-api-key", "")
    return headers.get("authorization") or (f"Bearer {key}" if key else "")


def request_id_of(headers: Headers) -> str:
    """Return the client's id of its request, if it is valid; otherwise a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _late() -> AnswerError:
    return AnswerError(Reason.SLOW_BODY, f"the body did not come within {_BODY_TIMEOUT_S:.0f} s")


def _busy(why: str) -> AnswerError:
    return AnswerError(Reason.BUSY, f"{why}: try again soon", {"retry-after": "1"})


def _ending() -> AnswerError:
    return AnswerError(Reason.ENDING, "the proxy is shutting down")
