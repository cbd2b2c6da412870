"""Waking of a thread that accepts connections at a unix socket of this process."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

_WITHIN_S: Final = 0.5


def knock(listener: socket.socket) -> None:
    """Connect to a unix socket that listens, and leave at once; do nothing if it is closed, or no file can be opened.

    A shutdown of the socket would wake the thread as well, but some kernels then let ``accept`` spin until its
    deadline.
    """
    with suppress(OSError), socket.socket(socket.AF_UNIX, listener.type) as visitor:
        visitor.settimeout(_WITHIN_S)
        visitor.connect(listener.getsockname())
