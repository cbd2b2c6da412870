"""An OpenAI-compatible server, over real HTTP, that answers as a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from kvstore.tools.processes import free_port
from support.redis_server import wait_for

# Odd on purpose: a proxy that passes it on byte for byte keeps its spaces, its escapes and its letters.
EVENTS = (
    b'data: {"id": "cmpl-1","object":"text_completion", "created":7,"model":"m","choices":[{"text":"\xc3\xa4"}]}\n\n',
    b": a comment\n\n",
    b'data: {"id":"cmpl-1","choices":[{"text":"\\u00e4","index":0,"finish_reason":"length"}],  "usage":null}\n\n',
)
USAGE = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[],'
    b'"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n'
)
DONE = b"data: [DONE]\n\n"
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


class HttpThread:
    """An ASGI application on a port of this machine, from ``start`` to ``stop``. It can be started again."""

    def __init__(self, app: ASGIApp, **uvicorns: Any) -> None:
        self._uvicorns = uvicorns
        self.port = free_port()
        self._app = app
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """URL at which it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        config = uvicorn.Config(
            self._app,
            port=self.port,
            log_config=None,
            timeout_graceful_shutdown=1,
            **self._uvicorns,
        )
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, name="test-http")
        self._thread.start()
        wait_for("it listens", lambda: server.started)
        return self

    def begin_to_stop(self) -> None:
        """Take no more connections; ``stop`` waits until it has ended."""
        if self._server is not None:
            self._server.should_exit = True

    def stop(self) -> None:
        self.begin_to_stop()
        if self._server is not None and self._thread is not None:
            self._thread.join(20)
            assert not self._thread.is_alive()
            self._server = None


class Seen(NamedTuple):
    """A request that an engine got."""

    path: str
    body: Any
    headers: dict[str, str]


@dataclass
class Script:
    """Answers of an engine."""

    status: int = 200
    media_type: str = "application/json"  # of answers that are no stream
    answer: dict[str, Any] = field(default_factory=lambda: {"id": "cmpl-1", "choices": [{"text": "x"}]})
    events: tuple[bytes, ...] = (*EVENTS, DONE)
    piece_bytes: int = 0  # cut the stream into pieces of this size; 0 for one an event
    dies_after: int | None = None  # pieces of a stream, after which the connection is cut
    holds_after: int | None = None  # pieces, after which it sends nothing until ``gate`` opens; 0 for any answer
    health: int = 200


class FakeEngine(HttpThread):
    """An engine that answers as its script says, and remembers its requests."""

    def __init__(self, **uvicorns: Any) -> None:
        self.script = Script()
        self.seen: list[Seen] = []
        self.health_checks = 0
        self.aborted = 0
        self.held = 0  # answers that wait or waited for the gate
        self.gate = threading.Event()
        routes = [
            Route("/health", self._health),
            *(Route(path, self._answer, methods=["POST"]) for path in _GENERATING),
            *(Route(path, self._answer, methods=["GET", "POST"]) for path in ("/v1/models", "/version", "/tokenize")),
        ]
        super().__init__(Starlette(routes=routes), **uvicorns)

    @property
    def last(self) -> Seen:
        """The last request."""
        return self.seen[-1]

    def stop(self) -> None:
        self.gate.set()
        super().stop()

    async def _health(self, _request: Request) -> Response:
        self.health_checks += 1
        return Response(status_code=self.script.health)

    async def _answer(self, request: Request) -> Response:
        content = await request.body()
        body = json.loads(content) if content else None
        self.seen.append(Seen(request.url.path, body, dict(request.headers)))
        script = self.script
        if isinstance(body, dict) and body.get("stream") is True and script.status == 200:
            return StreamingResponse(self._stream(script), media_type="text/event-stream")
        if script.holds_after == 0:
            await self._hold(request)
        headers = {"Retry-After": "9"} if script.status == 429 else None
        if script.status == 204:
            return Response(status_code=204, media_type=script.media_type)
        return JSONResponse(script.answer, script.status, headers)

    async def _stream(self, script: Script) -> AsyncIterator[bytes]:
        whole = b"".join(script.events)
        size = script.piece_bytes
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)] if size else list(script.events)
        for number, piece in enumerate(pieces):
            if number == script.dies_after:
                raise ConnectionAbortedError("as the script says")
            if number == script.holds_after:
                await self._hold(None)
            yield piece

    async def _hold(self, request: Request | None) -> None:
        """Wait for the gate. Counts a disconnect of the client, which Starlette reports to streams by cancellation."""
        self.held += 1
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.01)
                if request is not None and await request.is_disconnected():
                    self.aborted += 1
                    return
        except asyncio.CancelledError:
            self.aborted += 1
            raise


@contextmanager
def fake_engines(count: int) -> Iterator[list[FakeEngine]]:
    """Yield as many engines that answer."""
    engines = [FakeEngine().start() for _ in range(count)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.begin_to_stop()
        for engine in engines:
            engine.stop()
