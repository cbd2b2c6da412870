"""HTTP connections of clients, by uvicorn, with bounds on their number, head sizes and pipelined requests.

Uvicorn alone waits without limit for a head, and counts an idle connection like one with a request.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvstore.model.throttle import Throttle

logger = logging.getLogger(__name__)

HANG_UP: Final = "hang_up"
"""Key in a request's ``state`` of a function that registers a callback for the client's disconnect.

The function returns another one, which unregisters the callback. ASGI reports disconnects only to a pending
``receive()``, and a task for each request would take a tenth of the request's time.
"""
_MAX_HEAD_BYTES: Final = 64 << 10
_HEAD_TIMEOUT_S: Final = 30.0
_MAX_WAITING: Final = 8
_throttle = Throttle(logger)


def _is_due(record: logging.LogRecord) -> bool:
    return _throttle.is_due(f"{record.msg} {record.exc_info and record.exc_info[0]}")


logger.addFilter(_is_due)  # uvicorn has a line for each malformed request, of which strangers send any number


def entrance(max_connections: int, patience_s: float) -> type[HttpToolsProtocol]:
    """Return the uvicorn protocol for at most so many connections.

    One more replaces the connection that has been without a whole request for longest, be it silent, slow with its
    request or kept after an answer. If all are being answered, the new one is closed.

    Args:
        max_connections: bound for all clients together.
        patience_s: longest time for which a client may leave its answer unread.
    """
    waiting: dict[Entrance, None] = {}  # for requests, or for the rest of one; the longest-waiting first

    class Entrance(HttpToolsProtocol):
        """One connection of a client. It is closed if its next head is too large, or does not arrive in time.

        It is also closed if it pipelines too many requests.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's
            super().__init__(*args, **kwargs)
            self.logger = logger
            self._head_bytes = 0
            self._in_head = True
            self._head_timer: asyncio.TimerHandle | None = None
            self._unread_timer: asyncio.TimerHandle | None = None
            self._at_hang_up: set[Callable[[], None]] = set()
            self._cycles: list[RequestResponseCycle] = []  # not answered; uvicorn itself knows only the last one

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                if not waiting:
                    transport.abort()
                    return
                oldest = next(iter(waiting))
                del waiting[oldest]
                oldest.transport.abort()
            self._note()
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            waiting.pop(self, None)
            for cycle in self._cycles:
                cycle.disconnected = True
            self._stop_timer()
            self._stop_waiting()
            for call in tuple(self._at_hang_up):
                call()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.abort()
            elif self.cycle is not None and self.cycle.response_complete:  # type: ignore[redundant-expr] # None first
                self._start_timer()  # uvicorn's timer ends with any byte, even one that begins no head

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["state"][HANG_UP] = self._call_at_hang_up
            self._in_head = True
            self._start_timer()

        def on_chunk_header(self) -> None:
            self._in_head = True  # behind the last chunk comes more of the head
            self._head_bytes = 0

        def on_body(self, body: bytes) -> None:
            self._in_head = False
            super().on_body(body)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_bytes = 0
            self._stop_timer()
            if len(self.pipeline) >= _MAX_WAITING:  # uvicorn would queue all requests of a client that reads nothing
                self.transport.abort()
                return
            super().on_headers_complete()
            self._cycles = [cycle for cycle in (*self._cycles, self.cycle) if not cycle.response_complete]
            if self._at_hang_up:
                self.flow.resume_reading()  # uvicorn stops behind what is asked ahead, too

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._note()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait_for_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._note()
            if self._unread_timer is None:  # a few unread bytes pause nothing, but closing waits for them
                self._wait_for_reader()

        def _note(self) -> None:
            """Note if it waits for a request, or if a whole request is being answered."""
            if any(not cycle.more_body and not cycle.response_complete for cycle in self._cycles):
                waiting.pop(self, None)
            else:
                waiting.setdefault(self)

        def _wait_for_reader(self, before_bytes: float = math.inf) -> None:
            """Close the connection unless the client reads, while nothing is added to its unread bytes."""
            self._stop_waiting()
            unread_bytes = self.transport.get_write_buffer_size()
            if not unread_bytes:
                return
            if unread_bytes < before_bytes:
                self._unread_timer = self.loop.call_later(patience_s, self._wait_for_reader, unread_bytes)
            else:
                self.transport.abort()

        def _call_at_hang_up(self, call: Callable[[], None]) -> Callable[[], None]:
            self.flow.resume_reading()  # uvicorn stops behind a large body, and would not see the connection end
            self._at_hang_up.add(call)
            return lambda: self._at_hang_up.discard(call)

        def _stop_waiting(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

        def _start_timer(self) -> None:
            """Start the timer once for each head, however slowly it arrives."""
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Entrance
