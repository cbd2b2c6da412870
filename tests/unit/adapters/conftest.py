"""Engines for the tests of the scheduler side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_parts import Setup
from support.fake_vllm import one_after_the_other
from support.situations import PLAIN, Build


@pytest.fixture
def build() -> Iterator[Build]:
    with one_after_the_other(PLAIN) as build_:
        yield build_


@pytest.fixture
def on_disk(tmp_path: Path) -> Setup:
    """Return a setup in which chunks pass through memory to the disk, so that every hit reads a file."""
    return Setup(folder=tmp_path, local_cpu=False)
