"""Peers for the proxy's lines: an engine that answers at once, and a bare forwarder as the limit.

``python -m kvstore.tools.bench.bare_http engine``, or ``forwarder PORT``; each prints the port that it listens on.
Both parse only as much HTTP as is needed to find the end of a message.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

_END_OF_HEAD: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_CONTENT: Final = (
    b'{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":" x"}],'
    b'"kv_transfer_params":{"disagg_spec":{"req_id":"r","num_transferred_tokens":32}}}'
)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ANSWER: Final = _HEAD % len(_CONTENT) + _CONTENT


class Messages(asyncio.Protocol):
    """A connection that gives each whole HTTP message to ``take``."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.take = take
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for ``write``."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass each complete message to ``take``, and keep the rest."""
        self._rest += data
        while (size := _message_bytes(self._rest)) and size <= len(self._rest):
            message, self._rest = self._rest[:size], self._rest[size:]
            self.take(message)

    def write(self, message: bytes) -> None:
        """Send a message."""
        assert self._transport is not None
        self._transport.write(message)

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()


class Asker:
    """A client that sends one request at a time and waits for its answer."""

    def __init__(self) -> None:
        self.connection = Messages(self._answered)
        self._waiter: asyncio.Future[bytes] | None = None

    async def connect(self, port: int) -> None:
        """Connect to a port of this machine."""
        await asyncio.get_running_loop().create_connection(lambda: self.connection, "127.0.0.1", port)

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return the whole answer."""
        self._waiter = asyncio.get_running_loop().create_future()
        self.connection.write(request)
        return await self._waiter

    def _answered(self, message: bytes) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(message)


def _message_bytes(data: bytes) -> int:
    """Return the bytes of the first message; 0 if its head is incomplete."""
    end = data.find(_END_OF_HEAD)
    if end < 0:
        return 0
    head = data[:end].lower()
    at = head.find(_LENGTH)
    length = int(head[at + len(_LENGTH) :].partition(b"\r\n")[0]) if at >= 0 else 0
    return end + len(_END_OF_HEAD) + length


def _engine() -> asyncio.Protocol:
    connection = Messages(lambda _: connection.write(ANSWER))
    return connection


class _Forwarder(Messages):
    """A connection that asks the engine twice, as a proxy does, and forwards the second answer unread."""

    def __init__(self, port: int) -> None:
        super().__init__(self._forward)
        self._asker: Asker | None = None
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    def _forward(self, request: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._ask_twice(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_twice(self, request: bytes) -> None:
        if self._asker is None:
            self._asker = Asker()
            await self._asker.connect(self._port)
        await self._asker.ask(request)
        self.write(await self._asker.ask(request))


async def _serve(make: Callable[[], asyncio.Protocol]) -> None:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop, the proxy's event loop."""
    import uvloop  # noqa: PLC0415 - an extra

    uvloop.run(main)


if __name__ == "__main__":
    run(_serve(_engine if sys.argv[1] == "engine" else lambda: _Forwarder(int(sys.argv[2]))))
