"""Connection to Redis that moves payloads between the socket and given memory, without a buffer in between.

redis-py connects, checks certificates, logs in and selects the database. Its ``parser_class`` hook puts a ``Reader``
between it and the socket, which reads large values directly into their destination, because 32 MiB of fresh memory for
every chunk would cost more than the transfer itself.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from redis._parsers import BaseParser  # the base of every parser_class
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

Reply = int | bytes | list["Reply"] | ResponseError | None
Buffer = bytes | memoryview

_READ_BYTES = 16 << 10
_NO_VALUE = -1
_MAX_LINE_BYTES = 64 << 10
_MAX_REPLY_BYTES = 64 << 20  # including its items: sixty times a part of a chunk, or a million keys
_ITEM_BYTES = 64  # of memory for each item of an array
_MAX_DEPTH = 8
_STEP_BYTES = 1 << 20  # by which memory for a value grows as its bytes arrive


class _ReaderFactory(Protocol):
    def __call__(self, socket_read_size: int) -> Reader: ...


class Reader(BaseParser):
    """Reader of a server's replies in RESP2. For one thread at a time; an exception makes the connection unusable."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._memory = bytearray(_READ_BYTES)
        self._view = memoryview(self._memory)
        self._begin = self._end = 0  # received but not yet read

    def on_connect(self, connection: AbstractConnection) -> None:
        """Read from another socket from now on; a hook of redis-py."""
        self._socket = connection._sock  # noqa: SLF001 - all parsers of redis-py find their socket there
        self._begin = self._end = 0

    def on_disconnect(self) -> None:
        """Drop the socket; a hook of redis-py."""
        self._socket = None

    @property
    def is_connected(self) -> bool:
        """True if there is a socket to read from."""
        return self._socket is not None

    def can_read(self, timeout: float = 0) -> bool:
        """Tell if there is data to read, or the end of the connection; a hook of redis-py."""
        if self._begin < self._end:
            return True
        watch = select.poll()  # unlike select, for any number of open files
        watch.register(self._sock, select.POLLIN)
        return bool(watch.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Reply:  # noqa: ARG002, FBT
        """Return the next reply, errors as values; a hook of redis-py, which expects simple strings as bytes."""
        return self.reply()

    def reply(self) -> Reply:
        """Return the next reply of any kind. Errors of the server are values.

        Raises:
            RedisConnectionError: the reply is no RESP2, or larger than any expected one.
        """
        reply, _ = self._reply(_MAX_REPLY_BYTES, _MAX_DEPTH)
        return reply

    def _reply(self, room_bytes: int, depth: int) -> tuple[Reply, int]:
        """Return a reply of at most ``room_bytes`` and ``depth`` nested arrays, and the room that it leaves."""
        kind, rest = self._head()
        if kind == b"+":
            return rest, room_bytes
        if kind == b":":
            return _number(rest), room_bytes
        if kind == b"-":
            return self._error(rest), room_bytes
        size_bytes = 1 if kind == b"$" else _ITEM_BYTES
        length = _length(rest, room_bytes // size_bytes)
        room_bytes -= max(0, length) * size_bytes
        if length == _NO_VALUE:
            return None, room_bytes
        if kind == b"$":
            return self._value(length), room_bytes
        if kind != b"*" or not depth:
            raise RedisConnectionError("the server does not speak RESP2")
        items: list[Reply] = []
        for _ in range(length):
            item, room_bytes = self._reply(room_bytes, depth - 1)
            items.append(item)
        return items, room_bytes

    def _value(self, length: int) -> bytes:
        value = bytearray()
        while len(value) < length:
            begin = len(value)
            value.extend(bytes(min(length - begin, _STEP_BYTES)))
            self._fill(memoryview(value)[begin:])
        self._end_of_value()
        return bytes(value)

    def value_into(self, prefix_bytes: int, view: memoryview) -> Reply:
        """Read a value as long as ``prefix_bytes`` and ``view`` together, its second part into ``view``.

        Returns:
            The prefix; empty bytes for a value of another length, which leaves ``view`` undefined; None for no value;
            or the server's error.
        """
        kind, rest = self._head()
        if kind == b"-":
            return self._error(rest)
        if kind != b"$":
            raise RedisConnectionError("the server does not answer with a value")
        length = _length(rest, max(_MAX_REPLY_BYTES, prefix_bytes + len(view)))
        if length == _NO_VALUE:
            return None
        prefix = bytearray(prefix_bytes)
        if length == prefix_bytes + len(view):
            self._fill(memoryview(prefix))
            self._fill(view)
        else:
            self._skip(length)
            prefix.clear()
        self._end_of_value()
        return bytes(prefix)

    def shut(self) -> None:
        """End another thread's waiting read. The socket stays open, so that its number is not reused."""
        connected = self._socket
        if connected is not None:
            try:
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # not the method of TLS, which would begin to read
            except OSError:  # it was no longer connected
                return

    @property
    def _sock(self) -> socket.socket:
        if self._socket is None:
            raise RedisConnectionError("the connection was closed")
        return self._socket

    def _error(self, text: bytes) -> ResponseError:
        said = text.decode(errors="replace")
        try:
            error = BaseParser.parse_error(said)
        except (ValueError, LookupError):  # such as MOVED to nowhere
            raise RedisConnectionError(f"the server sends a malformed error: {said[:64]}") from None
        if not isinstance(error, ResponseError):  # such as LOADING: redis-py counts it as a lost connection
            raise error
        return error

    def _head(self) -> tuple[bytes, bytes]:
        """Return the first line of a reply, as its kind and the rest."""
        line = b""
        while True:
            stop = self._memory.find(b"\n", self._begin, self._end) + 1
            if stop:
                line += self._memory[self._begin : stop]
                self._begin = stop
                return line[:1], line[1:-2]
            line += self._memory[self._begin : self._end]
            if len(line) > _MAX_LINE_BYTES:
                raise RedisConnectionError("the server does not speak RESP2: a line has no end")
            self._receive()

    def _receive(self) -> None:
        self._begin, self._end = 0, self._receive_into(self._view)

    def _receive_into(self, view: memoryview) -> int:
        received = self._sock.recv_into(view)
        if not received:
            raise RedisConnectionError("the server closed the connection")
        return received

    def _fill(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes."""
        done = min(len(view), self._end - self._begin)
        view[:done] = self._view[self._begin : self._begin + done]
        self._begin += done
        while done < len(view):
            done += self._receive_into(view[done:])

    def _skip(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, 1 << 20)))
        while length:
            step = min(length, len(scratch))
            self._fill(scratch[:step])
            length -= step

    def _end_of_value(self) -> None:
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise RedisConnectionError("the server does not speak RESP2")


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise RedisConnectionError(f"the server does not speak RESP2: {text[:32]!r} is no number") from error


def _length(text: bytes, limit: int) -> int:
    """Return the length that a reply announces, or ``_NO_VALUE``."""
    length = _number(text)
    if not _NO_VALUE <= length <= limit:
        raise RedisConnectionError(f"the server announces a reply of length {length}; at most {limit} is taken")
    return length


class RedisConnection:
    """Connection with its ``Reader``. It belongs to one thread at a time.

    Every method may raise redis-py's ``RedisError`` or ``OSError``. Then close it, as half a reply may be waiting.
    """

    def __init__(self, new_connection: Callable[[_ReaderFactory], AbstractConnection]) -> None:
        self.reader = Reader()
        self._connection = new_connection(lambda socket_read_size: self.reader)  # noqa: ARG005 - redis-py names it

    def connect(self) -> None:
        """Ensure that it is connected; connect again if the server hung up or unexpected data waits to be read."""
        if self.reader.is_connected and self.reader.can_read():
            self._connection.disconnect()
        self._connection.connect()

    def close(self) -> None:
        """Disconnect; ``connect`` connects again."""
        self._connection.disconnect()

    def send(self, pieces: Iterable[Buffer]) -> None:
        """Send packed commands, piece by piece; large values as views of their memory."""
        self._connection.send_packed_command(pieces)

    def ask(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send packed commands at once and read one reply for each, errors as values."""
        self.send([b"".join(commands)])
        return [self.reader.reply() for _ in commands]

    def call(self, *arguments: bytes | str | int) -> Reply:
        """Send one command and return its reply.

        Raises:
            ResponseError: the server refused.
        """
        (reply,) = self.ask([pack(*arguments)])
        return checked(reply)


def pack(*arguments: bytes | str | int) -> bytes:
    """Encode a command for the wire."""
    pieces = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        text = argument if isinstance(argument, bytes) else str(argument).encode()
        pieces.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(pieces)


def checked(reply: Reply) -> Reply:
    """Return the reply, unless it is an error.

    Raises:
        ResponseError: the reply is an error.
    """
    if isinstance(reply, ResponseError):
        raise reply
    return reply
