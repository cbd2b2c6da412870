"""Connections to engines: HTTP/1.1 over asyncio, parsed by httptools.

A proxy makes two requests for each client request. General HTTP clients take several times the processor time of the
rest of a proxy (``kvstore bench`` measures it), so this client supports only what engines need: a request with a body
of known length, an answer of any length, and connections that are reused.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from kvstore.model.errors import KVStoreError
from kvstore.tools.proxy.objects import Parts

_KEPT_S: Final = 2.0  # vLLM closes connections after 5 idle seconds, even if a request is about to arrive
_KEPT_CONNECTIONS: Final = 256
_PIECE_BYTES: Final = 256 << 10
_BUFFER_BYTES: Final = 256 << 10
_MAX_HEAD_BYTES: Final = 64 << 10
_STATUSES: Final = range(100, 600)
_SHOWN_HEADERS: Final = frozenset({b"content-type", b"retry-after", b"www-authenticate"})


class UpstreamError(KVStoreError):
    """An engine gave no valid answer."""


class NoConnectionError(UpstreamError):
    """The engine has received nothing of the request."""


class SilenceError(UpstreamError):
    """The engine sent nothing, or read nothing, for too long."""


class Times(NamedTuple):
    """Timeouts of a connection attempt, and of the next byte."""

    connect_s: float
    silent_s: float


class Pool:
    """Connections to one engine, for use on one event loop.

    Args:
        url: ``http://host:port``, or ``https``.
        times: timeouts.
        context: TLS context for https.
    """

    def __init__(self, url: str, times: Times, context: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if is_tls else 80)
        self._context = context if is_tls else None
        self._named = f"Host: {parts.netloc}"
        self._times = times
        self._idle: deque[_Connection] = deque()
        self._is_closed = False

    def close(self) -> None:
        """Close idle connections now, and the others after their requests."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().end()

    def sweep(self) -> None:
        """Close connections that have been idle for too long."""
        oldest_s = asyncio.get_running_loop().time() - _KEPT_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.popleft().end()

    def asked(self, method: str, path: str, headers: Mapping[str, str], content: Parts) -> Exchange:
        """Return a request as an async context manager that yields the answer.

        Args:
            method: HTTP method.
            path: path without characters that need escapes.
            headers: ASCII headers other than ``Host`` and ``Content-Length``.
            content: body, in parts.
        """
        return Exchange(self, self._head(method, path, headers, content), content)

    async def take(self) -> _Connection:
        """Return a connection for one request.

        Raises:
            NoConnectionError: the engine cannot be reached.
        """
        return self._kept() or await self._connected()

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for the next request, or close it if it cannot be reused."""
        if connection.is_reusable and not self._is_closed and len(self._idle) < _KEPT_CONNECTIONS:
            connection.rest()
            self._idle.append(connection)
        else:
            connection.end()

    def _head(self, method: str, path: str, headers: Mapping[str, str], content: Parts) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", self._named, *(f"{name}: {value}" for name, value in headers.items())]
        length = sum(map(len, content))
        if length:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "\r\n"]).encode("ascii")

    def _kept(self) -> _Connection | None:
        """Return the idle connection that was used last, if it is still fresh; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                return connection
            connection.end()
        return None

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._times.connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._times.silent_s), self._host, self._port, ssl=self._context
                )
        except (OSError, UnicodeError) as error:  # includes TimeoutError and untrusted certificates
            why = getattr(error, "verify_message", "") or getattr(error, "strerror", "")
            raise NoConnectionError(f"{type(error).__name__}{f': {why}' if why else ''}") from error
        return connection


class Exchange:
    """Request and its answer, of any status, with an unread body; leaving early also ends the request on the engine.

    It is a class because that takes half a generator's time; entering it raises ``UpstreamError``.
    """

    def __init__(self, pool: Pool, head: bytes, content: Parts) -> None:
        self._pool = pool
        self._head = head
        self._content = content
        self._connection: _Connection | None = None

    async def __aenter__(self) -> UpstreamAnswer:
        self._connection = connection = await self._pool.take()
        answer = None
        try:
            await connection.send(self._head, self._content)
            answer = await connection.answer()
        finally:
            if answer is None:
                connection.end()
        return answer

    async def __aexit__(self, *_error: object) -> None:
        if self._connection is not None:
            self._pool.give_back(self._connection)


