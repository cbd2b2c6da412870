"""Serves HTTP from a daemon thread: the administration of an engine, or a few pages and orders."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.ops.access import Access
from kvstore.ops.admin import DRAIN, PROBE, Controls, answer
from kvstore.protocol.loopback import is_loopback

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

    Respond = Callable[[Request, bytes], Response]
    Admit = Callable[[Request], Response | None]

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS: Final = 64
_MAX_BODY_BYTES: Final = 4 << 20  # half a million tokens
_MAX_ORDER_BYTES: Final = 4096
_BODY_TIMEOUT_S: Final = 10.0
_PATIENCE_S: Final = 10.0  # longest wait for a client that does not read its answer
_END_WAIT_S: Final = 5.0


class HttpServer:
    """HTTP server, which listens from its creation until ``close``.

    Args:
        admit: returns a refusal, or None, before the body is received.
        respond: answers a request, given its body, on a thread of this server.
        host: a name or address.
        port: 0 for any free port; the attribute ``port`` has the actual one.
        name: its name in messages.
        remedy: what to do if it cannot listen.

    Raises:
        ConfigError: the port is taken, the host is not here, or the libraries are not installed.
    """

    def __init__(
        self,
        admit: Admit,
        respond: Respond,
        host: str,
        port: int,
        *,
        name: str,
        remedy: str,
        most_body_bytes: int = _MAX_BODY_BYTES,
    ) -> None:
        server = _make_server(admit, respond, name, most_body_bytes)
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


class AdminServer(HttpServer):
    """Serves the administration of one engine.

    Args:
        controls: the object to administer; its methods are called from this server's threads.
        host: see ``HttpServer``.
        port: see ``HttpServer``.
        token: token that all requests but probes need; None for none, on a loopback address only.

    Raises:
        ConfigError: as ``HttpServer``, or other hosts can reach it, and there is no token.
    """

    def __init__(self, controls: Controls, host: str, port: int, token: str | None = None) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"other hosts can reach the admin endpoint at {host!r}: name internal_api_server_token_file, or a "
                "loopback address such as 127.0.0.1"
            )
        access = Access(host, token, "name a file with one in internal_api_server_token_file")

        def admit(request: Request) -> Response | None:
            from starlette.responses import JSONResponse  # noqa: PLC0415

            path = request.url.path
            refusal = access.refusal(request.headers, is_open=path == PROBE, needs_token=path == DRAIN)
            return None if refusal is None else JSONResponse({"error": refusal.message}, refusal.status)

        def respond(request: Request, body: bytes) -> Response:
            from starlette.responses import JSONResponse  # noqa: PLC0415

            reply = answer(controls, request.method, request.url.path, body)
            return JSONResponse(dict(reply.body), status_code=reply.status)

        remedy = "choose another internal_api_server_port_start, or switch internal_api_server_enabled off"
        super().__init__(admit, respond, host, port, name="the admin endpoint", remedy=remedy)


class Page(NamedTuple):
    """Something that a ``PageServer`` shows, or does.

    Attributes:
        show: returns the HTTP status and the text; called on a thread of the server.
        is_open: True if it needs no token; see ``Access``.
        needs_token: True if it needs one on loopback, too.
        media_type: media type of the text.
        policy: content security policy of a page for browsers.
    """

    show: Callable[[], tuple[int, str]]
    is_open: bool = False
    needs_token: bool = False
    media_type: str = "text/plain"
    policy: str = "default-src 'none'"


class PageServer(HttpServer):
    """Serves a few pages, and carries out orders without a body.

    Args:
        pages: the pages by method and path.
        access: who may see pages that are not open.
        host: see ``HttpServer``.
        port: see ``HttpServer``.
        name: see ``HttpServer``.
        remedy: see ``HttpServer``.

    Raises:
        ConfigError: as ``HttpServer``.
    """

    def __init__(
        self, pages: Mapping[tuple[str, str], Page], access: Access, host: str, port: int, *, name: str, remedy: str
    ) -> None:
        def page_of(request: Request) -> Page | None:
            method = "GET" if request.method == "HEAD" else request.method
            return pages.get((method, request.url.path))

        def admit(request: Request) -> Response | None:
            from starlette.responses import PlainTextResponse  # noqa: PLC0415

            page = page_of(request)
            is_open, needs_token = (page.is_open, page.needs_token) if page is not None else (False, False)
            refusal = access.refusal(request.headers, is_open=is_open, needs_token=needs_token)
            return None if refusal is None else PlainTextResponse(f"{refusal.message}\n", refusal.status)

        def respond(request: Request, _: bytes) -> Response:
            from starlette.responses import PlainTextResponse  # noqa: PLC0415

            page = page_of(request)
            if page is None:
                known = ", ".join(f"{method} {path}" for method, path in pages)
                return PlainTextResponse(f"unknown path: known are {known}\n", HTTPStatus.NOT_FOUND)
            status, text = page.show()
            headers = {"content-security-policy": page.policy, "x-content-type-options": "nosniff"}
            headers |= {"cache-control": "no-store", "referrer-policy": "no-referrer"}
            return PlainTextResponse(text, status, headers, page.media_type)

        super().__init__(admit, respond, host, port, name=name, remedy=remedy, most_body_bytes=_MAX_ORDER_BYTES)


def _make_server(admit: Admit, respond: Respond, name: str, most_body_bytes: int) -> uvicorn.Server:
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
        refusal = admit(request)
        if refusal is not None:
            return refusal
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > most_body_bytes:
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
            access_log=False,  # each probe and each scrape would be a line
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
