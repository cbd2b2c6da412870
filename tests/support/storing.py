"""A process that stores chunks to disk until it is killed.

Its arguments are CAPACITY_BYTES SEED INSIDE FOLDER ... The byte in the file INSIDE is 1 while it stores. It prints
``ready`` once it runs.
"""

from __future__ import annotations

import mmap
import random
import sys
from pathlib import Path

from kvstore.tiers.disk.opening import open_folders
from support.diskwork import EVEN, MINE, make_ref, make_transfer


def main() -> None:
    capacity_bytes, seed, inside = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with inside.open("r+b") as file:
        is_inside = mmap.mmap(file.fileno(), 1)
    tier = open_folders([Path(name) for name in sys.argv[4:]], MINE, EVEN, capacity_bytes)
    tier.scan()
    dice = random.Random(seed)
    print("ready", flush=True)
    while True:
        chunk = make_transfer(make_ref(dice.randrange(40), dice.choice([3, 8, 8])))
        is_inside[0] = 1
        tier.put([chunk])
        is_inside[0] = 0
        if dice.randrange(2):
            tier.remove([make_ref(dice.randrange(40), dice.choice([3, 8]))])
        if dice.randrange(200) == 0:
            tier.clear()