class _Connection(asyncio.Protocol):
    """Connection that carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, silent_s: float) -> None:
        self.idle_since_s = 0.0
        self._loop = loop
        self._silent_s = silent_s
        self._waiter: asyncio.Future[None] | None = None
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._is_paused = self._is_full = self._is_lost = self._is_broken = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._headers: dict[str, str] = {}
        self._status = 0
        self._pieces: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._has_head = self._has_length = self._is_complete = self._is_kept = False

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if exc is None and self._has_head and not self._has_length and not self._is_broken:
            self._is_complete = True  # the end of the connection ends the answer
        self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    def data_received(self, data: bytes) -> None:
        is_more_than_answer = self._is_complete
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            is_more_than_answer = True
        if is_more_than_answer or self._head_bytes > _MAX_HEAD_BYTES:
            self._is_broken = True
            self.end()
        self._wake()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise UpstreamError("more than the answer")  # stops the parser, which raises an error

    def on_header(self, name: bytes, value: bytes) -> None:
        shown = name.lower()
        if shown in _SHOWN_HEADERS:
            self._headers[shown.decode()] = value.decode("latin-1")
        elif shown in {b"content-length", b"transfer-encoding"}:
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status not in _STATUSES:
            raise UpstreamError("no status of HTTP's")  # stops the parser, which raises an error
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0  # bytes after the body's last piece count again, because trailers are headers
        self._pieces.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > _BUFFER_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._status < 200:  # an interim response: the answer follows
            self._has_head = self._has_length = False
        else:
            self._is_complete = True
            self._is_kept = self._parser.should_keep_alive()

    # Methods for the pool and the answer.

    @property
    def is_fresh(self) -> bool:
        """True if the engine is expected to read a request that is sent now."""
        return not (self._is_lost or self._is_broken) and self._loop.time() - self.idle_since_s < _KEPT_S

    @property
    def is_reusable(self) -> bool:
        """True if the answer is complete, and the engine keeps the connection open."""
        return self._is_kept and not (self._is_lost or self._is_broken or self._is_full)

    def rest(self) -> None:
        """Mark the connection as idle, and resume reading."""
        self.idle_since_s = self._loop.time()
        self._go_on_reading()

    def end(self) -> None:
        """Close the connection at once, so that an engine that has not answered yet ends the request."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    async def send(self, head: bytes, content: Parts) -> None:
        """Send a request; a large body is sent in pieces, so that other requests proceed between them."""
        self._begin()
        if sum(map(len, content)) < _PIECE_BYTES:
            await self._write(b"".join((head, *content)))
            return
        piece = bytearray(head)
        for part in content:
            view = memoryview(part)
            for begin in range(0, len(view), _PIECE_BYTES):
                piece += view[begin : begin + _PIECE_BYTES]
                if len(piece) >= _PIECE_BYTES:
                    await self._write(bytes(piece))
                    piece.clear()
                    await asyncio.sleep(0)
        if piece:
            await self._write(bytes(piece))

    async def answer(self) -> UpstreamAnswer:
        """Return the answer as soon as its head has arrived."""
        while not self._has_head:
            await self._wait()
        return UpstreamAnswer(self._status, self._headers, self)

    async def next_piece(self) -> bytes:
        """Return the bytes of the body that have arrived; empty at its end."""
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._wait()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._buffered_bytes = 0
        self._go_on_reading()
        return piece

    def _go_on_reading(self) -> None:
        if self._is_paused and self._transport is not None and not self._is_lost:
            self._transport.resume_reading()
        self._is_paused = False

    async def _write(self, data: bytes) -> None:
        if self._transport is None or self._is_lost:
            raise UpstreamError("the connection was closed")
        self._transport.write(data)
        while self._is_full and not self._is_complete:
            await self._wait()

    async def _wait(self) -> None:
        """Wait until data arrives, or the connection's state changes.

        Raises:
            UpstreamError: the connection ended.
            SilenceError: nothing happened within the timeout.
        """
        if self._is_lost or self._is_broken:
            raise UpstreamError("what came is no answer" if self._is_broken else "the connection was closed")
        self._waiter = self._loop.create_future()
        self._deadline_s = self._loop.time() + self._silent_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._silent_s, self._look_at_clock)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look_at_clock(self) -> None:
        """Check the deadline, which moves with each wait, so that one timer serves a whole request."""
        left_s = self._deadline_s - self._loop.time()
        if self._waiter is None or left_s > 0:
            self._timer = self._loop.call_later(max(left_s, self._silent_s / 4), self._look_at_clock)
        elif not self._waiter.done():
            self._timer = None
            self._waiter.set_exception(SilenceError(f"nothing came for {self._silent_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class UpstreamAnswer:
    """Answer whose body has not been read.

    Attributes:
        status: HTTP status.
        headers: headers to forward to the client, by lower-case name.
    """

    def __init__(self, status: int, headers: Mapping[str, str], connection: _Connection) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            UpstreamError: the body ends too early.
        """
        while piece := await self._connection.next_piece():
            yield piece

    async def read(self, most_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            UpstreamError: the body ends too early, or is longer than ``most_bytes``.
        """
        content = await self._connection.next_piece()
        rest = bytearray()
        while piece := content and await self._connection.next_piece():
            rest += piece
            if len(content) + len(rest) > most_bytes:
                raise UpstreamError(f"the answer has more than {most_bytes} bytes")
        return content + rest if rest else content
