"""Limit of the Redis lines: a plain socket client.

It moves as many values of the same size over the same kind of connection, without transactions, checksums or key
computation. It uses none of the library's code.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence

from kvstore.chunks import ByteArray
from kvstore.tools.bench.raw_peer import in_pieces
from kvstore.tools.bench.samples import BenchError

_TIMEOUT_S = 60.0
_WINDOW = 3  # values requested ahead, as the tier does


class RawRedis:
    """One connection that moves values with numbered keys, from and to prepared memory.

    Values are the payloads in pieces of ``part_bytes``, the last one shorter, as in the tier.
    """

    def __init__(self, port: int, payloads: ByteArray, part_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._socket.makefile("rb")
        self._views = [part for payload in payloads for part in in_pieces(payload, part_bytes)]
        self._part_bytes, self._parts_per_payload = part_bytes, len(self._views) // len(payloads)

    def close(self) -> None:
        """Close the connection."""
        self._replies.close()
        self._socket.close()

    def store(self) -> None:
        """SET all values in one pipeline."""
        end = b""
        for number, view in enumerate(self._views):
            name = b"raw:%d" % number
            self._socket.sendall(end + b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view)))
            self._socket.sendall(view)
            end = b"\r\n"
        self._socket.sendall(end)
        for _ in self._views:
            self._expect(b"+OK\r\n")

    def retrieve(self) -> None:
        """GET all values, with a few requests ahead."""
        ask = [b"*2\r\n$3\r\nGET\r\n$%d\r\nraw:%d\r\n" % (4 + len(str(n)), n) for n in range(len(self._views))]
        self._receive(ask, self._views)

    def retrieve_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """GETRANGE some bytes of every payload, with a few requests ahead."""
        ask, views = [], []
        for first in range(0, len(self._views), self._parts_per_payload):
            for number, begin, end in self._in_parts(ranges):
                name, bounds = b"raw:%d" % (first + number), (b"%d" % begin, b"%d" % (end - 1))
                words = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in (b"GETRANGE", name, *bounds))
                ask.append(b"*4\r\n" + words)
                views.append(self._views[first + number][begin:end])
        self._receive(ask, views)

    def _in_parts(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Split ranges of a payload by value, and yield the value's number with begin and end within it."""
        for begin, end in ranges:
            for number in range(begin // self._part_bytes, -(-end // self._part_bytes)):
                first = number * self._part_bytes
                yield number, max(begin - first, 0), min(end - first, self._part_bytes)

    def _receive(self, ask: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Send commands, a few ahead, and read their answers into ``views``."""
        self._socket.sendall(b"".join(ask[:_WINDOW]))
        for number, view in enumerate(views):
            self._expect(b"$%d\r\n" % len(view))
            done = self._replies.readinto(view)  # large reads are written directly to the view
            while done < len(view):
                done += self._replies.readinto(view[done:])
            self._expect(b"\r\n")
            if number + _WINDOW < len(ask):
                self._socket.sendall(ask[number + _WINDOW])

    def remove(self) -> None:
        """Delete all values."""
        names = b"".join(b"$%d\r\nraw:%d\r\n" % (4 + len(str(n)), n) for n in range(len(self._views)))
        self._socket.sendall(b"*%d\r\n$6\r\nUNLINK\r\n" % (1 + len(self._views)) + names)
        self._expect(b":%d\r\n" % len(self._views))

    def ping(self) -> None:
        """Make one round trip."""
        self._socket.sendall(b"*1\r\n$4\r\nPING\r\n")
        self._expect(b"+PONG\r\n")

    def _expect(self, line: bytes) -> None:
        found = self._replies.readline()
        if found != line:
            raise BenchError(f"the Redis server answered {found[:60]!r} instead of {line!r}")
