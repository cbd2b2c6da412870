"""Tests of kill -9 at random moments: the next start finds only whole chunks, and accounts for every byte."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from support.diskwork import CHUNK_BYTES, EVEN, MINE, bytes_on_disk, get, start_storing

from kvstore.model.chunks import Outcome
from kvstore.tiers.disk.opening import open_folders

if TYPE_CHECKING:
    from pathlib import Path


def kill_and_check(folders: list[Path], kills: int, seed: int) -> None:
    dice = random.Random(seed)
    found = 0
    for round_ in range(kills):
        with start_storing(folders, 32 * CHUNK_BYTES, seed=round_) as engine:
            time.sleep(dice.uniform(0.01, 0.3))
            engine.kill()
        tier = open_folders(folders, MINE, EVEN, 32 * CHUNK_BYTES)
        try:
            listed = tier.scan()
            found += len(listed)
            assert tier.used_bytes == bytes_on_disk(*folders) == sum(size for _, size in listed)
            assert all(get(tier, ref) is Outcome.HIT for ref, _ in listed)
            assert tier.used_bytes == bytes_on_disk(*folders)
        finally:
            tier.close()
    assert found


@pytest.mark.parametrize("num_folders", [1, 3])
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_while_storing(tmp_path: Path, num_folders: int, kills: int) -> None:
    kill_and_check([tmp_path / str(number) for number in range(num_folders)], kills, seed=num_folders)
