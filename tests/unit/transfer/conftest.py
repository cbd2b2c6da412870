"""Fixtures of the lane's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.lane_bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Yield a lane over numbered slots."""
    bench = Bench()
    yield bench
    bench.lane.close()
