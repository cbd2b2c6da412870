"""Tests of calls that overtake each other, each held at its worst moment by a store that waits there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.diskwork import EVEN, MINE, get, make_ref, make_slot, make_transfer, put

from kvstore.format.wholeio import write_whole
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.base import Transfer
from kvstore.tiers.object import log
from kvstore.tiers.object.folder import FolderStore
from kvstore.tiers.object.store import Body, FullError, Reading
from kvstore.tiers.object.tier import ObjectTier

A, B = make_ref(1), make_ref(2)


class HeldStore(FolderStore):
    """Folder whose calls can be held, before or after they touch it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        self.is_full = False

    def put(self, name: str, body: Body) -> None:
        if self.is_full:
            raise FullError("no room")
        is_chunk = name.endswith(".safetensors")
        self._run(self.before, "put", is_chunk)
        super().put(name, body)
        self._run(self.after, "put", is_chunk)

    @contextmanager
    def open(
        self, name: str, offset: int = 0, num_bytes: int | None = None, version: str = ""
    ) -> Iterator[Reading | None]:
        self._run(self.before, "open", True)
        with super().open(name, offset, num_bytes, version) as reading:
            yield reading
        self._run(self.after, "open", True)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        found = super().read(name, most_bytes)
        self._run(self.after, "read", name.endswith("/epoch"))
        return found

    @staticmethod
    def _run(hooks: dict[str, Callable[[], object]], call: str, is_wanted: bool) -> None:
        if is_wanted and (hook := hooks.pop(call, None)) is not None:
            hook()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldStore:
    monkeypatch.setattr(log, "EVERY_S", 0.02)
    return HeldStore(tmp_path / "kv")


@pytest.fixture
def tier(store: HeldStore) -> Iterator[ObjectTier]:
    tier = ObjectTier(store, MINE, EVEN, 5.0)
    tier.check()
    yield tier
    tier.close()


def chunk_files(store: HeldStore) -> list[str]:
    return [listed.name for listed in store.list("") if listed.name.endswith(".safetensors")]


def test_a_removal_during_a_put(tier: ObjectTier, store: HeldStore) -> None:
    """It counts as the later one: nothing is found, and nothing stays."""
    store.after["put"] = lambda: tier.remove([A])
    assert put(tier, A) == [Outcome.FAILED]
    assert tier.contains([A]) == [False]
    assert chunk_files(store) == []
    assert put(tier, A) == [Outcome.STORED]
    assert get(tier, A) is Outcome.HIT


def test_a_clear_during_a_put(tier: ObjectTier, store: HeldStore) -> None:
    for when in (store.before, store.after):
        when["put"] = tier.clear
        assert put(tier, A) == [Outcome.FAILED]
        assert tier.contains([A]) == [False]
        assert chunk_files(store) == []


def test_two_puts_at_once(tier: ObjectTier, store: HeldStore) -> None:
    """The second fails, so a removal knows which call it must undo."""
    inner: list[Outcome] = []
    store.before["put"] = lambda: inner.extend(put(tier, A))
    assert put(tier, A) == [Outcome.STORED]
    assert inner == [Outcome.FAILED]


def test_a_clear_during_a_get(tier: ObjectTier, store: HeldStore) -> None:
    put(tier, A)
    store.after["open"] = tier.clear
    assert get(tier, A) is Outcome.MISS


def test_a_miss_during_a_put(tier: ObjectTier, store: HeldStore) -> None:
    """An object was missing when it was read, and was stored again before the miss is noted: it is read again."""
    put(tier, A)
    (name,) = chunk_files(store)
    store.delete([name])
    store.after["open"] = lambda: put(tier, A)
    assert get(tier, A) is Outcome.HIT
    assert tier.contains([A]) == [True]


def test_a_look_that_a_clear_overtakes(tier: ObjectTier, store: HeldStore) -> None:
    """The look had read the old epoch; its view is not taken up."""
    put(tier, A)
    is_held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        goes_on.wait(5.0)

    store.after["read"] = hold
    assert is_held.wait(5.0)
    tier.clear()
    put(tier, B)
    goes_on.set()
    for _ in range(20):
        assert tier.contains([A, B]) == [False, True]
        threading.Event().wait(0.01)
    assert get(tier, B) is Outcome.HIT


def test_a_manifest_that_cannot_be_written_is_written_later(store: HeldStore, tmp_path: Path) -> None:
    """While the storage is full, its chunks are found and read; other engines learn of the rest afterwards."""
    one, other = ObjectTier(store, MINE, EVEN, 5.0), ObjectTier(FolderStore(tmp_path / "kv"), MINE, EVEN, 5.0)
    one.check()
    store.after["put"] = lambda: setattr(store, "is_full", True)
    assert put(one, A) == [Outcome.STORED]
    assert put(one, B) == [Outcome.FULL]
    threading.Event().wait(0.2)
    assert one.contains([A, B]) == [True, False]
    assert get(one, A) is Outcome.HIT
    assert other.contains([A]) == [False]
    store.is_full = False
    for _ in range(500):
        if other.contains([A]) == [True]:
            break
        threading.Event().wait(0.01)
    assert get(other, A) is Outcome.HIT
    one.close()
    other.close()


def test_layers_of_a_chunk_that_was_replaced(tier: ObjectTier, store: HeldStore) -> None:
    """Later layers are of another write, so they are no hit, although their checksums are right."""
    put(tier, A)
    slot = make_slot()
    assert tier.get_layers([Transfer(A, slot)], range(1)) == [Outcome.HIT]
    other = ObjectTier(FolderStore(store._root), MINE, EVEN, 5.0)
    assert other.put([replaced(A)]) == [Outcome.STORED]
    other.close()
    assert tier.get_layers([Transfer(A, slot)], range(1, 2)) == [Outcome.MISS]
    assert tier.counters.corrupt == 0


def replaced(ref: ChunkRef) -> Transfer:
    transfer = make_transfer(ref)
    buffer: ByteArray = transfer.buffer
    buffer ^= 1
    return transfer


def test_a_writer_that_is_killed_leaves_no_part(
    tier: ObjectTier, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has its name only when it is whole."""
    from kvstore.tiers.object import folder

    def killed(fd: int, views: Sequence[memoryview], offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            write_whole(fd, views, offset)
            return
        os.write(fd, bytes(views[0])[:1000])
        raise KeyboardInterrupt

    put(tier, B)
    before = chunk_files(store)
    monkeypatch.setattr(folder, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        put(tier, A)
    assert chunk_files(store) == before


def test_a_store_that_fails_after_a_put_said_so(tier: ObjectTier, store: HeldStore) -> None:
    """A put whose answer was lost counts as failed; the chunk is no hit, and may be stored again."""

    def fail() -> None:
        raise TierError("the connection was cut")

    store.after["put"] = fail
    with pytest.raises(TierError):
        put(tier, A)
    assert tier.contains([A]) == [False]
    assert put(tier, A) == [Outcome.STORED]
    assert get(tier, A) is Outcome.HIT


def test_all_tiers_of_a_process_learn_of_removals_at_once(store: HeldStore, tier: ObjectTier, monkeypatch: Any) -> None:
    """An engine asks another tier than it removes from, and must not be told what it has just removed."""
    monkeypatch.setattr(log, "EVERY_S", 1000.0)
    put(tier, A, B)
    for known in (A, B):
        tier._log.view().journal.write()
        asked = ObjectTier(FolderStore(store._root), MINE, EVEN, 5.0)
        assert asked.contains([known]) == [True]
        if known is A:
            tier.remove([A])
        else:
            tier.clear()
        assert asked.contains([known]) == [False]
        asked.close()
