"""One client process of the soak of the cache server: stores, looks up and retrieves, and checks every byte.

Its arguments are URL SECONDS THREADS SEED, and it prints one JSON object. At a wrong read it prints it and ends at
once, as it may be killed later. The content of a chunk follows from its key,
so that any process can check another's chunks.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field

import numpy as np

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.testing.harness import make_buffer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.server.tier import ServerTier

LAYOUTS = [
    KVLayout(page_bytes=(size,) * 4, planes=1, block_tokens=16, chunk_tokens=64) for size in (4096, 20_000, 65_536)
]
NUM_CHUNKS = 400
LOOKUP_CHUNKS = 128
WRONG_CODE = 3  # the exit code after a wrong read


@dataclass
class Result:
    """Results that the client saw."""

    stored: int = 0
    hits: int = 0
    misses: int = 0
    failed: int = 0
    errors: int = 0
    corrupt: int = 0
    wrong: int = 0
    lookups_s: list[float] = field(default_factory=list)


def ref_of(number: int) -> ChunkRef:
    return ChunkRef(number.to_bytes(16, "little"), 1 + number % 4)


def content(ref: ChunkRef, which: int, num_bytes: int) -> ByteArray:
    first = int.from_bytes(ref.prefix_key[:4], "little") * 7919 + which * 104_729
    return ((np.arange(-(-num_bytes // 8), dtype=np.uint64) + np.uint64(first)) * np.uint64(0x9E3779B97F4A7C15)).view(
        np.uint8
    )[:num_bytes]


def end(why: str, code: int) -> None:
    """Say why, and end this process at once, whatever its other threads do."""
    print(why, flush=True)
    os._exit(code)


def work(url: str, until_s: float, seed: int, result: Result, lock: threading.Lock) -> None:
    dice = random.Random(seed)
    which = seed % len(LAYOUTS)
    layout = LAYOUTS[which]
    setup = TierSetup(Namespace({"model": f"soak {which}"}), layout, UNBOUNDED_BYTES, {"url": url, "timeout_s": 20.0})
    tier = ServerTier.open(setup)
    buffer = make_buffer(layout.slot_bytes)
    while time.time() < until_s:
        ref = ref_of(dice.randrange(NUM_CHUNKS))
        payload_bytes = layout.payload_bytes(ref.num_blocks)
        seen = Result()
        try:
            step(tier, dice, ref, buffer, content(ref, which, payload_bytes), seen)
        except TierError:
            seen.errors += 1
        if seen.wrong:
            end(f"{ref} brought other bytes than were stored", WRONG_CODE)
        with lock:
            for name, value in vars(seen).items():
                setattr(result, name, getattr(result, name) + value)
    tier.close()


def work_or_end(url: str, until_s: float, seed: int, result: Result, lock: threading.Lock) -> None:
    """Work; an error that no client expects ends the process, as an error in a thread would be silent."""
    try:
        work(url, until_s, seed, result, lock)
    except BaseException:  # noqa: BLE001 - it is told, and ends the process
        end(traceback.format_exc(), 1)


def step(
    tier: ServerTier, dice: random.Random, ref: ChunkRef, buffer: ByteArray, expected: ByteArray, seen: Result
) -> None:
    action = dice.randrange(100)
    if action < 35:
        buffer[: len(expected)] = expected
        (outcome,) = tier.put([Transfer(ref, buffer, owner=ref.prefix_key)])  # which older servers do not hear of
        seen.stored += outcome is Outcome.STORED
        seen.failed += outcome is not Outcome.STORED
    elif action < 70:
        buffer[:] = 0
        (outcome,) = tier.get([Transfer(ref, buffer)])
        seen.hits += outcome is Outcome.HIT
        seen.misses += outcome is Outcome.MISS
        seen.failed += outcome is Outcome.FAILED
        seen.corrupt += outcome is Outcome.CORRUPT
        seen.wrong += outcome is Outcome.HIT and not np.array_equal(buffer[: len(expected)], expected)
    elif action < 98:
        begin_s = time.perf_counter()
        tier.contains([ref_of(number) for number in range(LOOKUP_CHUNKS)])
        seen.lookups_s.append(time.perf_counter() - begin_s)
    else:
        tier.remove([ref])


def main() -> None:
    url, seconds, threads, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    result, lock = Result(), threading.Lock()
    until_s = time.time() + seconds
    workers = [
        threading.Thread(target=work_or_end, args=(url, until_s, seed * threads + number, result, lock))
        for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps(asdict(result)))
