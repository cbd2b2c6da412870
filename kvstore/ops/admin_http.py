"""Serves HTTP on loopback from a daemon thread: the administration of an engine, or a few pages of text."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from kvstore.model.errors import ConfigError
from kvstore.ops.admin import Controls, answer
from kvstore.protocol.loopback import is_from_here, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

    Page = Callable[[], tuple[int, str]]
    Respond = Callable[[Request, bytes], Response]

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS: Final = 64
_MAX_BODY_BYTES: Final = 4 << 20  # half a million tokens
_BODY_TIMEOUT_S: Final = 10.0
_PATIENCE_S: Final = 10.0  # longest wait for a client that does not read its answer
_END_WAIT_S: Final = 5.0


class LoopbackServer:
    """HTTP server on loopback, which listens from its creation until ``close``.

    Args:
        respond: answers a request, given its body, on a thread of this server.
        host: a loopback name or address. There are no passwords, so nothing else is allowed.
        port: 0 for any free port; the attribute ``port`` has the actual one.
        name: its name in messages.
        remedy: what to do if it cannot listen.

    Raises:
        ConfigError: the host is not loopback, the port is taken, or the libraries are not installed.
    """

    def __init__(self, respond: Respond, host: str, port: int, *, name: str, remedy: str) -> None:
        if not is_loopback(host):
            raise ConfigError(f"the host of {name} is {host!r}: it must be a loopback address such as 127.0.0.1")
        server = _make_server(respond, name)
        self._socket = listen(host, port, name, remedy)
        self.port: int = self._socket.getsockname()[1]
        self._server = server
        self._thread = threading.Thread(
            target=server.run, kwargs={"sockets": [self._socket]}, name="kvstore-admin", daemon=True
        )
        self._thread.start()
        logger.info("%s listens on %s port %d", name, host, self.port)

    def close(self) -> None:
        """Stop listening. Requests in progress have a second to end. Idempotent."""
        self._server.should_exit = True
        self._thread.join(_END_WAIT_S)
        self._socket.close()


class AdminServer(LoopbackServer):
    """Serves the administration of one engine.

    Args:
        controls: the object to administer; its methods are called from this server's threads.
        host: see ``LoopbackServer``.
        port: see ``LoopbackServer``.

    Raises:
        ConfigError: as ``LoopbackServer``.
    """

    def __init__(self, controls: Controls, host: str, port: int) -> None:
        def respond(request: Request, body: bytes) -> Response:
            from starlette.responses import JSONResponse  # noqa: PLC0415

            reply = answer(controls, request.method, request.url.path, request.headers, body)
            return JSONResponse(dict(reply.body), status_code=reply.status)

        remedy = "choose another internal_api_server_port_start, or switch internal_api_server_enabled off"
        super().__init__(respond, host, port, name="the admin endpoint", remedy=remedy)


class PageServer(LoopbackServer):
    """Serves a few pages of text.

    Args:
        pages: functions that make a page, its HTTP status and text, by path.
        port: on 127.0.0.1; 0 for any free port.
        name: see ``LoopbackServer``.
        remedy: see ``LoopbackServer``.

    Raises:
        ConfigError: as ``LoopbackServer``.
    """

    def __init__(self, pages: Mapping[str, Page], port: int, *, name: str, remedy: str) -> None:
        def respond(request: Request, _: bytes) -> Response:
            from starlette.responses import PlainTextResponse  # noqa: PLC0415

            page = pages.get(request.url.path)
            if not is_from_here(request.headers):
                return PlainTextResponse("only programs on this machine may send requests\n", HTTPStatus.FORBIDDEN)
            if page is None or request.method != "GET":
                return PlainTextResponse(f"unknown path: known are {', '.join(pages)}\n", HTTPStatus.NOT_FOUND)
            status, text = page()
            return PlainTextResponse(text, status)

        super().__init__(respond, "127.0.0.1", port, name=name, remedy=remedy)


def _make_server(respond: Respond, name: str) -> uvicorn.Server:
    try:
        import uvicorn  # noqa: PLC0415 - an extra
        from starlette.applications import Starlette  # noqa: PLC0415
        from starlette.concurrency import run_in_threadpool  # noqa: PLC0415
        from starlette.requests import ClientDisconnect  # noqa: PLC0415
        from starlette.responses import PlainTextResponse  # noqa: PLC0415
        from starlette.routing import Route  # noqa: PLC0415

        from kvstore.ops.http_limits import entrance  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{name}: {error.name} is not installed: pip install 'vllm-kvstore[admin]'") from error

    async def handle(request: Request) -> Response:
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > _MAX_BODY_BYTES:
                        return PlainTextResponse("the request body is too long\n", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse("the request body did not arrive in time\n", HTTPStatus.REQUEST_TIMEOUT)
        return await run_in_threadpool(respond, request, bytes(body))  # it may wait a moment

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=entrance(_MAX_CONNECTIONS, _PATIENCE_S),
            ws="none",
            log_config=None,  # the process configures its logging itself
            log_level=None,
            lifespan="off",
            loop="asyncio",
            timeout_keep_alive=2,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
    )


def listen(host: str, port: int, name: str, remedy: str) -> socket.socket:
    """Open a listening socket, for a server that messages call ``name``.

    Raises:
        ConfigError: it cannot be bound; ``remedy`` says what to do.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)  # clients are queued from now on
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # the library adds the address
        raise ConfigError(f"{name} cannot listen on {host} port {port}: {reason}; {remedy}") from error
