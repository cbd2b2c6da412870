"""How payload gets to a cache server and back: through pages that both have mapped, or in messages.

The first takes one copy each way. In messages, a payload goes in pieces of 2 MiB, a few of them under way at once, each
with its checksum, straight from the caller's memory and straight to it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final

import numpy as np

from kvstore.chunks import ByteArray, Outcome
from kvstore.errors import ClosedError, ProtocolError, TierError
from kvstore.memory.mapped import map_bytes, populate
from kvstore.protocol import messages
from kvstore.protocol.pieces import checksum, scatter
from kvstore.protocol.runs import extents
from kvstore.tiers.server.link import Link

_READ_WINDOW: Final = 4  # pieces; with more, the C library returns memory and takes fresh pages for the next ones


class Mapped:
    """Moves payloads through the server's memory, which is mapped here too. A restarted server has another one.

    Thread-safe; a connection belongs to one thread. Every method may raise ``TierError``: the server failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inode = -1
        self._memory: ByteArray | None = None
        self._is_closed = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, link: Link, payload: ByteArray, grant: messages.Grant) -> bool:
        """Write a payload to its pages; whether all of it is there."""
        scatter(payload, _views(self._memory_of(link), grant, len(payload)))
        return True

    def read(self, link: Link, payload: ByteArray, grant: messages.Grant) -> bool:
        """Read a payload from its pages; whether all of it is here."""
        np.concatenate(_views(self._memory_of(link), grant, len(payload)), out=payload)
        return True

    def lend(self, link: Link, grant: messages.Grant, num_bytes: int) -> ByteArray:
        """A read-only view of a payload in its pages; a copy if these are several runs."""
        parts = _views(self._memory_of(link), grant, num_bytes)
        payload = parts[0] if len(parts) == 1 else np.concatenate(parts)
        payload.flags.writeable = False
        return payload

    def close(self) -> None:
        """Stop touching pages, and unmap the memory."""
        with self._lock:
            self._is_closed = True
            self._stop_populating()
            self._memory = None

    def _memory_of(self, link: Link) -> ByteArray:
        """The memory of the server that a connection leads to."""
        if link.memory is None:
            with self._lock:
                link.memory = self._map(link.pool_fd)
        return link.memory

    def _map(self, fd: int) -> ByteArray:
        if self._is_closed:  # a call that ``close`` did not wait for
            raise ClosedError("the server tier was closed during the call")
        try:
            status = os.fstat(fd)
            if self._memory is None or status.st_ino != self._inode:
                self._memory = map_bytes(status.st_size, fd)
                self._inode = status.st_ino
                self._populate(self._memory)
        except (OSError, ValueError, OverflowError) as error:
            raise TierError(f"the memory of the cache server cannot be mapped: {error}") from error
        return self._memory

    def _populate(self, memory: ByteArray) -> None:
        """Fill this process's page tables before they are needed."""
        self._stop_populating()  # of an earlier server
        self._stopping.clear()
        work = (memory, 0, len(memory), self._stopping.is_set)
        self._thread = threading.Thread(target=populate, args=work, name="kvstore-populate-server", daemon=True)
        self._thread.start()

    def _stop_populating(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()


def _views(memory: ByteArray, grant: messages.Grant, num_bytes: int) -> list[ByteArray]:
    """The parts of the mapped memory that a grant names, for a payload of so many bytes.

    Raises:
        TierError: they do not hold it, or lie outside the memory.
    """
    try:
        parts = extents(grant.runs, 0, num_bytes)
    except ProtocolError as error:
        raise TierError(str(error)) from error
    if any(part.begin < 0 or part.begin + part.num_bytes > len(memory) for part in parts):
        raise TierError("the cache server granted pages outside its memory")
    return [memory[part.begin : part.begin + part.num_bytes] for part in parts]


class Framed:
    """The same in messages."""

    def write(self, link: Link, payload: ByteArray, grant: messages.Grant) -> bool:
        """Send pieces, a few of them before the first is confirmed."""
        sender = PieceSender(link)
        sender.send(0, grant.lease, payload, range(len(payload)))
        return not sender.finish()

    def read(self, link: Link, payload: ByteArray, grant: messages.Grant) -> bool:
        """Ask for pieces, a few of them ahead."""
        is_whole = True
        under_way: dict[int, ByteArray] = {}  # where pieces go, by serials
        waiting = deque(range(0, len(payload), messages.PIECE_BYTES))
        while waiting or under_way:
            while waiting and len(under_way) < _READ_WINDOW:
                offset, serial = waiting.popleft(), link.new_serial()
                under_way[serial] = payload[offset : offset + messages.PIECE_BYTES]
                link.send(messages.Fetch(serial, grant.lease, offset, len(under_way[serial])))
            answer, is_sound = link.receive_into(lambda data: under_way.get(data.serial))
            if under_way.pop(answer.serial, None) is None:
                raise TierError(f"the cache server answered {answer.serial}, which was not asked")
            is_whole = is_whole and is_sound
        return is_whole

    def close(self) -> None:
        """Nothing runs in the background."""


class PieceSender:
    """Sends payload in pieces, a few of them before the first is confirmed.

    Args:
        link: to the server.
        window: how many.

    Raises:
        TierError: from each method, if the server fails.
    """

    def __init__(self, link: Link, window: int = messages.WINDOW) -> None:
        self._link = link
        self._window = window
        self._under_way: dict[int, int] = {}  # the numbers of payloads, by serials
        self._failed: set[int] = set()

    def send(self, number: int, lease: int, payload: ByteArray, part: range) -> None:
        """Send some bytes of a payload, which goes by a number. They must not change before ``finish``."""
        for offset in range(part.start, part.stop, messages.PIECE_BYTES):
            piece = payload[offset : min(offset + messages.PIECE_BYTES, part.stop)]
            serial = self._begin(number)
            self._link.send(messages.Piece(serial, lease, offset, checksum([piece.data])), [piece.data])

    def _begin(self, number: int) -> int:
        """Wait until another request may be under way; its serial."""
        if len(self._under_way) >= self._window:
            self._confirm()
        serial = self._link.new_serial()
        self._under_way[serial] = number
        return serial

    def finish(self) -> set[int]:
        """Wait for all confirmations; returns the numbers of the payloads of which a piece was not taken."""
        while self._under_way:
            self._confirm()
        return self._failed

    def _confirm(self) -> None:
        answer = self._link.receive()
        number = self._under_way.pop(answer.serial, None)
        if number is None or not isinstance(answer, messages.Done):
            raise TierError(f"the cache server answered {answer.serial}, which was not asked")
        if answer.outcomes != bytes([messages.number_of(Outcome.STORED)]):
            self._failed.add(number)
