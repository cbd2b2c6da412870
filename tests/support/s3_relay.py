"""A relay of HTTP requests to an S3 server that can be slow, hang, refuse, lie, or cut connections."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_PIECE_BYTES = 64 << 10
_SLOW_S = 0.02  # for each piece
_HUNG_S = 30.0


class Mood(Enum):
    """Behaviours of the relay."""

    FAST = "fast"
    SLOW = "slow"
    HUNG = "hung"
    BROKEN = "500"
    BUSY = "503"
    EXPIRED = "credentials that have expired"
    SKEWED = "a clock that is wrong"
    FULL = "a full bucket"
    RESET = "reset in the middle of a body"
    CUT = "truncated bodies"
    FLIPPED = "flipped bytes"
    STALE = "listings that do not change"
    GONE = "no such bucket"
    LOST = "404 to writes"


_REFUSALS = {
    Mood.BROKEN: (500, "InternalError"),
    Mood.BUSY: (503, "SlowDown"),
    Mood.EXPIRED: (400, "ExpiredToken"),
    Mood.SKEWED: (403, "RequestTimeTooSkewed"),
    Mood.GONE: (404, "NoSuchBucket"),
}
_TO_WRITES = {Mood.FULL: (403, "QuotaExceeded"), Mood.LOST: (404, "NoSuchKey")}


class S3Relay:
    """Relay to a port of this machine. A context manager. Requests are answered one by one on each connection.

    Attributes:
        mood: may be changed at any time.
        requests: methods and paths of those that were passed on or refused, without their queries.
    """

    def __init__(self, port: int) -> None:
        self.mood = Mood.FAST
        self.requests: list[tuple[str, str]] = []
        self.listed: dict[str, bytes] = {}
        self.target = port
        self.is_closed = threading.Event()
        relay = self

        class Handler(_Handler):
            owner = relay

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="test-s3-relay", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: S3Relay

    def log_message(self, *_: Any) -> None:
        pass

    def do_any(self) -> None:
        relay = self.owner
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        relay.requests.append((self.command, self.path.partition("?")[0]))
        mood = relay.mood
        if mood is Mood.HUNG:
            end_s = time.monotonic() + _HUNG_S
            while relay.mood is Mood.HUNG and time.monotonic() < end_s and not relay.is_closed.is_set():
                time.sleep(0.02)
            self.close_connection = True
            return
        if mood in _REFUSALS or (mood in _TO_WRITES and self.command == "PUT"):
            status, code = _REFUSALS.get(mood) or _TO_WRITES[mood]
            self._answer(status, {"Retry-After": "1"} if mood is Mood.BUSY else {}, f"<Code>{code}</Code>".encode())
            return
        status, headers, content = self._pass_on(body)
        is_list = self.command == "GET" and "list-type=" in self.path
        if mood is Mood.STALE and is_list:
            content = relay.listed.setdefault(self._list_key(), content)
        elif is_list and mood is Mood.FAST:
            relay.listed[self._list_key()] = content
        if mood is Mood.FLIPPED and self.command == "GET" and ".safetensors" in self.path:
            flipped = bytearray(content)
            flipped[len(flipped) // 2] ^= 1
            content = bytes(flipped)
        self._answer(status, headers, content, mood)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any  # noqa: N815 - what the base class calls

    def _list_key(self) -> str:
        return self.path.partition("prefix=")[2].partition("&")[0]

    def _pass_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.target, timeout=_HUNG_S)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            names = ("ETag", "Content-Range", "Content-Type", "Last-Modified", "Content-Length")
            headers = {name: answer.headers[name] for name in names if name in answer.headers}
            return answer.status, headers, answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes, mood: Mood = Mood.FAST) -> None:
        self.send_response(status)
        if self.command != "HEAD":
            headers = {**headers, "Content-Length": str(len(content))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        is_cut = mood in (Mood.RESET, Mood.CUT) and self.command == "GET" and len(content) > 1
        content = content[: len(content) // 2] if is_cut else content
        for begin in range(0, len(content), _PIECE_BYTES):
            if mood is Mood.SLOW:
                time.sleep(_SLOW_S)
            self.wfile.write(content[begin : begin + _PIECE_BYTES])
        if is_cut:
            self.wfile.flush()
            if mood is Mood.RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR) if mood is Mood.CUT else self.connection.close()
