"""Thread that detects the end of the server of idle connections, without polling.

As long as a process has the memory of a server mapped, the system cannot give it to the next server. Unmapping may take
seconds, so other threads also leave that to this thread.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress

from kvstore.tiers.server.hold import Hold


class Watcher:
    """Watcher of holds on servers' memory. Thread-safe. Its thread begins with the first hold, and ends at ``close``.

    Args:
        ended: called on that thread after the other end of a hold was closed.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def watch(self, hold: Hold) -> None:
        """Watch a hold until this process closes it."""
        with self._lock:
            if self._is_closed:
                return
            if self._epoll is None:
                self._epoll = self._begin()
            self._epoll.register(hold, select.EPOLLRDHUP | select.EPOLLET)

    def do(self, job: Callable[[], None]) -> None:
        """Run a job on the thread, or on the caller's if there is none."""
        with self._lock:
            has_thread = self._thread is not None and not self._is_closed
            if has_thread:
                self._jobs.append(job)
                os.eventfd_write(self._wake, 1)
        if not has_thread:
            job()

    def close(self, timeout_s: float) -> None:
        """End the thread after the waiting jobs. One that unmaps memory for longer goes on. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _begin(self) -> select.epoll:
        """Start the thread, which closes its descriptors at its end.

        Raises:
            OSError: too many files are open.
        """
        with ExitStack() as opened:
            epoll = opened.enter_context(select.epoll())
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self._wake)
            epoll.register(self._wake, select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=(epoll,), name="kvstore-watch", daemon=True)
            thread.start()
            self._thread = thread
            opened.pop_all()
        return epoll

    def _run(self, epoll: select.epoll) -> None:
        while not self._is_closed:
            events = epoll.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if any(fd != self._wake for fd, _ in events):
                self._ended()
            self._work()
        self._work()
        with self._lock:  # close() may just be about to write to it
            epoll.close()
            os.close(self._wake)

    def _work(self) -> None:
        while self._jobs:
            self._jobs.popleft()()
