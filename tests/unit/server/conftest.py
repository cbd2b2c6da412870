"""Fixtures shared by the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.shop import Desk

from kvstore.protocol import messages


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    assert isinstance(desk.hello(), messages.Welcome)
    yield desk
    desk.service.close()
    desk.pool.close()
