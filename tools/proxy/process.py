"""``kvstore proxy``: one address in front of prefill and decode engines, as a process.

process ── routes ── asks      what each engine is told
│          ├──────── engines   which engines are healthy, and whose turn it is
│          ├──────── events    streams
│          └──────── objects   bodies of megabytes, of which a few members are parsed
└─ gate ──────────── reply     who may ask, and how an answer ends
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Final

from starlette.requests import Request

from kvstore.errors import ConfigError
from kvstore.ops.admin_http import listen
from kvstore.tools.proxy.options import ProxyOptions

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from kvstore.tools.proxy.engines import EngineClient
    from kvstore.tools.proxy.gate import HEALTH, Doorkeeper, Endpoint, Gate
    from kvstore.tools.proxy.meters import ProxyMeters
    from kvstore.tools.proxy.reply import error_tree
    from kvstore.tools.proxy.routes import Router
except ImportError as missing:
    raise ConfigError(f"the proxy: {missing.name} is not installed: pip install 'vllm-kvstore[proxy]'") from missing


_GENERATING: Final = ("/v1/completions", "/v1/chat/completions")
_FORWARDED: Final = {"/v1/models": "GET", "/version": "GET", "/tokenize": "POST"}
_METRICS: Final = "/metrics"
_KEEP_ALIVE_S: Final = 5
_END_WAIT_S: Final = 2.0


class Proxy:
    """The routes and the engines behind them. Belongs to one event loop.

    Args:
        options: checked.
    """

    def __init__(self, options: ProxyOptions) -> None:
        meters = ProxyMeters()
        self.gate = Gate(options, meters)
        self._meters = meters
        self._client = EngineClient(options)
        self._router = Router(options, self._client, meters)
        paths = frozenset({*_GENERATING, *_FORWARDED, HEALTH, _METRICS})
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(Doorkeeper, api_key=options.api_key, paths=paths, meters=meters)],
            exception_handlers={HTTPException: _wrong_path},
            lifespan=self._watched,
        )
        self.app.router.redirect_slashes = False

    def _routes(self) -> list[Route]:
        generate, forward = (Endpoint(self.gate, answer) for answer in (self._router.generate, self._router.forward))
        return [
            *(Route(path, generate, methods=["POST"]) for path in _GENERATING),
            *(Route(path, forward, methods=[method]) for path, method in _FORWARDED.items()),
            Route(HEALTH, self._health),
            Route(_METRICS, self._show),
        ]

    @asynccontextmanager
    async def _watched(self, _app: Starlette) -> AsyncIterator[None]:
        """Check the engines once, then again and again until the end; then close all connections."""
        engines = self._router.engines
        await asyncio.gather(*map(self._client.check, engines))
        watches = [asyncio.create_task(self._client.watch(engine)) for engine in engines]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self._client.close()

    async def _health(self, _request: Request) -> Response:
        well = {"prefill": self._router.prefill.num_well, "decode": self._router.decode.num_well}
        status = "ok" if well["decode"] else "no decode engine answers"
        code = HTTPStatus.OK if well["decode"] else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": status, "engines": well}, code)

    async def _show(self, _request: Request) -> Response:
        return Response(self._meters.exposition(self._router.engines), media_type="text/plain; version=0.0.4")


def run_proxy(options: ProxyOptions, report: Callable[[int], None]) -> bool:
    """Serve until SIGTERM or SIGINT; a second one ends it at once.

    Args:
        options: checked.
        report: called with the port as soon as the proxy answers.

    Returns:
        Whether every request was answered to its end.

    Raises:
        ConfigError: it cannot listen.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request, and one every few seconds
    listener = listen(options.host, options.port, "the proxy", "choose another --port")
    return asyncio.run(_serve(options, listener, report))


async def _serve(options: ProxyOptions, listener: socket.socket, report: Callable[[int], None]) -> bool:
    proxy = Proxy(options)
    port: int = listener.getsockname()[1]
    server = _Server(_uvicorn_config(proxy, options), lambda: report(port))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if server.should_exit:
            proxy.gate.halt()
            server.force_exit = True
        server.should_exit = True
        loop.call_later(options.drain_s, proxy.gate.halt)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve(sockets=[listener])
    return proxy.gate.cut == 0


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which end the process by the signal that it got."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not touch them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report it."""
        await super().startup(sockets)
        self._announce()


def _uvicorn_config(proxy: Proxy, options: ProxyOptions) -> uvicorn.Config:
    return uvicorn.Config(
        proxy.app,
        log_config=None,  # the command has set up logging
        log_level=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_S,
        # The gate ends requests before that, each with an error that its client can read.
        timeout_graceful_shutdown=math.ceil(options.drain_s + _END_WAIT_S),
        server_header=False,
    )


async def _wrong_path(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_tree(error.status_code, error.detail), error.status_code, error.headers)
