"""Tests of kill -9 at random moments: the next start finds only whole chunks, and accounts for every byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.killed import kill_and_check

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("num_folders", [1, 3])
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_while_storing(tmp_path: Path, num_folders: int, kills: int) -> None:
    assert kill_and_check([tmp_path / str(number) for number in range(num_folders)], kills, seed=num_folders).chunks
