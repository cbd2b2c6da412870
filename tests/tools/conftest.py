"""Fixtures shared by the tests of the operators' tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.diskwork import CHUNK_BYTES, EVEN, MINE, make_transfer
from typer.testing import CliRunner, Result

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.cli import app

Run = Callable[..., Result]
RunJson = Callable[..., tuple[int, Any]]


@pytest.fixture
def run() -> Run:
    """Return a function that runs the command in this process."""

    def run_(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run_


@pytest.fixture
def run_json(run: Run) -> RunJson:
    """Return a function that runs the command with ``--json``, and returns the exit code and the output."""

    def run_(*arguments: object) -> tuple[int, Any]:
        result = run(*arguments, "--json")
        return result.exit_code, json.loads(result.stdout) if result.stdout else result.stderr

    return run_


@pytest.fixture
def fill(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that fills a folder through the disk tier, and closes the tier."""

    def fill_(
        refs: list[ChunkRef],
        *,
        namespace: Namespace = MINE,
        layout: KVLayout = EVEN,
        codec: str = "none",
        name: str = "cache",
    ) -> Path:
        capacity_bytes = 2 * (len(refs) + 2) * (CHUNK_BYTES + layout.slot_bytes)
        tier = DiskTier(tmp_path / name, namespace, layout, capacity_bytes, codec=codec)
        for ref in refs:
            assert tier.put([make_transfer(ref, layout)]) == [Outcome.STORED]
        tier.close()
        return tmp_path / name

    return fill_
