"""Soak of two engines and a sweeper over one store, each of which is killed again and again."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
from support.diskwork import EVEN, MINE, make_ref, make_slot, make_transfer
from support.object_worker import NUM_REFS, WRONG
from support.s3_server import S3Server

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.object import sweep as sweeping
from kvstore.tiers.object.names import parse_place
from kvstore.tiers.object.store import Store
from kvstore.tiers.object.sweep import Limits, SweepReport, sweep
from kvstore.tiers.object.tier import ObjectTier, open_store
from kvstore.tiers.object.url import parse_target

SOAK_S = 600.0
MAX_BYTES = 150 * (4096 + EVEN.payload_bytes(8))
SUPPORT = Path(__file__).resolve().parents[1]
Answer = TypeVar("Answer")


@pytest.fixture(params=["s3", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield f"file://{tmp_path}/kv"
        return
    server = S3Server(tmp_path / "s3", volumes=400).start()
    server.make_bucket("soak")
    yield server.url("soak")
    server.kill()


def start(kind: str, url: str, number: int, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.object_worker", kind, url, str(number)]
    with log.open("a") as output:
        return subprocess.Popen(command, cwd=SUPPORT, stdout=output, stderr=output, text=True)


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Ask until there is an answer; a busy server may answer 500, or too late."""
    for _ in range(10):
        try:
            return ask()
        except TierError as error:
            print(error)
            time.sleep(1.0)
    raise AssertionError("no answer")


def swept(store: Store) -> SweepReport:
    return patiently(lambda: sweep(store, Limits(max_bytes=MAX_BYTES)))


def chunks_in(store: Store) -> set[ChunkRef]:
    return {place.ref for listed in store.list("") if (place := parse_place(listed.name)) is not None}


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 300)
def test_engines_and_a_sweeper_that_are_killed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a wrong byte; afterwards one sweep keeps the bound, and finds everything that nobody names."""
    dice = random.Random(1)
    log = tmp_path / "log"
    kinds = {"first": "engine", "second": "engine", "sweeper": "sweeper"}
    processes: dict[str, subprocess.Popen[str]] = {}
    end_s = time.monotonic() + SOAK_S
    kills = 0
    try:
        while time.monotonic() < end_s:
            for name, kind in kinds.items():
                if name not in processes:
                    processes[name] = start(kind, url, MAX_BYTES if kind == "sweeper" else dice.randrange(1 << 30), log)
            time.sleep(dice.uniform(2.0, 8.0))
            for process in processes.values():
                assert process.poll() != WRONG, log.read_text()[-3000:]
                assert process.poll() is None, log.read_text()[-3000:]
            victim = dice.choice([*kinds])
            with processes.pop(victim) as process:
                process.kill()
            kills += 1
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert kills > SOAK_S / 12
    time.sleep(3.5)  # for the lock of a sweeper that was killed
    monkeypatch.setattr(sweeping, "_LATE_S", -60.0)
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    with closing(open_store(parse_target(url, {}))) as store:
        swept(store)
        again = swept(store)
        assert again.size_bytes <= MAX_BYTES
        assert (again.removed_chunks, again.found_chunks, again.lost_chunks, again.garbage_objects) == (0, 0, 0, 0)
        there = patiently(lambda: chunks_in(store))
    assert len(there) == again.chunks
    tier = ObjectTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": url}))
    refs = [make_ref(number, blocks) for number in range(NUM_REFS) for blocks in (1, 4, 8)]
    assert {ref for ref, is_there in zip(refs, tier.contains(refs), strict=True) if is_there} == there
    for ref in there:
        slot = make_slot()
        assert tier.get([Transfer(ref, slot)]) == [Outcome.HIT]
        size = EVEN.payload_bytes(ref.num_blocks)
        assert (slot[:size] == make_transfer(ref).buffer[:size]).all()
    tier.close()
    print(f"{kills} kills, {log.read_text()[-400:]}")
