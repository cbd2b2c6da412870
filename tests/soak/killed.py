"""Kills in the middle of stores to disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support.killed import kill_and_check

from soak.part import Batch, Do, Part

KILLS: Final = 10  # of a batch
_SURELY_KILLS: Final = 4  # so many do not all come before the first store
FOLDERS: Final = (1, 3)  # by turns


@contextmanager
def opened(folder: Path) -> Iterator[Do]:
    """Yield batches of kills over folders that stay, so that each start finds what all kills before it left."""

    def kill(seed: int) -> Batch:
        number = FOLDERS[seed % len(FOLDERS)]
        folders = [folder / f"{number}-{which}" for which in range(number)]
        left = kill_and_check(folders, KILLS, seed)
        assert left.chunks or KILLS < _SURELY_KILLS, "no kill left a chunk"
        return Batch(left.inside, notes={"kills": KILLS, "chunks checked": left.chunks})

    yield kill


PART = Part("kills", "kill -9 inside a store", 1_000, opened)
