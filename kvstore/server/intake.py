"""Messages of a socket, frame by frame: of one that has too many of them, no more than the first ones are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq

_MOST_FRAMES: Final = 2  # behind the name of the sender: a request, and what it carries
_SKIPPED_AT_ONCE: Final = 4096  # frames; a few milliseconds


class Message(NamedTuple):
    """What came.

    Attributes:
        name: the socket's name for the sender.
        frames: the first ones of the message.
        is_whole: these are all.
    """

    name: bytes
    frames: Sequence[zmq.Frame]
    is_whole: bool


class Intake:
    """Takes messages from a ROUTER socket. Belongs to the thread that decides."""

    def __init__(self, door: zmq.Socket[bytes]) -> None:
        self._door = door
        self._is_skipping = False

    def take(self) -> Message | None:
        """The next message; None if there is none, or so many frames were thrown away that it is others' turn."""
        try:
            if self._is_skipping and not self._skip():
                return None
            name = self._door.recv(zmq.NOBLOCK, copy=False)
            frames: list[zmq.Frame] = []
            more = name.more
            while more and len(frames) < _MOST_FRAMES:
                frames.append(self._door.recv(zmq.NOBLOCK, copy=False))
                more = frames[-1].more
        except zmq.Again:
            return None
        self._is_skipping = bool(more)
        return Message(name.bytes, frames, not more)

    def _skip(self) -> bool:
        """Throw away the rest of a message; whether all of it has gone."""
        for _ in range(_SKIPPED_AT_ONCE):
            if not self._door.recv(zmq.NOBLOCK, copy=False).more:
                self._is_skipping = False
                return True
        return False
