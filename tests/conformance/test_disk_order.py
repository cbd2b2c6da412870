"""Tests of any order of calls, from one thread or many: the disk tier is a dictionary with exact byte counts."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.diskwork import (
    CHUNK_BYTES,
    EVEN,
    MINE,
    bytes_on_disk,
    flip_header,
    flip_payload,
    get,
    make_ref,
    path_of,
    put,
)
from support.schedules import schedules

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.tiers.disk.tier import DiskTier

REFS = st.builds(make_ref, st.integers(0, 5), st.sampled_from([1, 3, 8]))
CALLS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "get", "remove", "clear", "restart", "damage", "lose"]), REFS), max_size=40
)


@schedules(60)
@given(calls=CALLS)
def test_behaves_like_a_dictionary_and_counts_exactly(calls: list[tuple[str, ChunkRef]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tier = DiskTier(folder, MINE, EVEN, 4 * CHUNK_BYTES)
        held: set[ChunkRef] = set()
        for call, ref in calls:
            if call == "put":
                (outcome,) = put(tier, ref)
                others = sum(tier.stored_bytes(other.num_blocks) for other in held - {ref})
                fits = others + tier.stored_bytes(ref.num_blocks) <= tier.capacity_bytes
                assert outcome is (Outcome.STORED if fits else Outcome.FULL)
                held = held | {ref} if fits else held - {ref}
            elif call == "get":
                assert get(tier, ref) is (Outcome.HIT if ref in held else Outcome.MISS)
            elif call == "remove":
                tier.remove([ref])
                held.discard(ref)
            elif call == "clear":
                tier.clear()
                held.clear()
            elif call == "restart":
                tier.close()
                tier = DiskTier(folder, MINE, EVEN, 4 * CHUNK_BYTES)
                assert {listed for listed, _ in tier.scan()} == held
            elif call == "damage" and ref in held:
                flip_payload(path_of(folder, ref)) if ref.num_blocks > 1 else flip_header(path_of(folder, ref))
                assert get(tier, ref) is Outcome.CORRUPT
                held.discard(ref)
            elif call == "lose" and ref in held:
                path_of(folder, ref).unlink()
                assert get(tier, ref) is Outcome.MISS
                held.discard(ref)
            assert tier.used_bytes == bytes_on_disk(folder) <= tier.capacity_bytes
            assert {listed for listed, _ in tier.scan()} == held
        tier.close()


def test_many_threads(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MINE, EVEN, 6 * CHUNK_BYTES)
    wrong: list[Outcome] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(150):
            ref = make_ref(dice.randrange(8), dice.choice([1, 8]))
            action = dice.randrange(10)
            if action < 4:
                outcome = put(tier, ref)[0]
                wrong.extend([outcome] if outcome not in {Outcome.STORED, Outcome.FULL, Outcome.FAILED} else [])
            elif action < 8:
                outcome = get(tier, ref)
                wrong.extend([outcome] if outcome not in {Outcome.HIT, Outcome.MISS} else [])
            elif action == 8:
                tier.remove([ref])
            elif dice.randrange(10) == 0:
                tier.clear()
            if tier.used_bytes > tier.capacity_bytes:
                wrong.append(Outcome.FULL)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tier.used_bytes == bytes_on_disk(tmp_path)
    assert all(get(tier, ref) is Outcome.HIT for ref, _ in tier.scan())
    tier.close()
