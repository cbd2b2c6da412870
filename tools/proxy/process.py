"""Process of ``kvstore proxy``, which serves one address in front of prefill and decode engines.

process ── routes ── requests  requests to the engines
│          │         └─ objects   bodies of megabytes, of which a few members are parsed
│          ├──────── fleet     engines, which may change
│          │         ├─ choice    choice of an engine
│          │         └─ engines   health and load
│          │            └─ upstream   connections to engines
│          └──────── events    streams
├─ admission ─────── reply     authorization, and ends of answers
│  └─ shares                   bounds per API key
└─ http_limits                 connections of clients
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.ops.admin_http import listen
from kvstore.tools.interrupts import ignore_hangup
from kvstore.tools.proxy.options import ProxyOptions, read_keys

try:
    import uvicorn
    import uvloop
    from starlette.responses import JSONResponse, Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvstore.ops.http_limits import entrance
    from kvstore.tools.proxy.admission import HEALTH, Doorkeeper, Gate
    from kvstore.tools.proxy.fleet import Fleet
    from kvstore.tools.proxy.meters import ProxyMeters
    from kvstore.tools.proxy.reply import MESSAGES, error_tree
    from kvstore.tools.proxy.routes import Router
except ImportError as missing:
    raise ConfigError(f"the proxy: {missing.name} is not installed: pip install 'vllm-kvstore[proxy]'") from missing


logger = logging.getLogger(__name__)

_GENERATING: Final = ("/v1/completions", "/v1/chat/completions", MESSAGES)
_FORWARDED: Final = {
    "/v1/models": "GET",
    "/version": "GET",
    "/tokenize": "POST",
    "/v1/messages/count_tokens": "POST",
}
_METRICS: Final = "/metrics"
_OWN: Final = ("GET", "HEAD")  # no engine is asked for a HEAD: the proxy would wait for the body of its answer
_KEEP_ALIVE_S: Final = 5
_GARBAGE: Final = (20_000, 20, 50)  # requests leave hardly any cycles; default thresholds took a tenth of the time
_END_WAIT_S: Final = 2.0


class Proxy:
    """Routes and the engines behind them, for use on one event loop.

    Args:
        options: checked options.
    """

    def __init__(self, options: ProxyOptions) -> None:
        meters = ProxyMeters()
        self.gate = Gate(options, meters)
        self._meters = meters
        self._fleet = Fleet(options)
        router = Router(options, self._fleet, meters)
        generate, forward = (partial(self.gate.carry_out, answer) for answer in (router.generate, router.forward))
        self._routes: dict[str, tuple[tuple[str, ...], ASGIApp]] = {
            **dict.fromkeys(_GENERATING, (("POST",), generate)),
            **{path: ((method,), forward) for path, method in _FORWARDED.items()},
            HEALTH: (_OWN, self._health),
            _METRICS: (_OWN, self._show),
        }
        self.app = Doorkeeper(self._answer, options.api_keys, frozenset(self._routes), meters)

    def change_keys(self, api_keys: Sequence[str]) -> None:
        """Replace the keys of which clients must present one."""
        self.app.change(api_keys)
        self.gate.share_between(len(api_keys))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by its path, or run the engines' checks for as long as the server runs."""
        if scope["type"] == "lifespan":
            await self._watch(receive, send)
            return
        methods, app = self._routes.get(scope["path"], ((), None))
        if app is None:
            app = _refusal(HTTPStatus.NOT_FOUND)
        elif scope["method"] not in methods:
            app = _refusal(HTTPStatus.METHOD_NOT_ALLOWED, {"allow": ", ".join(methods)})
        await app(scope, receive, send)

    async def _watch(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._fleet.watched():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        well = {"prefill": self._fleet.prefill.num_well, "decode": self._fleet.decode.num_well}
        status = "ok" if well["decode"] else "no decode engine answers"
        code = HTTPStatus.OK if well["decode"] else HTTPStatus.SERVICE_UNAVAILABLE
        await JSONResponse({"status": status, "engines": well}, code)(scope, receive, send)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = self._meters.exposition(self._fleet.engines, is_outdated=self._fleet.is_outdated)
        await Response(shown, media_type="text/plain; version=0.0.4")(scope, receive, send)


def _refusal(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error_tree(status, status.phrase), status, headers)


def run_proxy(options: ProxyOptions, report: Callable[[int], None]) -> bool:
    """Serve until SIGTERM or SIGINT; a second signal ends the proxy at once.

    Args:
        options: checked options.
        report: called with the port as soon as the proxy answers.

    Returns:
        True if every request was answered completely.

    Raises:
        ConfigError: the proxy cannot listen.
    """
    gc.freeze()  # imported modules stay in memory
    gc.set_threshold(*_GARBAGE)
    listener = listen(options.host, options.port, "the proxy", "choose another --port")
    return uvloop.run(_serve(options, listener, report))


async def _serve(options: ProxyOptions, listener: socket.socket, report: Callable[[int], None]) -> bool:
    proxy = Proxy(options)
    port: int = listener.getsockname()[1]
    context = options.server_context()
    server = _Server(_uvicorn_config(proxy, options, context), lambda: report(port))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if server.should_exit:
            proxy.gate.halt()
            server.force_exit = True
        server.should_exit = True
        loop.call_later(options.drain_s, proxy.gate.halt)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    ignore_hangup()
    renewal = asyncio.create_task(_renew(options, context, proxy))
    await server.serve(sockets=[listener])
    renewal.cancel()
    return proxy.gate.cut == 0


class _Server(uvicorn.Server):
    """Uvicorn server without its signal handlers, which raise the received signal again."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and report it."""
        await super().startup(sockets)
        self._announce()


def _uvicorn_config(proxy: Proxy, options: ProxyOptions, context: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        proxy.app,
        http=entrance(options.max_connections, options.timeout_s),
        ws="none",
        loop="none",
        log_config=None,  # the command has set up logging
        log_level=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_S,
        # The gate ends requests before this timeout, each with an error that its client can read.
        timeout_graceful_shutdown=math.ceil(options.drain_s + _END_WAIT_S),
        server_header=False,
        proxy_headers=False,
    )
    config.load()
    config.ssl = context
    return config


async def _renew(options: ProxyOptions, context: ssl.SSLContext | None, proxy: Proxy) -> None:
    """Read certificate and API keys again when their files change, for new connections and requests."""

    def show() -> None:
        if context is not None and options.tls_cert is not None:
            options.server_context()  # checks the files
            context.load_cert_chain(options.tls_cert, options.tls_key, password="")

    def admit() -> None:
        if options.api_key_file is not None:
            proxy.change_keys(read_keys(options.api_key_file))

    renewed = {(options.tls_cert, options.tls_key): show, (options.api_key_file,): admit}
    read = {files: _written(files) for files in renewed}
    while True:
        await asyncio.sleep(options.health_interval_s)
        for files, renew in renewed.items():
            now = _written(files)
            if now == read[files]:
                continue
            read[files] = now
            try:
                renew()
            except (ConfigError, OSError) as error:
                logger.error("%s stays as it was: %s", files[0], error)  # noqa: TRY400 - the message says it all
            else:
                logger.info("%s was read again", files[0])


def _written(files: Sequence[Path | None]) -> list[int]:
    """Return the modification times of files; 0 for missing ones."""

    def written(file: Path) -> int:
        try:
            return file.stat().st_mtime_ns
        except OSError:
            return 0

    return [written(file) for file in files if file is not None]
