"""Messages to a cache server about trails: each carries as much as fits, and no more."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvstore.model.chunks import ChunkRef
from kvstore.protocol import messages
from kvstore.tiers.base import MAX_NEAREST
from kvstore.tiers.server import calls
from kvstore.tiers.server.connection import ServerConnection

KEY = b"k" * 16


class FakeLink:
    """ServerConnection that records messages, and answers that no chunk is near."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def knows(self, _: type[messages.Request]) -> bool:
        return True

    def new_serial(self) -> int:
        return 1

    def send(self, request: messages.Request) -> None:
        self.sent.append(request)

    def ask(self, request: messages.Nearest, _: object) -> messages.Named:
        self.sent.append(request)
        return messages.Named(1, [[] for _ in request.trails])


@pytest.mark.parametrize("num_blocks", [1, 4096, 4097, 1 << 18])
def test_a_chunk_is_described_if_that_fits_into_a_message(num_blocks: int) -> None:
    """The chunks of a large ``chunk_size`` are stored as before."""
    connection = FakeLink()
    trail = KEY * num_blocks
    calls.describe(cast("ServerConnection", connection), 1, ChunkRef(KEY, num_blocks), trail)
    assert len(connection.sent) == (num_blocks * len(KEY) <= messages.MAX_TRAIL_BYTES)
    for message in connection.sent:
        assert messages.decode_request(messages.encode(message)) == message
    assert calls.nearest(cast("ServerConnection", connection), [trail]) == [()]


def test_questions_have_answers_that_fit_into_a_message() -> None:
    connection = FakeLink()
    trails = [KEY * 64] * 100
    assert calls.nearest(cast("ServerConnection", connection), trails) == [()] * len(trails)
    for message in connection.sent:
        assert MAX_NEAREST * sum(map(len, message.trails)) <= messages.MAX_MESSAGE_BYTES
