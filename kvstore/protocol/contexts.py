"""ZeroMQ contexts that wait for nobody when their owner is forgotten.

pyzmq ends a context that the garbage collector takes, and ending it waits for its sockets. Those of the same cycle may
still be open at that moment, and the thread that collects waits for ever. So a context is kept until it is closed: who
forgets to close one leaks it, and no more than that.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import zmq

from kvstore.errors import TierError

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]

_open: Final[set[Context]] = set()


def open_context(io_threads: int = 1) -> Context:
    """One that ``close_context`` ends, and nothing else.

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
    """Close its sockets, whatever they have not sent, and end it. Idempotent."""
    context.destroy(linger=0)
    _open.discard(context)
