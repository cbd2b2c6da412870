"""Connections of clients: HTTP by uvicorn, with bounds on their number, on their heads and on what they ask ahead."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES: Final = 64 << 10
_HEAD_TIMEOUT_S: Final = 30.0
_MAX_WAITING: Final = 8


def entrance(max_connections: int, patience_s: float) -> type[HttpToolsProtocol]:
    """The protocol for at most so many connections; one more is closed at once.

    A client may leave the end of an answer unread for ``patience_s``: until then all of it is in memory.
    """

    class Entrance(HttpToolsProtocol):
        """One connection of a client. One whose next head is too large, or does not come in time, is closed.

        So is one that asks for too much before it has its answers.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's
            super().__init__(*args, **kwargs)
            self._head_bytes = 0
            self._in_head = True
            self._head_timer: asyncio.TimerHandle | None = None
            self._reader_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_timer()
            if self._reader_timer is not None:
                self._reader_timer.cancel()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.abort()
            elif self.cycle is not None and self.cycle.response_complete:  # type: ignore[redundant-expr] # at first None
                self._start_timer()  # uvicorn's own ends with any byte, even one that begins no head

        def on_message_begin(self) -> None:
            super().on_message_begin()
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
            if len(self.pipeline) >= _MAX_WAITING:  # uvicorn would queue all that one sends before it reads
                self.transport.abort()
                return
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._reader_timer is None:
                self._look_at_reader(math.inf)

        def _look_at_reader(self, before_bytes: float) -> None:
            """Cut a client off that has read nothing of an answer's end: uvicorn would keep that for ever.

            While the next answer is sent, who sends it has an eye on the client.
            """
            left_bytes = self.transport.get_write_buffer_size()
            is_at_rest = self.cycle.response_complete
            self._reader_timer = None
            if is_at_rest and left_bytes >= max(1, before_bytes):
                self.transport.abort()
            elif left_bytes:
                left = left_bytes if is_at_rest else math.inf
                self._reader_timer = self.loop.call_later(patience_s, self._look_at_reader, left)

        def _start_timer(self) -> None:
            """Once for each head, however slowly it comes."""
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Entrance
