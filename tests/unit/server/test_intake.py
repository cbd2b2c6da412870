"""Cost of one message for the thread that receives for all: a bounded number of frames, kept or thrown away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kvstore.server import connections
from kvstore.server.connections import Intake


class Router:
    """A socket with a queue of messages, which counts the frames taken from it."""

    def __init__(self, *messages: int) -> None:
        self.taken = 0
        self._frames = self._all(messages)

    @staticmethod
    def _all(messages: tuple[int, ...]) -> Iterator[Frame]:
        for count in messages:
            for number in range(count):
                yield Frame(more=number < count - 1)

    def recv(self, flags: int, *, copy: bool) -> Frame:
        assert flags == zmq.NOBLOCK
        assert not copy
        frame = next(self._frames, None)
        if frame is None:
            raise zmq.Again
        self.taken += 1
        return frame


class Frame:
    bytes = b"name"

    def __init__(self, *, more: bool) -> None:
        self.more = more


def intake_of(*messages: int) -> tuple[Intake, Router]:
    router = Router(*messages)
    return Intake(router), router  # type: ignore[arg-type]


def test_of_a_message_of_many_frames_the_first_are_kept() -> None:
    taking, router = intake_of(10_000)
    message = taking.take()
    assert message is not None
    assert (len(message.frames), message.is_whole, router.taken) == (2, False, 3)


@pytest.mark.parametrize("count", [2, 3])
def test_a_message_of_few_frames_is_whole(count: int) -> None:
    taking, _ = intake_of(count, count)
    for _ in range(2):
        message = taking.take()
        assert message is not None
        assert (len(message.frames), message.is_whole) == (count - 1, True)
    assert taking.take() is None


def test_others_have_their_turn_while_frames_are_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SKIPPED_AT_ONCE", 100)
    taking, router = intake_of(1_000, 2)
    taking.take()
    turns = []
    while (message := taking.take()) is None:
        turns.append(router.taken)
    assert [later - before for before, later in zip([3, *turns], turns, strict=False)] == [100] * 9
    assert (len(message.frames), message.is_whole) == (1, True), "what came behind it is received"
