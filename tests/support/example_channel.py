"""A channel that reads other processes' memory through /proc, and a variant whose reads end when a test says so."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvstore.channels.base import Channel, Peer, Reading, State
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ChannelError


class ProcChannel(Channel):
    """Channel for processes of one user on one host."""

    name: ClassVar[str] = "proc"

    def __init__(self) -> None:
        self._memory: ByteArray | None = None
        self._peers: dict[Peer, tuple[int, int, int]] = {}
        self._ended: dict[Reading, State] = {}
        self._numbers = itertools.count()
        self._is_closed = False

    def register(self, memory: ByteArray) -> None:
        self._memory = memory

    def describe(self) -> bytes:
        if self._memory is None:
            raise ChannelError("nothing is registered")
        fields = json.dumps([os.getpid(), self._memory.ctypes.data, self._memory.nbytes]).encode()
        return zlib.crc32(fields).to_bytes(4, "big") + fields

    def attach(self, description: bytes) -> Peer:
        if self._is_closed:
            raise ChannelError("closed")
        fields = description[4:]
        if zlib.crc32(fields).to_bytes(4, "big") != description[:4] or not fields:
            raise ChannelError("no description")
        peer = Peer(fields.decode())
        self._peers[peer] = tuple(json.loads(fields))
        return peer

    def detach(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def read(self, peer: Peer, offset_bytes: int, parts: Sequence[ByteArray]) -> Reading:
        self.require(peer, offset_bytes, sum(map(len, parts)))
        reading = Reading(next(self._numbers))
        self._ended[reading] = self.copy(peer, offset_bytes, parts)
        return reading

    def require(self, peer: Peer, offset_bytes: int, num_bytes: int) -> None:
        if self._is_closed or peer not in self._peers:
            raise ChannelError("not attached")
        if not 0 <= offset_bytes <= self._peers[peer][2] - num_bytes:
            raise ChannelError("outside of its memory")

    def copy(self, peer: Peer, offset_bytes: int, parts: Sequence[ByteArray]) -> State:
        pid, address, _ = self._peers[peer]
        try:
            with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                num_bytes = os.preadv(memory.fileno(), [part.data for part in parts], address + offset_bytes)
        except OSError:
            return State.FAILED
        return State.DONE if num_bytes == sum(map(len, parts)) else State.FAILED

    def look(self, reading: Reading) -> State:
        return self._ended.pop(reading)

    def close(self) -> None:
        self._is_closed = True


class HeldChannel(ProcChannel):
    """Channel whose reads end only when ``let_end`` is called; ``damage`` is then applied to the bytes."""

    name: ClassVar[str] = "held"
    made: ClassVar[list[HeldChannel]] = []
    holds: ClassVar[bool] = False
    damage: ClassVar[Any] = None  # a function of the first part, or none

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Reading, Callable[[], State]] = {}
        self.made.append(self)

    def read(self, peer: Peer, offset_bytes: int, parts: Sequence[ByteArray]) -> Reading:
        self.require(peer, offset_bytes, sum(map(len, parts)))

        def end() -> State:
            state = self.copy(peer, offset_bytes, parts)
            if self.damage is not None:
                self.damage(parts[0])
            return state

        reading = Reading(next(self._numbers))
        self.held[reading] = end
        if not self.holds:
            self.let_end()
        return reading

    def let_end(self) -> None:
        for reading, end in list(self.held.items()):
            self._ended[reading] = end()
            del self.held[reading]

    def look(self, reading: Reading) -> State:
        return self._ended.pop(reading, State.PENDING)
