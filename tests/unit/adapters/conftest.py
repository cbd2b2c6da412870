"""Engines for the tests of the scheduler side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_parts import Setup
from support.fake_vllm import FakeVllm
from support.situations import PLAIN, Build


@pytest.fixture
def build() -> Iterator[Build]:
    """Makes engines, and ends them one after the other: a new one in the same folder is a restart."""
    engines: list[FakeVllm] = []

    def build_(setup: Setup = PLAIN, **changes: object) -> FakeVllm:
        if engines:
            engines[-1].close()
        engines.append(FakeVllm(replace(setup, **changes)))  # type: ignore[arg-type] # checked by the dataclass
        return engines[-1]

    yield build_
    for engine in engines:
        engine.close()


@pytest.fixture
def on_disk(tmp_path: Path) -> Setup:
    """Chunks pass through memory to the disk, so every hit reads a file."""
    return Setup(folder=tmp_path, local_cpu=False)
