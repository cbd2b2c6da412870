"""HTTP pages of a cache server: metrics and probes for machines, orders, and its status for people."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import threading
import time
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.model.errors import ConfigError
from kvstore.ops.access import Access, read_token
from kvstore.ops.admin_http import Page, PageServer
from kvstore.server.exposition import Exposition
from kvstore.tools.serve.history import History

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.config import StoreConfig
    from kvstore.server.hub import Hub
    from kvstore.tools.serve.reloading import Reloader

_TIMEOUT_S: Final = 2.0
_FRESH_S: Final = 0.5
_STARTING: Final = "starting"
_NO_ANSWER: Final = "the server does not answer"
_JSON: Final = "application/json"
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

Reply = tuple[int, str]
Tree = dict[str, Any]


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
        self._history: History | None = None
        self._reloader = reloader
        self._exposition = Exposition()
        self._showing = threading.Lock()
        self._shown: tuple[float, Tree] = (-math.inf, {})  # the last report, and its time
        host, file = config.server_http_host, config.server_http_token_file
        token = read_token(Path(file)) if file else None
        access = Access(host, token, "name a file with one in server_http_token_file")
        reloader.access = access
        # The page itself is open to all, as it has no figures.
        status = files(__package__).joinpath("status.html").read_text("utf-8")
        pages = {
            ("GET", "/metrics"): Page(self._metrics, is_open=True),
            ("GET", "/healthz"): Page(self._alive, is_open=True),
            ("GET", "/readyz"): Page(self._ready, is_open=True),
            ("GET", "/"): Page(lambda: (HTTPStatus.OK, status), True, media_type="text/html", policy=_policy(status)),
            ("GET", "/status.json"): Page(self._status, media_type=_JSON),
            ("POST", "/reload"): Page(self._reload, media_type=_JSON, needs_token=True),
            ("POST", "/drain"): Page(self._drain, media_type=_JSON, needs_token=True),
        }
        name, remedy = "the server's HTTP endpoint", "choose another server_http_port, or leave it out"
        self._server = PageServer(pages, access, host, config.server_http_port, name=name, remedy=remedy)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def start(self, hub: Hub) -> None:
        """Show a server that can be reached by its clients now."""
        self._hub = hub
        self._history = History(lambda: hub.snapshot(_TIMEOUT_S))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.close()
        if self._history is not None:
            self._history.close()

    def _asked(self, shown: Callable[[Hub], Reply]) -> Reply:
        """Show something of the server, unless it is being opened, or does not answer."""
        if self._hub is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"{_STARTING}\n"
        try:
            return shown(self._hub)
        except TimeoutError:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"{_NO_ANSWER}\n"

    def _report(self, hub: Hub) -> Tree:
        """Return a report that is at most half a second old: whatever asks for pages, the server makes few.

        Raises:
            TimeoutError: the server does not answer in time.
        """
        if not self._showing.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError
        try:
            if time.monotonic() - self._shown[0] > _FRESH_S:
                self._shown = time.monotonic(), hub.snapshot(_TIMEOUT_S)
            return self._shown[1]
        finally:
            self._showing.release()

    def _metrics(self) -> Reply:
        def shown(hub: Hub) -> Reply:
            tree = self._report(hub)
            with self._showing:
                return HTTPStatus.OK, self._exposition.page(tree, self._reloader.counts)

        return self._asked(shown)

    def _alive(self) -> Reply:
        """Answer 200 while the process works, also while it starts or ends."""
        if self._hub is None or self._hub.is_alive:
            return HTTPStatus.OK, "ok\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, f"{_NO_ANSWER}\n"

    def _ready(self) -> Reply:
        def shown(hub: Hub) -> Reply:
            status = hub.status(_TIMEOUT_S)
            return HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE, f"{status}\n"

        return self._asked(shown)

    def _status(self) -> Reply:
        hub, history = self._hub, self._history
        if hub is None or history is None:
            return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": _STARTING})
        try:
            tree = self._report(hub)
        except TimeoutError:
            return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": _NO_ANSWER})
        return _as_json(HTTPStatus.OK, {**tree, "reloads": self._reloader.counts, "history": history.samples()})

    def _reload(self) -> Reply:
        try:
            return _as_json(HTTPStatus.OK, self._reloader.reload())
        except ConfigError as error:
            return _as_json(HTTPStatus.CONFLICT, {"error": str(error)})
        except TimeoutError:
            return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": _NO_ANSWER})

    def _drain(self) -> Reply:
        if self._hub is None:
            return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": _STARTING})
        try:
            return _as_json(HTTPStatus.OK, {"status": "closing", "unwritten": self._hub.drain(_TIMEOUT_S)})
        except ConfigError as error:
            return _as_json(HTTPStatus.CONFLICT, {"error": str(error)})
        except TimeoutError:
            return _as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": _NO_ANSWER})


def _as_json(status: HTTPStatus, tree: Mapping[str, object]) -> Reply:
    return status, json.dumps(tree)


def _policy(page: str) -> str:
    """Return a policy that lets a page load nothing but itself, and run no script and no style but its own."""

    def sources(kind: str) -> str:
        found = [text for name, text in _INLINE.findall(page) if name == kind]
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    own = f"script-src {sources('script')}; style-src {sources('style')}; connect-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
