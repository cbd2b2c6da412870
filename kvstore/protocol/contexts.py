"""ZeroMQ contexts that never block at garbage collection.

pyzmq terminates a context that is garbage-collected, and waits for its sockets. Sockets of the same reference cycle may
still be open at that moment, and the collecting thread would never return. So a context is kept until it is closed, and
an owner that forgets to close it only leaks it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import zmq

from kvstore.model.errors import TierError

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]

_open: Final[set[Context]] = set()


def open_context(io_threads: int = 1) -> Context:
    """Return a new context, which only ``close_context`` ends.

    Raises:
        TierError: the process may open no more files.
    """
    try:
        context: Context = zmq.Context(io_threads=io_threads)
    except zmq.ZMQError as error:
        raise TierError(
            f"ZeroMQ does not start: {error.strerror}; is the limit of open files (ulimit -n) high enough?"
        ) from error
    _open.add(context)
    return context


def close_context(context: Context) -> None:
    """Close the sockets of a context, drop their unsent messages, and end it. Idempotent."""
    context.destroy(linger=0)
    _open.discard(context)
