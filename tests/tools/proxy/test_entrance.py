"""Limits of client connections: heads, slow readers, and their number."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from http.client import HTTPResponse
from typing import Any, cast
from unittest.mock import Mock, call

import httpx
import pytest
import uvicorn
from support.fake_engine import FakeEngine
from support.proxied import PATH, counted
from support.redis_server import wait_for
from uvicorn.server import ServerState

from kvstore.ops import http_limits

Serve = Callable[..., httpx.Client]

HEAD = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()


def connected(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Read until the proxy closes the connection; True if it does so without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "begin",
    [HEAD + b"X: ", HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: "],
    ids=["a head", "what follows the body"],
)
def test_a_head_without_end_is_not_kept(serve: Serve, begin: bytes) -> None:
    client = serve()
    with connected(client) as connection:
        connection.sendall(begin)
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * (64 << 20))
    assert client.get("/health").status_code == 200


def test_heads_within_the_bound(serve: Serve) -> None:
    client = serve()
    for _ in range(3):
        assert client.get("/v1/models", headers={"X": "x" * 50_000}).status_code == 200
    body = b'{"prompt": "' + b"x" * 300_000 + b'"}'
    pieces = [body[at : at + 100] for at in range(0, len(body), 100)]
    assert client.post(PATH, content=iter(pieces)).status_code == 200, "small chunks are no head"


def test_malformed_requests_do_not_fill_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve()
    for _ in range(20):
        with connected(client) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 400"
    assert sum("Invalid HTTP request" in record.getMessage() for record in caplog.records) <= 1


def test_a_head_that_does_not_come(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "_HEAD_TIMEOUT_S", 0.1)
    client = serve()
    with connected(client) as silent, connected(client) as slow:
        slow.sendall(HEAD)
        assert is_closed(silent)
        assert is_closed(slow)


def send_slowly(connection: socket.socket, data: bytes) -> None:
    for _ in range(500):
        connection.sendall(data)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("more", "goes_on"),
    [(b"", b"\r\n"), (b"Content-Length: 1000000\r\n", b"x")],
    ids=["empty lines", "a body that nobody reads"],
)
def test_what_begins_no_head(serve: Serve, monkeypatch: pytest.MonkeyPatch, more: bytes, goes_on: bytes) -> None:
    client = serve()
    with connected(client) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + more + b"\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.read()
        monkeypatch.setattr(http_limits, "_HEAD_TIMEOUT_S", 0.1)
        with pytest.raises(ConnectionError):
            send_slowly(connection, goes_on)


def test_requests_that_do_not_wait_for_answers(serve: Serve) -> None:
    client = serve()
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with connected(client) as connection, connection.makefile("rb") as answers:
        connection.sendall(request * 9)
        heads = (line for line in answers if line.endswith(b"HTTP/1.1 200 OK\r\n"))
        assert len([next(heads) for _ in range(9)]) == 9, "one is answered, and eight wait"
    with connected(client) as connection:
        connection.sendall(request * 1000)
        assert is_closed(connection)


def test_one_connection_too_many_takes_the_place_of_the_idlest(serve: Serve) -> None:
    client = serve(max_connections=4)
    assert client.get("/health").status_code == 200
    with ExitStack() as stack:
        held = [stack.enter_context(connected(client)) for _ in range(5)]
        assert is_closed(held[0])
        assert counted(client, "in_flight") == 0, "the client's own was closed, too, and another one comes in"
        assert is_closed(held[1])
        held[4].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert begun(held[4])


def test_where_all_are_answered_nobody_else_comes_in(serve: Serve, decode: FakeEngine) -> None:
    decode.script.holds_after = 0
    client = serve(max_connections=2)
    with connected(client) as first, connected(client) as second:
        for connection in (first, second):
            connection.sendall(HEAD + LARGE_ASKED)
        wait_for("both are being answered", lambda: decode.held == 2)
        with connected(client) as one_more:
            assert is_closed(one_more)
        decode.gate.set()
        assert begun(first)
        assert begun(second)


def is_served(client: httpx.Client) -> bool:
    """Tell if there is room for the client's connection."""
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


LARGE = 16 << 20  # more than the kernel buffers
LARGE_ASKED = b"Content-Length: 15\r\n\r\n" + b'{"prompt": "x"}'


