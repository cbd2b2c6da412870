"""Limits of the lines over a network, without library code: plain pyzmq, and a plain socket client of Redis.

    python -m kvstore.tools.bench.raw_peers IPC_ADDRESS NUM_CHUNKS CHUNK_BYTES PIECE_BYTES

is the other process of the former, and prints the TCP address that it listens on. It answers ``get`` with the next
chunk, in pieces. It echoes any other message of one frame, and answers a message of several frames, which is a chunk,
with one empty frame.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.model.chunks import ByteArray
from kvstore.tools.bench.samples import BenchError
from kvstore.tools.bench.servers import child

if TYPE_CHECKING:
    import zmq

_TIMEOUT_S = 60.0
_WINDOW = 3  # values requested ahead, as the Redis tier does


class RawPeer:
    """One connection over TCP for chunks, and one over ipc for pings.

    Args:
        folder: folder of the ipc socket; its path must be short.
        chunks: uint8 ``[num_chunks, chunk_bytes]``. Both sides send as many different bytes as the path does, because a
            repeated chunk would be read from the processor's cache.
        piece_bytes: maximum bytes of a frame.
    """

    def __init__(self, folder: Path, chunks: ByteArray, piece_bytes: int) -> None:
        import zmq  # noqa: PLC0415 - an extra

        self._chunks = [in_pieces(chunk, piece_bytes) for chunk in chunks]
        ipc_address = f"ipc://{folder}/peer"
        sizes = [str(size) for size in (*chunks.shape, piece_bytes)]
        self._opened = ExitStack()
        tcp_address = self._opened.enter_context(child("kvstore.tools.bench.raw_peers", ipc_address, *sizes)).said()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tcp, self._ipc = (self._connect(address, zmq.DEALER) for address in (tcp_address, ipc_address))

    def close(self) -> None:
        """End the other process."""
        self._opened.close()
        self._context.destroy(linger=0)

    def store(self) -> None:
        """Send all chunks."""
        for pieces in self._chunks:
            self._tcp.send_multipart(pieces, copy=False)
        for _ in self._chunks:
            self._tcp.recv()

    def retrieve(self) -> None:
        """Receive as many chunks as ``store`` sends."""
        for _ in self._chunks:
            self._tcp.send(b"get")
        for _ in self._chunks:
            self._tcp.recv_multipart(copy=False)

    def ping(self) -> None:
        """Make one round trip over ipc."""
        self._ipc.send(b"ping")
        self._ipc.recv()

    def _connect(self, address: str, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.rcvtimeo = made.sndtimeo = int(_TIMEOUT_S * 1000)
        made.connect(address)
        return made


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
            self._socket.sendall(end + _command(b"SET", _name(number), value_bytes=len(view)))
            self._socket.sendall(view)
            end = b"\r\n"
        self._socket.sendall(end)
        for _ in self._views:
            self._expect(b"+OK\r\n")

    def retrieve(self) -> None:
        """GET all values, with a few requests ahead."""
        self._receive([_command(b"GET", _name(number)) for number in range(len(self._views))], self._views)

    def retrieve_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """GETRANGE some bytes of every payload, with a few requests ahead."""
        ask, views = [], []
        for first in range(0, len(self._views), self._parts_per_payload):
            for number, begin, end in self._in_parts(ranges):
                ask.append(_command(b"GETRANGE", _name(first + number), b"%d" % begin, b"%d" % (end - 1)))
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
        self._socket.sendall(_command(b"UNLINK", *map(_name, range(len(self._views)))))
        self._expect(b":%d\r\n" % len(self._views))

    def ping(self) -> None:
        """Make one round trip."""
        self._socket.sendall(_command(b"PING"))
        self._expect(b"+PONG\r\n")

    def _expect(self, line: bytes) -> None:
        found = self._replies.readline()
        if found != line:  # in the timed part: no message is made in vain
            raise BenchError(f"the Redis server answered {found[:60]!r} instead of {line!r}")


def _name(number: int) -> bytes:
    return b"raw:%d" % number


def _command(*words: bytes, value_bytes: int | None = None) -> bytes:
    """Return a command of Redis; with ``value_bytes`` its last word is a value of this size, which the caller sends."""
    begin = b"*%d\r\n" % (len(words) + (value_bytes is not None))
    end = b"" if value_bytes is None else b"$%d\r\n" % value_bytes
    return b"".join((begin, *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words), end))


def in_pieces(chunk: ByteArray, piece_bytes: int) -> list[memoryview]:
    """Return views of a chunk, all but the last one of ``piece_bytes``."""
    return [chunk[begin : begin + piece_bytes].data for begin in range(0, len(chunk), piece_bytes)]


def main() -> None:
    """Answer until killed."""
    import zmq  # noqa: PLC0415 - an extra

    ipc_address, (num_chunks, chunk_bytes, piece_bytes) = sys.argv[1], map(int, sys.argv[2:])
    chunks = cycle([in_pieces(chunk, piece_bytes) for chunk in np.ones((num_chunks, chunk_bytes), np.uint8)])
    router = zmq.Context(io_threads=2).socket(zmq.ROUTER)
    router.bind(ipc_address)
    router.bind("tcp://127.0.0.1:*")
    print(router.get_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        name, *frames = router.recv_multipart(copy=False)
        if len(frames) > 1:
            router.send_multipart([name, b""])
        elif frames[0].bytes == b"get":
            router.send_multipart([name, *next(chunks)], copy=False)
        else:
            router.send_multipart([name, *frames])


if __name__ == "__main__":
    main()
