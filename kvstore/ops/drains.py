"""The order to drain, from the scheduler's process to a worker's, also while the engine is idle and plans no steps.

A worker listens on an abstract unix socket with a random name, which the scheduler learns with the worker's facts. Only
processes of the same user, or root, are heard; who connects sends ``drain`` and receives the number of chunks that are
still to be written.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.protocol.credentials import credentials_of
from kvstore.protocol.knock import knock

logger = logging.getLogger(__name__)

_ORDER: Final = b"drain"
_PREFIX: Final = "kvstore-drain-"
_ANSWER_WITHIN_S: Final = 5.0
_MAX_ANSWER_BYTES: Final = 32
_LOOK_S: Final = 0.5  # for the end


class DrainListener:
    """Carries out orders to drain on a thread of its own, one after the other, until ``close``.

    Args:
        drain: called on the thread; returns the number of chunks left, and may raise ``TimeoutError`` or a
            ``KVStoreError``, after which the order has no answer.

    Attributes:
        name: for ``drain_at``.

    Raises:
        ConfigError: no socket can be opened.
    """

    def __init__(self, drain: Callable[[], int]) -> None:
        self.name = f"{_PREFIX}{secrets.token_hex(16)}"
        self._drain = drain
        self._ended = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(4)
        except OSError as error:
            self._socket.close()
            why = f"no socket for orders to drain can be opened: {error.strerror}; raise the limit of open files"
            raise ConfigError(why) from error
        self._socket.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._serve, name="kvstore-drain", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close the socket. Idempotent; waits for an order under way, which is bounded."""
        self._ended.set()
        knock(self._socket)
        self._thread.join(_ANSWER_WITHIN_S)
        self._socket.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:  # nobody came
                continue
            except OSError:  # closed; or no more files may be open
                self._ended.wait(_LOOK_S)
                continue
            with connection, suppress(OSError):  # whoever came has gone
                connection.settimeout(_LOOK_S)
                if not self._ended.is_set():
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        if not credentials_of(connection).are_trusted or connection.recv(len(_ORDER)) != _ORDER:
            return
        try:
            left = self._drain()
        except (TimeoutError, KVStoreError) as error:
            logger.warning("an order to drain could not be carried out now: %s", str(error) or "no answer in time")
        else:
            connection.sendall(b"%d" % left)


def drain_at(name: str) -> int | None:
    """Order a worker of this host to drain. Waits for 5 seconds at most.

    Returns:
        The number of chunks that are still to be written; None if the worker does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_WITHIN_S)
            connection.connect(f"\0{name}")
            connection.sendall(_ORDER)
            return int(connection.recv(_MAX_ANSWER_BYTES))
    except (OSError, ValueError):
        return None
