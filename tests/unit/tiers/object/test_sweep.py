"""Tests of sweeps: the bound, the order of removal, garbage, orphans, compaction, and the lock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.diskwork import EVEN, MINE, get, make_ref, make_transfer, put

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.object import journal, log
from kvstore.tiers.object import sweep as sweeping
from kvstore.tiers.object.folder import FolderStore
from kvstore.tiers.object.names import LOCK_NAME, parse_place, probe_name
from kvstore.tiers.object.sweep import Limits, SweepReport, sweep
from kvstore.tiers.object.tier import ObjectTier

CHUNK_BYTES = 4096 + EVEN.payload_bytes(8)
REFS = [make_ref(number) for number in range(20)]
Open = Callable[[], ObjectTier]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    monkeypatch.setattr(sweeping, "_LATE_S", -2.0)
    monkeypatch.setattr(sweeping, "MANIFESTS_STAY_S", -2.0)
    monkeypatch.setattr(log, "EVERY_S", 0.02)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(root: Path) -> FolderStore:
    return FolderStore(root)


@pytest.fixture
def open_tier(root: Path) -> Iterator[Open]:
    opened: list[ObjectTier] = []

    def open_one() -> ObjectTier:
        setup = TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": f"file://{root}", "timeout_s": 2.0})
        opened.append(ObjectTier.open(setup))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def names(store: FolderStore) -> list[str]:
    return sorted(listed.name for listed in store.list(""))


def chunks(store: FolderStore) -> set[ChunkRef]:
    return {place.ref for name in names(store) if (place := parse_place(name)) is not None}


def age(root: Path, store: FolderStore, refs: list[ChunkRef], seconds: float) -> None:
    """Let chunks look as if they were written some time ago."""
    for name in names(store):
        place = parse_place(name)
        if place is not None and place.ref in refs:
            os.utime(root / name, (time.time() - seconds,) * 2)


def are_there(tier: ObjectTier, refs: list[ChunkRef]) -> bool:
    return all(tier.contains(refs))


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def filled(open_tier: Open, monkeypatch: pytest.MonkeyPatch, old: list[ChunkRef], days: float) -> None:
    """Store all chunks, some of them as if days ago."""
    now_s = time.time
    for refs, ago_s in ((old, days * 86_400), ([ref for ref in REFS if ref not in old], 0.0)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda ago_s=ago_s: now_s() - ago_s)
            tier = open_tier()
            assert set(put(tier, *refs)) <= {Outcome.STORED}
            tier.close()


def test_those_used_longest_ago_leave(
    open_tier: Open, root: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is kept; running engines and new ones find the rest, and miss the others without an error."""
    old = REFS[3:9]
    filled(open_tier, monkeypatch, old, 2.0)
    age(root, store, old, 2 * 86_400)
    running = open_tier()
    assert all(running.contains(REFS))
    report = sweep(store, Limits(max_bytes=14 * CHUNK_BYTES))
    assert replace(report, manifests=0) == SweepReport(20, 20 * CHUNK_BYTES, 6, 6 * CHUNK_BYTES)
    assert chunks(store) == set(REFS) - set(old)
    wait_until(lambda: not any(running.contains(old)))
    for tier in (running, open_tier()):
        assert tier.contains(REFS) == [ref not in old for ref in REFS]
        assert [get(tier, ref) for ref in REFS] == [Outcome.MISS if ref in old else Outcome.HIT for ref in REFS]
    assert sweep(store, Limits(max_bytes=14 * CHUNK_BYTES)).removed_chunks == 0


@pytest.mark.parametrize(("ends_after", "stay"), [(5, (0, 1, 2)), (3, (0, 3, 4)), (1, (1, 2, 3))])
def test_of_one_prompt_the_tail_leaves_first(
    open_tier: Open,
    root: Path,
    store: FolderStore,
    monkeypatch: pytest.MonkeyPatch,
    ends_after: int,
    stay: tuple[int, ...],
) -> None:
    """Chunks stored one after the other within minutes are a prompt, of which the head is worth more."""
    end_s = (time.time() // sweeping._SESSION_S - 1) * sweeping._SESSION_S
    stored_s = [end_s - ends_after + number for number in range(5)]
    for ref, at_s in zip(REFS, stored_s, strict=False):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda at_s=at_s: at_s)
            tier = open_tier()
            put(tier, ref)
            tier.close()
        (name,) = (name for name in names(store) if (place := parse_place(name)) is not None and place.ref == ref)
        os.utime(root / name, (at_s, at_s))
    sweep(store, Limits(max_bytes=3 * CHUNK_BYTES))
    assert chunks(store) == {REFS[number] for number in stay}


