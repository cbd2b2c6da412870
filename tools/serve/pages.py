"""HTTP pages of a cache server for machines: metrics, probes, and the orders of an operator."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.model.errors import ConfigError
from kvstore.ops.access import Access, read_token
from kvstore.ops.admin_http import PageServer
from kvstore.server.exposition import Exposition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.config import StoreConfig
    from kvstore.server.hub import Hub
    from kvstore.tools.serve.reloading import Reloader

_TIMEOUT_S: Final = 2.0
_STARTING: Final = "starting"

Reply = tuple[int, str]


class Pages:
    """Pages that answer from before the server opens its disk until the process ends.

    Args:
        config: configuration of the server, with a port.
        reloader: reads the configuration again, the token included.

    Raises:
        ConfigError: the address cannot be listened on, or the token cannot be read.
    """

    def __init__(self, config: StoreConfig, reloader: Reloader) -> None:
        assert config.server_http_port is not None
        self._hub: Hub | None = None
        self._reloader = reloader
        self._exposition = Exposition()
        host, file = config.server_http_host, config.server_http_token_file
        access = Access(
            host, read_token(Path(file)) if file else None, "name a file with one in server_http_token_file"
        )
        reloader.access = access
        self._server = PageServer(
            {"/metrics": self._metrics, "/healthz": self._alive, "/readyz": self._ready},
            {"/reload": self._reload, "/drain": self._drain},
            access,
            host,
            config.server_http_port,
            name="the server's HTTP endpoint",
            remedy="choose another server_http_port, or leave it out",
        )
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def start(self, hub: Hub) -> None:
        """Show a server that can be reached by its clients now."""
        self._hub = hub

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.close()

    def _asked(self, shown: Callable[[Hub], Reply]) -> Reply:
        """Show something of the server, unless it is being opened, or does not answer."""
        if self._hub is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"{_STARTING}\n"
        try:
            return shown(self._hub)
        except TimeoutError:
            return HTTPStatus.SERVICE_UNAVAILABLE, "the server does not answer\n"

    def _metrics(self) -> Reply:
        def shown(hub: Hub) -> Reply:
            return HTTPStatus.OK, self._exposition.page(hub.snapshot(_TIMEOUT_S), self._reloader.counts)

        return self._asked(shown)

    def _alive(self) -> Reply:
        """Answer 200 while the process works, also while it starts or ends."""
        if self._hub is None:
            return HTTPStatus.OK, f"{_STARTING}\n"
        return self._asked(lambda hub: (HTTPStatus.OK, f"{hub.status(_TIMEOUT_S)}\n"))

    def _ready(self) -> Reply:
        def shown(hub: Hub) -> Reply:
            status = hub.status(_TIMEOUT_S)
            return HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE, f"{status}\n"

        return self._asked(shown)

    def _reload(self) -> tuple[int, Mapping[str, object]]:
        try:
            return HTTPStatus.OK, self._reloader.reload()
        except ConfigError as error:
            return HTTPStatus.CONFLICT, {"error": str(error)}
        except TimeoutError:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the server does not answer"}

    def _drain(self) -> tuple[int, Mapping[str, object]]:
        if self._hub is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": _STARTING}
        try:
            return HTTPStatus.OK, {"status": "closing", "unwritten": self._hub.drain(_TIMEOUT_S)}
        except TimeoutError:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the server does not answer"}
