"""Receives messages frame by frame, and keeps only the first frames of a message with too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq

_MOST_FRAMES: Final = 2  # a request and its payload, after the name of the sender
_SKIPPED_AT_ONCE: Final = 4096  # frames; a few milliseconds


class Message(NamedTuple):
    """A message that was received.

    Attributes:
        name: the socket's name for the sender.
        frames: its first frames.
        is_whole: True if it has no other frames.
    """

    name: bytes
    frames: Sequence[zmq.Frame]
    is_whole: bool


class Intake:
    """Receives from a ROUTER socket. Belongs to the thread that decides."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._is_skipping = False

    def take(self) -> Message | None:
        """Return the next message; None if there is none, or if others are due after many skipped frames."""
        try:
            if self._is_skipping and not self._skip():
                return None
            name = self._router.recv(zmq.NOBLOCK, copy=False)
            frames: list[zmq.Frame] = []
            more = name.more
            while more and len(frames) < _MOST_FRAMES:
                frames.append(self._router.recv(zmq.NOBLOCK, copy=False))
                more = frames[-1].more
        except zmq.Again:
            return None
        self._is_skipping = bool(more)
        return Message(name.bytes, frames, not more)

    def _skip(self) -> bool:
        """Discard the rest of a message; return True at its end, False after a limited number of frames."""
        for _ in range(_SKIPPED_AT_ONCE):
            if not self._router.recv(zmq.NOBLOCK, copy=False).more:
                self._is_skipping = False
                return True
        return False