def test_use_keeps_a_chunk(open_tier: Open, root: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is told in a manifest, if the last one was some time ago."""
    filled(open_tier, monkeypatch, REFS, 2.0)
    age(root, store, REFS, 2 * 86_400)
    tier = open_tier()
    assert get(tier, REFS[7]) is Outcome.HIT
    tier.close()
    assert sweep(store, Limits(max_age_s=86_400)).removed_chunks == 19
    assert chunks(store) == {REFS[7]}


def test_a_dry_run_changes_nothing(open_tier: Open, store: FolderStore) -> None:
    put(open_tier(), *REFS)
    wait_until(partial(are_there, open_tier(), REFS))
    before = names(store)
    report = sweep(store, Limits(max_bytes=0), dry_run=True)
    assert (report.removed_chunks, report.is_dry) == (20, True)
    assert names(store) == before


def test_chunks_that_no_manifest_names_are_found(open_tier: Open, store: FolderStore) -> None:
    """An engine was killed before it wrote its manifest."""
    tier = open_tier()
    put(tier, *REFS)
    tier.close()
    store.delete(name for name in names(store) if "/log/" in name)
    running = open_tier()
    assert not any(running.contains(REFS))
    assert sweep(store, Limits()).found_chunks == 20
    wait_until(partial(are_there, running, REFS))
    tier = open_tier()
    assert all(tier.contains(REFS))
    assert get(tier, REFS[0]) is Outcome.HIT
    assert sweep(store, Limits()).found_chunks == 0


def test_what_a_base_contains_is_not_read_again(
    open_tier: Open, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk was removed, then stored again by an engine that was killed: the sweep's word is the later one."""
    monkeypatch.setattr(sweeping, "MANIFESTS_STAY_S", 1000.0)
    tier = open_tier()
    put(tier, *REFS)
    tier.close()
    tier = open_tier()
    tier.remove(REFS[:5])
    tier.close()
    before = {name for name in names(store) if "/log/" in name}
    tier = open_tier()
    put(tier, *REFS[:5])
    tier.close()
    store.delete(name for name in names(store) if "/log/" in name and name not in before)
    assert sweep(store, Limits()).found_chunks == 5
    assert before <= set(names(store)), "engines that run may not have read them yet"
    store.delete(name for name in names(store) if "/log/" in name and name not in before)  # what the sweep said besides
    for _ in range(3):
        assert all(open_tier().contains(REFS))
        report = sweep(store, Limits())
        assert (report.found_chunks, report.lost_chunks) == (0, 0)
    monkeypatch.setattr(sweeping, "MANIFESTS_STAY_S", -2.0)
    sweep(store, Limits())
    assert not [name for name in names(store) if "/log/" in name]
    assert all(open_tier().contains(REFS))


def test_chunks_that_are_gone_are_named_no_more(open_tier: Open, store: FolderStore) -> None:
    """A lifecycle rule of the bucket has removed them."""
    tier = open_tier()
    put(tier, *REFS)
    tier.close()
    gone = [name for name in names(store) if (place := parse_place(name)) and place.ref in REFS[:4]]
    store.delete(gone)
    assert all(open_tier().contains(REFS))
    assert sweep(store, Limits()).lost_chunks == 4
    assert open_tier().contains(REFS) == [False] * 4 + [True] * 16


def test_garbage_of_a_clear_and_of_a_writer_that_was_killed(open_tier: Open, root: Path, store: FolderStore) -> None:
    tier = open_tier()
    put(tier, *REFS)
    tier.close()
    (epoch,) = [name for name in names(store) if name.endswith("/epoch")]
    store.write(epoch, b"0123456789abcdef")  # a clear that was killed after this
    part = root / ".part" / ("a" * 32)
    part.write_bytes(b"x" * 100)
    fresh = root / ".part" / ("b" * 32)
    fresh.write_bytes(b"x")
    old, new = probe_name(), probe_name()
    for name in (old, new, "probe/a-strangers"):
        store.write(name, b"kvstore")
    for path in (part, root / old, root / "probe" / "a-strangers"):
        os.utime(path, (time.time() - 7200,) * 2)
    tier = open_tier()
    assert not any(tier.contains(REFS))
    put(tier, REFS[0])
    report = sweep(store, Limits())
    assert report.chunks == 1
    assert report.garbage_objects >= 23, "20 chunks, a manifest, a part, and a probe of a doctor that was killed"
    assert chunks(store) == {REFS[0]}
    assert not part.exists()
    assert fresh.exists()
    assert {name for name in names(store) if name.startswith("probe/")} == {new, "probe/a-strangers"}


def test_manifests_become_one(open_tier: Open, store: FolderStore) -> None:
    """All chunks and their trails are found by the base alone; later manifests count as well."""
    trail = b"".join(bytes([number]) * PREFIX_KEY_BYTES for number in range(8))
    ref = ChunkRef(trail[-PREFIX_KEY_BYTES:], 8)
    first = open_tier()
    for _ in range(5):
        put(first, *REFS)
    first.put([make_transfer(ref)._replace(trail=trail)])
    first.close()
    sweep(store, Limits())
    assert not [name for name in names(store) if "/log/" in name]
    assert len([name for name in names(store) if "/base/" in name]) == 1
    tier = open_tier()
    assert all(tier.contains([*REFS, ref]))
    assert tier.nearest([trail[: 3 * PREFIX_KEY_BYTES]]) == [(trail,)]
    other = make_ref(99)
    put(tier, other)
    tier.close()
    assert all(open_tier().contains([*REFS, other]))
    sweep(store, Limits())
    assert all(open_tier().contains([*REFS, other]))
    assert open_tier().nearest([trail[: 3 * PREFIX_KEY_BYTES]]) == [(trail,)]


def test_an_engine_leaves_few_manifests(open_tier: Open, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small ones become one, without a sweep; nothing that a sweep has removed comes back by it."""
    monkeypatch.setattr(journal, "MAX_SMALL", 4)
    tier, reader = open_tier(), open_tier()
    for number, ref in enumerate(REFS):
        put(tier, ref)
        wait_until(partial(are_there, reader, REFS[: number + 1]))
        if number == 9:
            sweep(store, Limits(max_bytes=0))
            wait_until(lambda: not any(tier.contains(REFS)))
            break
    for ref in REFS[10:]:
        put(tier, ref)
        wait_until(partial(are_there, reader, [ref]))
    assert len([name for name in names(store) if "/log/" in name]) <= 8
    assert open_tier().contains(REFS) == [False] * 10 + [True] * 10


def test_one_sweep_at_a_time(store: FolderStore, open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused, unless the first shows no sign of life; that one notices, should it go on."""
    put(open_tier(), *REFS)
    with sweeping._locked(store):
        with pytest.raises(ConfigError, match="another sweep"):
            sweep(store, Limits())
        assert sweep(store, Limits(), dry_run=True).chunks == 20
    sweep(store, Limits())
    assert LOCK_NAME not in names(store)
    store.write(LOCK_NAME, b"nonsense")
    sweep(store, Limits())
    monkeypatch.setattr(sweeping, "LOCKED_S", -1.0)
    with sweeping._locked(store) as renew:
        sweep(store, Limits())
        with pytest.raises(TierError, match="taken over"):
            renew()


@pytest.mark.parametrize("ends_at", ["announced", "deleted", "written"])
def test_a_sweep_that_is_killed(
    open_tier: Open, store: FolderStore, monkeypatch: pytest.MonkeyPatch, ends_at: str
) -> None:
    """Wherever it ends, chunks are right or missing, and the next sweep does the rest."""
    put(open_tier(), *REFS)
    wait_until(partial(are_there, open_tier(), REFS))  # a later manifest would name what the sweep removes

    class KilledError(Exception):
        pass

    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        if ends_at == "announced":
            patch.setattr(time, "sleep", killed)
        elif ends_at == "deleted":
            patch.setattr(sweeping._Sweep, "_compact", killed)
        else:
            patch.setattr(sweeping, "stamp_at", killed)  # what follows the base
        with pytest.raises(KilledError):
            sweep(store, Limits(max_bytes=10 * CHUNK_BYTES))
    tier = open_tier()
    for ref in REFS:
        assert get(tier, ref) in (Outcome.HIT, Outcome.MISS)
    monkeypatch.setattr(sweeping, "LOCKED_S", -1.0)
    sweep(store, Limits(max_bytes=10 * CHUNK_BYTES))
    tier = open_tier()
    assert sum(tier.contains(REFS)) == len(chunks(store)) == 10
    assert all(get(tier, ref) is Outcome.HIT for ref in chunks(store))
