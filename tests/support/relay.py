"""A relay between two processes that can be slow, hang, or be cut."""

from __future__ import annotations

import socket
import threading
import time
from enum import Enum
from typing import Final, Self

_PIECE_BYTES: Final = 64 << 10
_SLOW_S: Final = 0.01  # for each ``_PIECE_BYTES``, however the kernel cuts them
_POLL_S: Final = 0.02


class Mood(Enum):
    """Modes in which the relay passes bytes on."""

    FAST = "fast"
    SLOW = "slow"
    HUNG = "hung"  # nothing is read
    CUT = "cut"  # after the next byte that is sent, the connection ends


class Relay:
    """Relay of connections to its port to another port. A context manager."""

    def __init__(self, port: int) -> None:
        self.mood = Mood.FAST
        self.num_bytes = 0  # passed on, both ways
        self.passed_s = 0.0  # time of the last ones
        self.slow_s = _SLOW_S
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_closed = threading.Event()
        self._sockets: list[socket.socket] = []

    @property
    def port(self) -> int:
        """Port on which it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def target(self) -> int:
        """Port to which it relays."""
        return self._target

    def aim(self, port: int) -> None:
        """Relay new connections to another port, and end the present ones."""
        self._target = port
        self._end()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="test-relay", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_closed.set()
        self._listener.close()
        self._end()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), name="test-relay", daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := self._read(source):
                if self.mood is Mood.CUT:
                    break
                if self.mood is Mood.SLOW:
                    time.sleep(self.slow_s * len(piece) / _PIECE_BYTES)
                sink.sendall(piece)
                self.num_bytes += len(piece)
                self.passed_s = time.monotonic()
        except OSError:
            pass
        for one in (source, sink):
            one.close()

    def _read(self, source: socket.socket) -> bytes:
        source.settimeout(_POLL_S)
        while not self._is_closed.is_set():
            if self.mood is Mood.HUNG:
                time.sleep(_POLL_S)
                continue
            try:
                return source.recv(_PIECE_BYTES)
            except TimeoutError:
                continue
        return b""

    def _end(self) -> None:
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            one.close()
