"""Shuts the network's socket while few more files can be opened.

libzmq accepts connections faster than they can be counted here. A flood of them would take the last file, and libzmq
aborts the process when a client of the unix socket connects after that.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

import zmq

from kvstore.model.throttle import Throttle
from kvstore.server.files import limit_of_files, room_for_clients

logger = logging.getLogger(__name__)

_OPEN_BELOW: Final = 0.8  # of the number of files at which it is shut


class Door:
    """Binds and unbinds a socket. Belongs to the thread that decides.

    Args:
        router: a socket that is bound to one address.
        probe_fd: any open file, which is duplicated to find the lowest free number.
    """

    def __init__(self, router: zmq.Socket[bytes], probe_fd: int) -> None:
        self._router = router
        self._probe_fd = probe_fd
        endpoint = router.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._endpoint = endpoint.rstrip(b"\0").decode()
        self._limit = limit_of_files()
        self._room = room_for_clients(self._limit)
        self._throttle = Throttle(logger)
        self.is_open = True

    @property
    def port(self) -> int:
        """Port of the address."""
        return int(self._endpoint.rsplit(":", 1)[1])

    def look(self) -> None:
        """Shut the socket or open it again, by the number of open files. Takes microseconds."""
        used = self._used()
        try:
            if self.is_open and used >= self._room:
                self._router.unbind(self._endpoint)
                self.is_open = False
                said = (
                    "few of %d files that may be open are left: no more clients from the network until some have gone"
                )
                self._throttle.log("shut", said, self._limit)
            elif not self.is_open and used < _OPEN_BELOW * self._room:
                self._router.bind(self._endpoint)
                self.is_open = True
        except zmq.ZMQError as error:  # it is not shut yet, and the next call tries again
            self._throttle.log("door", "%s: %s", self._endpoint, error.strerror)

    def _used(self) -> int:
        """Count the open files, as reported by Linux 6.2 and later, or at least those below the lowest free number."""
        try:
            free_fd = os.dup(self._probe_fd)
        except OSError:
            return self._limit
        os.close(free_fd)
        return max(free_fd, Path("/proc/self/fd").stat().st_size)
