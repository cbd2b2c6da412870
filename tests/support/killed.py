"""Processes that are killed while they store, and a check of the folders that they leave."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.model.chunks import Outcome
from kvstore.tiers.disk.opening import open_folders
from support.diskwork import CHUNK_BYTES, EVEN, MINE, bytes_on_disk, get, start_storing

CAPACITY_BYTES = 32 * CHUNK_BYTES
_LATEST_S = 0.3


class Left(NamedTuple):
    """Kills of processes that were inside a store, and the sound chunks that were found afterwards."""

    inside: int
    chunks: int


def kill_and_check(folders: Sequence[Path], kills: int, seed: int) -> Left:
    """Kill a process again and again at random moments; each time all that is found must be whole and counted."""
    dice = random.Random(seed)
    inside = folders[0].with_name("inside")
    num_inside = num_chunks = 0
    for round_ in range(kills):
        with start_storing(folders, CAPACITY_BYTES, seed * kills + round_, inside) as engine:
            time.sleep(dice.uniform(0.01, _LATEST_S))
            engine.kill()
        num_inside += inside.read_bytes()[0]
        tier = open_folders(folders, MINE, EVEN, CAPACITY_BYTES)
        try:
            listed = tier.scan()
            num_chunks += len(listed)
            assert tier.used_bytes == bytes_on_disk(*folders) == sum(size for _, size in listed)
            assert all(get(tier, ref) is Outcome.HIT for ref, _ in listed)
            assert tier.used_bytes == bytes_on_disk(*folders)
        finally:
            tier.close()
    return Left(num_inside, num_chunks)
