"""Lines on their way to another process, which may stop reading: no caller ever waits for it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Final

_MOST_BYTES: Final = 8 << 20  # that wait; a call's line has at most a few hundred KB


class Outbox:
    """Lines for one socket, in order. Thread-safe.

    A line leaves on its caller's thread while the socket takes it at once, else on a thread of its own, which begins
    when it is first needed.

    Args:
        link: a blocking socket, whose other end this is the only one to write to.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()  # the first is being sent
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_over = False

    def put(self, line: bytes) -> None:
        """Send a line, now or later.

        Raises:
            OSError: the other end has gone.
            BufferError: too much waits already; nothing of the line is sent.
        """
        with self._changed:
            if self._is_over:
                raise BrokenPipeError("the other end has gone")
            if self._waiting_bytes + len(line) > _MOST_BYTES:
                raise BufferError(f"{self._waiting_bytes:,} bytes wait to be read")
            if rest := line if self._waiting else line[self._send_now(line) :]:
                self._waiting.append(rest)
                self._waiting_bytes += len(rest)
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvstore-mooncake-orders", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """Drop what waits. The thread ends once the other end has gone."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _send_now(self, line: bytes) -> int:
        try:
            return self._link.send(line, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                line = self._waiting[0]
            try:
                self._link.sendall(line)
            except OSError:  # whoever reads from the other end notices
                self.close()
                return
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(line)
