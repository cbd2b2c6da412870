"""The disk tier finds its chunks after a restart, in order of use, and sweeps the remains of a crash."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.diskwork import CHUNK_BYTES, MINE, OTHER, Open, bytes_on_disk, cut, get, make_ref, path_of, put

from kvstore.format.chunkfile import Damage, chunk_name
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk import survey
from kvstore.tiers.disk.chunkio import Body, ChunkIO
from kvstore.tiers.disk.tier import DiskTier


def test_restart_finds_everything_in_order_of_use(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    refs = [make_ref(number) for number in range(4)]
    put(tier, *refs, make_ref(9, 3))
    for age, ref in enumerate(refs):
        os.utime(path_of(folder, ref), (1000 - 100 * age,) * 2)
    assert get(tier, refs[3]) is Outcome.HIT  # the oldest becomes the newest
    tier = open_tier()
    listed = tier.scan()
    assert [ref for ref, _ in listed][:3] == [refs[2], refs[1], refs[0]]
    assert {ref for ref, _ in listed} == {*refs, make_ref(9, 3)}
    assert all(size == tier.stored_bytes(ref.num_blocks) for ref, size in listed)
    assert all(get(tier, ref) is Outcome.HIT for ref, _ in listed)
    assert tier.used_bytes == bytes_on_disk(folder) == sum(size for _, size in listed)


def test_restart_evicts_the_tail_of_a_prompt_before_its_head(open_tier: Open, folder: Path) -> None:
    """Chunks of a prompt are touched from head to tail; prompts by turns, with a pause between them."""
    put(open_tier(), *(make_ref(number) for number in range(9)))
    for number in range(9):
        used_s = 1000 * (number // 3) + 0.1 * (number % 3)
        os.utime(path_of(folder, make_ref(number)), (used_s, used_s))
    assert [ref for ref, _ in open_tier().scan()] == [make_ref(number) for number in (2, 1, 0, 5, 4, 3, 8, 7, 6)]


def test_a_chunk_counts_as_used_when_its_read_began(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and tail of a prompt are read at once; the tail arrives first, and is still evicted first."""
    tier = open_tier()
    head, tail = make_ref(1), make_ref(2)
    put(tier, tail, head)
    began, go_on = threading.Event(), threading.Event()
    original = ChunkIO.read

    def read(self: ChunkIO, path: Path, body: Body, used_ns: int, layers: range | None) -> Damage | None:
        if body.ref == head:
            began.set()
            assert go_on.wait(30)
        return original(self, path, body, used_ns, layers)

    monkeypatch.setattr(ChunkIO, "read", read)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(get, tier, head)
        assert began.wait(30)
        assert get(tier, tail) is Outcome.HIT
        go_on.set()
        assert reading.result() is Outcome.HIT
    assert [ref for ref, _ in tier.scan()] == [tail, head]
    assert [ref for ref, _ in open_tier().scan()] == [tail, head]


def test_order_of_use_without_pauses() -> None:
    """Under steady load a session lasts ten seconds, so that old chunks are still evicted first."""
    second_ns = 10**9
    found = [survey.Use(number * second_ns // 2, make_ref(number), CHUNK_BYTES) for number in range(120)]
    ordered = [use.ref for use in survey.in_order_of_use(found)]
    assert ordered[0] == make_ref(20)
    assert all(abs(place - int.from_bytes(ref.prefix_key[:2], "little")) <= 20 for place, ref in enumerate(ordered))


def test_what_lies_in_the_future_was_used_just_now() -> None:
    hour_ns = 3600 * 10**9
    found = [survey.Use(time.time_ns() + hour_ns * hours, make_ref(hours), CHUNK_BYTES) for hours in (1, 2)]
    assert [use.ref for use in survey.in_order_of_use(found)] == [make_ref(2), make_ref(1)], "in one session"


def test_restart_sweeps_leftovers(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2), make_ref(3))
    tier.remove([make_ref(3)])
    tier.close()
    home, shard = folder / MINE.id.hex(), path_of(folder, make_ref(1)).parent
    (folder / ".free").mkdir(exist_ok=True)
    (folder / ".free" / "7").write_bytes(b"half a chunk")
    (folder / ".dead-5" / "ab").mkdir(parents=True)
    (folder / ".dead-5" / "ab" / "old").write_bytes(b"x" * 5000)
    (home / "stray").write_bytes(b"x")
    (shard / "stray").write_bytes(b"x")
    (shard / path_of(folder, make_ref(1, 9)).name).write_bytes(b"too many blocks")
    (shard / path_of(folder, make_ref(4)).name).write_bytes(b"wrong shard")
    (shard / path_of(folder, make_ref(1, 4)).name).touch()
    (shard / path_of(folder, make_ref(1, 5)).name).mkdir()
    cut(path_of(folder, make_ref(2)))
    (folder / "not-ours").write_text("keep me")
    tier = open_tier()
    assert [ref for ref, _ in tier.scan()] == [make_ref(1)]
    assert tier.counters.swept == 9
    assert (folder / "not-ours").read_text() == "keep me"
    (folder / "not-ours").unlink()
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES


def test_lowered_capacity_drops_foreign_chunks_then_the_oldest(open_tier: Open, folder: Path) -> None:
    put(open_tier(OTHER), make_ref(7))
    tier = open_tier()
    put(tier, *(make_ref(number) for number in range(4)))
    for number in range(4):
        os.utime(path_of(folder, make_ref(number)), (100 * number,) * 2)
    tier = open_tier(capacity_bytes=2 * CHUNK_BYTES)
    assert [ref for ref, _ in tier.scan()] == [make_ref(2), make_ref(3)]
    assert tier.used_bytes == bytes_on_disk(folder) == 2 * CHUNK_BYTES
    assert not (folder / OTHER.id.hex()).exists()


def test_namespace_is_described(open_tier: Open, folder: Path) -> None:
    open_tier()
    text = (folder / MINE.id.hex() / "namespace.json").read_text()
    assert json.loads(text) == {"model": "mine"}


@pytest.mark.slow
def test_many_names(tmp_path: Path) -> None:
    tiny = KVLayout(page_bytes=(64,), planes=1, block_tokens=16, chunk_tokens=16)
    home = tmp_path / MINE.id.hex()
    for shard in range(256):
        (home / f"{shard:02x}").mkdir(parents=True)
    for number in range(2_000):
        ref = ChunkRef((number % 256).to_bytes(1, "little") + number.to_bytes(15, "little"), 1)
        fd = os.open(home / chunk_name(ref), os.O_CREAT | os.O_WRONLY)
        os.ftruncate(fd, 8192)
        os.close(fd)
    tier = DiskTier(tmp_path, MINE, tiny, 2_000 * 8192)
    assert len(tier.scan()) == 2_000
    assert tier.used_bytes == 2_000 * 8192
    tier.close()
