"""Changes of the configuration while the server runs."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.ops.access import Access, read_token
from kvstore.tools.serve.options import server_options

if TYPE_CHECKING:
    from kvstore.config import StoreConfig
    from kvstore.server.hub import Hub

logger = logging.getLogger(__name__)

CHANGEABLE: Final = (
    "server_clients",
    "server_operators",
    "server_quotas",
    "server_drain_secs",
    "server_http_token_file",
    "server_log_level",
    "pin_max_secs",
)
_TIMEOUT_S: Final = 10.0
_END_WAIT_S: Final = 5.0


class Reloader:
    """Reads the configuration again, and applies to the running server what may change. Thread-safe.

    What cannot be used changes nothing. Other keys than ``CHANGEABLE`` keep their values until a restart.

    Args:
        path: the configuration's file.
        config: the configuration with which the server starts.
    """

    def __init__(self, path: Path, config: StoreConfig) -> None:
        self.access: Access | None = None  # whose token is read again
        self.counts = Counter(ok=0, refused=0)
        self._path = path
        self._config = config
        self._hub: Hub | None = None
        self._lock = threading.Lock()
        self._asked: SimpleQueue[bool] = SimpleQueue()  # True to read again, False to end
        self._thread = threading.Thread(target=self._run, name="kvstore-reload", daemon=True)

    def start(self, hub: Hub) -> None:
        """Carry out what was asked for, now and from now on."""
        self._hub = hub
        self._thread.start()

    def ask(self) -> None:
        """Have the configuration read again soon. For signal handlers, as the queue is reentrant."""
        self._asked.put(True)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._asked.put(False)
        if self._thread.is_alive():
            self._thread.join(_END_WAIT_S)

    def reload(self) -> dict[str, object]:
        """Read the configuration again, and report the changes.

        Raises:
            ConfigError: it cannot be used, and nothing was changed.
            TimeoutError: the server did not answer in time, and may change later.
        """
        with self._lock:
            try:
                report = self._reload()
            except (ConfigError, TimeoutError) as error:
                self.counts["refused"] += 1
                logger.error("the former configuration stays in use: %s", error)  # noqa: TRY400 - its message says all
                raise
            self.counts["ok"] += 1
            logger.info("the configuration was read again: %s", report)
            return report

    def _reload(self) -> dict[str, object]:
        hub = self._hub
        if hub is None:
            raise ConfigError("the server is being opened: try again when it is ready")
        loaded = load_config(path=self._path).config
        kept = {key: value for key, value in _values(self._config).items() if key not in CHANGEABLE}
        restart = sorted(key for key, value in kept.items() if _values(loaded)[key] != value)
        config = loaded.model_copy(update=kept)
        options, before = server_options(config), hub.options
        file = config.server_http_token_file
        token = read_token(Path(file)) if file else None
        cut = hub.change(options, _TIMEOUT_S)
        if self.access is not None:
            self.access.token = token
        logging.getLogger().setLevel(config.server_log_level)
        self._config = config
        then, now = ({of.name: (key, of) for key, of in some.listed.items()} for some in (before, options))
        return {
            "clients_added": sorted(now.keys() - then.keys()),
            "clients_removed": sorted(then.keys() - now.keys()),
            "clients_changed": sorted(name for name in now.keys() & then.keys() if now[name] != then[name]),
            "disconnected": cut,
            "quotas_changed": options.quotas != before.quotas,
            "needs_restart": restart,
        }

    def _run(self) -> None:
        while self._asked.get():
            while not self._asked.empty():  # several questions have one answer
                if not self._asked.get():
                    return
            try:
                self.reload()
            except (ConfigError, TimeoutError):
                continue  # it was logged


def _values(config: StoreConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in type(config).model_fields}
