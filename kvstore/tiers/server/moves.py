"""Transfer of payloads to a cache server and back, through pages mapped by both, or in messages.

Mapped pages take one copy each way. In messages, a payload is sent in pieces of 2 MiB, several of them under way at
once, each with its checksum, directly from and to the caller's memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from kvstore.memory.mapped import map_bytes, populate_read
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import ClosedError, ProtocolError, TierError
from kvstore.protocol import messages
from kvstore.protocol.outcomes import number_of
from kvstore.protocol.payload import checksum, extents, scatter
from kvstore.tiers.server.connection import ServerConnection

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Begin and end of parts of a payload, in order."""
_STEP_BYTES: Final = 64 << 20
_LOOK_S: Final = 0.1
_READ_WINDOW: Final = 4  # pieces; with more, the C library frees memory and allocates fresh pages for the next ones


class Mapped:
    """Mover of payloads through the mapped memory of the server. A restarted server has other memory.

    The memory belongs to the connections and to lent views, the last of which unmaps it.

    Thread-safe; a connection belongs to one thread. Every method may raise ``TierError`` if the server fails.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inode = -1
        self._memory: weakref.ref[ByteArray] | None = None
        self._is_closed = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, connection: ServerConnection, payload: ByteArray, grant: messages.Grant) -> bool:
        """Write a payload to its pages; returns True."""
        scatter(payload, _views(self._memory_of(connection), grant, 0, len(payload)))
        return True

    def read(self, connection: ServerConnection, payload: ByteArray, grant: messages.Grant) -> bool:
        """Read a payload from its pages; returns True."""
        np.concatenate(_views(self._memory_of(connection), grant, 0, len(payload)), out=payload)
        return True

    def read_front(
        self, connection: ServerConnection, front: ByteArray, grant: messages.Grant, _: int, ranges: Ranges
    ) -> bool:
        """Read the ranges of a payload's leading blocks; returns True."""
        memory = self._memory_of(connection)
        np.concatenate([view for begin, end in ranges for view in _views(memory, grant, begin, end)], out=front)
        return True

    def lend(self, connection: ServerConnection, grant: messages.Grant, num_bytes: int) -> ByteArray:
        """Return a read-only view of a payload in its pages; a copy if the pages are several runs."""
        parts = _views(self._memory_of(connection), grant, 0, num_bytes)
        payload = parts[0] if len(parts) == 1 else np.concatenate(parts)
        payload.flags.writeable = False
        return payload

    def close(self) -> None:
        """Stop populating pages, and refuse further mappings."""
        with self._lock:
            self._is_closed = True
            self._stop_populating()

    def _memory_of(self, connection: ServerConnection) -> ByteArray:
        """Return the memory of a connection's server."""
        if connection.memory is None:
            assert connection.hold is not None
            with self._lock:
                connection.memory = self._map(connection.hold.pool_fd, connection.hold.pool_bytes)
        return connection.memory

    def _map(self, fd: int, num_bytes: int) -> ByteArray:
        if self._is_closed:  # a call that ``close`` did not wait for
            raise ClosedError("the server tier was closed during the call")
        try:
            inode = os.fstat(fd).st_ino
            memory = self._memory() if self._memory is not None else None
            if memory is None or inode != self._inode:
                memory = map_bytes(num_bytes, fd)
                self._inode = inode
                self._populate(memory, fd)
        except (OSError, ValueError, OverflowError) as error:
            raise TierError(f"the memory of the cache server cannot be mapped: {error}") from error
        return memory

    def _populate(self, memory: ByteArray, fd: int) -> None:
        """Fill this process's page tables before they are needed."""
        self._stop_populating()  # of an earlier server
        self._stopping = stopping = threading.Event()
        self._memory = weakref.ref(memory)
        work = (self._memory, os.dup(fd), memory.nbytes, stopping)
        self._thread = threading.Thread(target=_follow, args=work, name="kvstore-populate-server", daemon=True)
        self._thread.start()

    def _stop_populating(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()


def _follow(memory: weakref.ref[ByteArray], fd: int, num_bytes: int, stopping: threading.Event) -> None:
    """Populate the pages that the server has allocated, following its progress, and close ``fd`` at the end.

    Touching other pages would allocate them in this process, and charge them to its container.
    """
    begin = 0
    try:
        while begin < num_bytes and not stopping.is_set():
            end = min(os.lseek(fd, begin, os.SEEK_HOLE), begin + _STEP_BYTES)
            mapped = memory()
            if mapped is None:
                break
            populate_read(mapped, begin, end)
            del mapped  # or this thread would keep the mapping while it waits
            if end == begin:
                stopping.wait(_LOOK_S)
            begin = end
    finally:
        os.close(fd)


def _views(memory: ByteArray, grant: messages.Grant, begin: int, end: int) -> list[ByteArray]:
    """Return the parts of the mapped memory that a grant names, for a range of a payload.

    Raises:
        TierError: they do not hold it, or are outside the memory.
    """
    try:
        parts = extents(grant.runs, begin, end - begin)
    except ProtocolError as error:
        raise TierError(str(error)) from error
    if any(part.begin < 0 or part.begin + part.num_bytes > len(memory) for part in parts):
        raise TierError("the cache server granted pages outside its memory")
    return [memory[part.begin : part.begin + part.num_bytes] for part in parts]


class Framed:
    """Mover of payloads in messages."""

    def write(self, connection: ServerConnection, payload: ByteArray, grant: messages.Grant) -> bool:
        """Send pieces, several of them before the first is confirmed; returns True if all were accepted."""
        sender = PieceSender(connection)
        sender.send(0, grant.lease, payload, range(len(payload)))
        return not sender.finish()

    def read(self, connection: ServerConnection, payload: ByteArray, grant: messages.Grant) -> bool:
        """Ask for pieces, several of them ahead; returns True if all checksums are right."""
        pieces = _pieces([(0, len(payload))])
        return _receive(
            connection, payload, (messages.Fetch(connection.new_serial(), grant.lease, *piece) for piece in pieces)
        )

    def read_front(
        self, connection: ServerConnection, front: ByteArray, grant: messages.Grant, front_blocks: int, ranges: Ranges
    ) -> bool:
        """Ask for pieces of leading blocks; an older server is asked for pieces of each range."""
        asked: Iterator[messages.Fetch | messages.Front]
        if connection.knows(messages.Front):
            pieces = _pieces([(0, len(front))])
            asked = (messages.Front(connection.new_serial(), grant.lease, front_blocks, *piece) for piece in pieces)
        else:
            asked = (messages.Fetch(connection.new_serial(), grant.lease, *piece) for piece in _pieces(ranges))
        return _receive(connection, front, asked)

    def close(self) -> None:
        """Do nothing, because no thread runs in the background."""


def _pieces(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """Yield begin and length of the pieces of ranges, each of which fits into a message."""
    for begin, end in ranges:
        for first in range(begin, end, messages.PIECE_BYTES):
            yield first, min(messages.PIECE_BYTES, end - first)


def _receive(
    connection: ServerConnection, target: ByteArray, requests: Iterator[messages.Fetch | messages.Front]
) -> bool:
    """Ask for parts, several of them ahead, which fill an array in order; returns True if all are sound."""
    is_whole, placed_bytes = True, 0
    under_way: dict[int, ByteArray] = {}  # destinations of parts, by serial
    request = next(requests, None)
    while request is not None or under_way:
        while request is not None and len(under_way) < _READ_WINDOW:
            under_way[request.serial] = target[placed_bytes : placed_bytes + request.num_bytes]
            placed_bytes += request.num_bytes
            connection.send(request)
            request = next(requests, None)
        answer, is_sound = connection.receive_into(lambda data: under_way.get(data.serial))
        if under_way.pop(answer.serial, None) is None:
            raise TierError(f"the cache server answered {answer.serial}, which is the serial of no request")
        is_whole = is_whole and is_sound
    return is_whole


class PieceSender:
    """Sender of payload in pieces, several of them before the first is confirmed.

    Args:
        connection: to the server.
        window: maximum number of unconfirmed pieces.

    Raises:
        TierError: from each method, if the server fails.
    """

    def __init__(self, connection: ServerConnection, window: int = messages.WINDOW) -> None:
        self._connection = connection
        self._window = window
        self._under_way: dict[int, int] = {}  # payload numbers, by serial
        self._failed: set[int] = set()

    def send(self, number: int, lease: int, payload: ByteArray, part: range) -> None:
        """Send part of a payload, which is identified by ``number``. It must not change before ``finish``."""
        for offset in range(part.start, part.stop, messages.PIECE_BYTES):
            piece = payload[offset : min(offset + messages.PIECE_BYTES, part.stop)]
            serial = self._begin(number)
            self._connection.send(messages.Piece(serial, lease, offset, checksum([piece.data])), [piece.data])

    def _begin(self, number: int) -> int:
        """Wait until another request may be under way; returns its serial."""
        if len(self._under_way) >= self._window:
            self._confirm()
        serial = self._connection.new_serial()
        self._under_way[serial] = number
        return serial

    def finish(self) -> set[int]:
        """Wait for all confirmations; returns the numbers of payloads with a refused piece."""
        while self._under_way:
            self._confirm()
        return self._failed

    def _confirm(self) -> None:
        answer = self._connection.receive()
        number = self._under_way.pop(answer.serial, None)
        if number is None or not isinstance(answer, messages.Done):
            raise TierError(f"the cache server answered {answer.serial}, which is the serial of no request")
        if answer.outcomes != bytes([number_of(Outcome.STORED)]):
            self._failed.add(number)
