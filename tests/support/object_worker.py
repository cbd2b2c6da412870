"""Processes of the soak of object stores: an engine that checks every byte, and a sweeper. Both run until killed.

Every fourth chunk has a time to live of a few seconds, which all engines must know.

python -m support.object_worker engine URL SEED
python -m support.object_worker sweeper URL MAX_BYTES
"""

from __future__ import annotations

import random
import sys
import time

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.model.lifetime import Lifetime
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.object import sweep as sweeping
from kvstore.tiers.object.tier import ObjectTier, open_store
from kvstore.tiers.object.url import parse_target
from support.diskwork import EVEN, MINE, make_ref, make_slot, make_transfer

NUM_REFS = 400
MAX_LIFE_S = 3.0
WRONG = 3


def engine(url: str, seed: int) -> None:
    dice = random.Random(seed)
    tier = ObjectTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": url, "timeout_s": 3.0}))
    counts = dict.fromkeys(Outcome, 0)
    while True:
        number = dice.randrange(NUM_REFS)
        ref = make_ref(number, dice.choice([1, 4, 8]))
        until_s = None if number % 4 else time.time() + dice.uniform(0.5, MAX_LIFE_S)
        wanted = make_transfer(ref)._replace(until_s=until_s)
        action = dice.randrange(100)
        try:
            if action < 40:
                (outcome,) = tier.put([wanted])
            elif action < 97:
                slot = make_slot()
                if until_s is not None and True in tier.contains([ref]):
                    print("without end", ref, flush=True)
                    sys.exit(WRONG)
                (outcome,) = tier.get([Transfer(ref, slot)])
                size = EVEN.payload_bytes(ref.num_blocks)
                if outcome is Outcome.CORRUPT or (
                    outcome is Outcome.HIT and (slot[:size] != wanted.buffer[:size]).any()
                ):
                    print("wrong", outcome, ref, flush=True)
                    sys.exit(WRONG)
            elif action < 98:
                tier.limit([Lifetime(ref, until_s)])
                continue
            elif action < 99 or dice.randrange(20):
                tier.remove([ref])
                continue
            else:
                tier.clear()
                continue
            counts[outcome] += 1
        except KVStoreError as error:
            print(error, file=sys.stderr, flush=True)
            time.sleep(0.05)
        if not sum(counts.values()) % 200:
            print({outcome.value: number for outcome, number in counts.items() if number}, file=sys.stderr, flush=True)


def sweeper(url: str, max_bytes: int) -> None:
    sweeping.LOCKED_S = 3.0  # type: ignore[misc] # a killed one must not end the soak
    store = open_store(parse_target(url, {}))
    while True:
        try:
            print(sweeping.sweep(store, sweeping.Limits(max_bytes=max_bytes)), file=sys.stderr, flush=True)
        except (ConfigError, KVStoreError) as error:
            print(error, file=sys.stderr, flush=True)
        time.sleep(1.0)


if __name__ == "__main__":
    kind, url, number = sys.argv[1:]
    {"engine": engine, "sweeper": sweeper}[kind](url, int(number))