def begun(connection: socket.socket) -> bool:
    """Tell if an answer has begun, without taking it."""
    return connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "to be closed"])
def test_an_answer_that_nobody_reads_is_not_kept(serve: Serve, decode: FakeEngine, more: bytes) -> None:
    """The answer was written at once, so the proxy has nothing left to do with it."""
    decode.script.answer = {"text": "x" * LARGE}
    client = serve(timeout_s=3.0, max_connections=1)
    with connected(client) as connection:
        connection.sendall(HEAD + more + LARGE_ASKED)
        assert begun(connection)
        wait_for("its place is free", lambda: is_served(client))


def test_who_reads_slowly_gets_the_whole_answer(serve: Serve, decode: FakeEngine) -> None:
    decode.script.answer = {"text": "x" * LARGE}
    client = serve(timeout_s=3.0)
    with connected(client) as connection:
        connection.sendall(HEAD + LARGE_ASKED)
        assert begun(connection)
        size, pauses = 0, iter([0.9] * 6)
        while size < LARGE:
            piece = connection.recv(2 << 20, socket.MSG_WAITALL)
            assert piece
            size += len(piece)
            time.sleep(next(pauses, 0))


class Connection(asyncio.Transport):
    """A connection whose client reads on command, on a loop whose timers end on command."""

    def __init__(self) -> None:
        super().__init__()
        self.unread_bytes = 0
        self.num_aborts = self.num_pauses = 0
        self.timers: list[asyncio.TimerHandle] = []
        loop = Mock(call_later=self._call_later, create_task=self._create_task)
        config = uvicorn.Config(Mock(), lifespan="off", log_config=None)
        self.protocol = http_limits.entrance(1, 5.0)(config, ServerState(), {}, loop)
        self.protocol.connection_made(self)

    def _call_later(self, _delay_s: float, at_end: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        self.timers.append(Mock(when=partial(at_end, *args)))
        return self.timers[-1]

    @staticmethod
    def _create_task(coroutine: Coroutine[Any, Any, None]) -> Mock:
        coroutine.close()
        return Mock()

    def pause_reading(self) -> None:
        self.num_pauses += 1

    def resume_reading(self) -> None:
        self.num_pauses -= 1

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.num_aborts += 1

    def write_more(self, num_bytes: int) -> None:
        self.unread_bytes += num_bytes
        self.protocol.pause_writing()

    def wait(self) -> None:
        """Let the last timer end."""
        self.timers[-1].when()


def test_who_hangs_up_behind_a_large_body_is_noticed() -> None:
    """Uvicorn stops reading there, and without reads the end of a connection is not noticed."""
    connection, calls = Connection(), Mock()
    connection.protocol.data_received(HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000)
    assert connection.num_pauses == 1
    watch = connection.protocol.scope["state"][http_limits.HANG_UP]
    watch(calls.ended)()
    watch(calls.under_way)
    assert connection.num_pauses == 0
    connection.protocol.connection_lost(OSError())
    assert calls.mock_calls == [call.under_way()]


def test_who_reads_slowly_stays_and_who_stops_is_cut_off() -> None:
    connection = Connection()
    connection.write_more(1_000_000)
    for _ in range(5):
        connection.unread_bytes -= 1
        connection.wait()
    assert connection.num_aborts == 0
    connection.wait()
    assert connection.num_aborts == 1


def test_who_has_read_all_has_time_again() -> None:
    connection = Connection()
    connection.write_more(1_000)
    timer = connection.timers[-1]
    connection.protocol.resume_writing()
    assert cast("Mock", timer.cancel).called
    connection.unread_bytes = 0
    connection.write_more(1_000)
    assert connection.timers[-1] is not timer
    connection.protocol.connection_lost(OSError())
    assert cast("Mock", connection.timers[-1].cancel).called


def test_a_little_that_is_left_of_an_answer_is_waited_for_no_longer() -> None:
    """It is too small to pause the writer, and a close would wait for the reader."""
    connection = Connection()
    connection.protocol.data_received(HEAD + b"Content-Length: 0\r\n\r\n")
    connection.unread_bytes = 10
    connection.protocol.on_response_complete()
    connection.wait()
    assert connection.num_aborts == 1
