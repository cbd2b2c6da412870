"""Reports of ZeroMQ on the connections of a socket."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Final

import zmq

from kvstore.protocol.contexts import Context

_numbers: Final = itertools.count()


class Monitor:
    """Reports of chosen events of a socket. Belongs to the thread of that socket.

    ZeroMQ's own thread makes the reports. It waits for ever if they have a full queue or no reader, and then no
    connection of the context works any more. So the queue has no bound, and the reports end before their reader does.

    Args:
        context: context of the socket.
        observed: the socket, which must be closed after this monitor.
        events: the events to report.

    Attributes:
        reader: a socket that is readable when there are reports; for ``zmq.utils.monitor.parse_monitor_message``.

    Raises:
        zmq.ZMQError: the process may open no more files.
    """

    def __init__(self, context: Context, observed: zmq.Socket[bytes], events: int) -> None:
        self._observed = observed
        address = f"inproc://monitor-{next(_numbers)}"  # pyzmq's own may be that of a socket just closed
        with ExitStack() as failed:
            self.reader = context.socket(zmq.PAIR)
            failed.callback(self.reader.close, 0)
            self.reader.rcvhwm = 0
            self.reader.connect(address)  # before the first report, which waits for it
            observed.monitor(address, events)
            failed.pop_all()

    def close(self) -> None:
        """End the reports. Idempotent."""
        if not self.reader.closed:
            self._observed.monitor(None, 0)
            self.reader.close(0)
