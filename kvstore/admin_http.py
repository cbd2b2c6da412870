"""Serves ``admin.answer`` over HTTP, from a daemon thread."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Final

from kvstore.admin import Controls, answer, is_loopback
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS: Final = 16
_END_WAIT_S: Final = 5.0


class AdminServer:
    """Listens from the moment it is made until ``close``.

    Args:
        controls: what is administered; its methods are called from this server's threads.
        host: a loopback name or address. There are no passwords, so nothing else is allowed.
        port: 0 for any that is free; see ``port``.

    Raises:
        ConfigError: the host is no loopback, the port is taken, or the libraries are not installed.
    """

    def __init__(self, controls: Controls, host: str, port: int) -> None:
        if not is_loopback(host):
            raise ConfigError(f"internal_api_server_host is {host!r}: it must be a loopback address such as 127.0.0.1")
        server = _make_server(controls)
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server = server
        self._thread = threading.Thread(
            target=server.run, kwargs={"sockets": [self._socket]}, name="kvstore-admin", daemon=True
        )
        self._thread.start()
        logger.info("the admin endpoint listens on %s port %d", host, self.port)

    def close(self) -> None:
        """Stop listening. Requests under way have a second to end. Idempotent."""
        self._server.should_exit = True
        self._thread.join(_END_WAIT_S)
        self._socket.close()


def _make_server(controls: Controls) -> uvicorn.Server:
    try:
        import uvicorn  # noqa: PLC0415 - an extra
        from starlette.applications import Starlette  # noqa: PLC0415
        from starlette.responses import JSONResponse  # noqa: PLC0415
        from starlette.routing import Route  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"internal_api_server_enabled is true, and {error.name} is not installed: pip install 'vllm-kvstore[admin]'"
        ) from error

    def respond(request: Request) -> JSONResponse:  # not async: it runs in a thread, and may wait a moment
        reply = answer(controls, request.method, request.url.path, request.headers)
        return JSONResponse(dict(reply.body), status_code=reply.status)

    app = Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "POST"])])
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,  # the process's logging is not ours to configure
            log_level=None,
            lifespan="off",
            loop="asyncio",
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=2,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"the admin endpoint cannot listen on {host} port {port}: {error.strerror or error}; choose another "
        "internal_api_server_port_start, or switch internal_api_server_enabled off"
    )
