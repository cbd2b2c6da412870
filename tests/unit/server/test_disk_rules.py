"""Rules of the server's disk, one by one and without sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierTimeoutError
from kvstore.model.keys import EPOCH_FIELD, Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.disk import Disk
from kvstore.server.disk_tiers import DiskOptions, OpenTier
from kvstore.server.spaces import Chunk, Space
from kvstore.testing.harness import make_ref

LAYOUT = KVLayout((PAGE_BYTES // 2,), 1, 16, 64)  # a chunk of four blocks takes two pages
CHUNK_BYTES = 2 * PAGE_BYTES
ONE, TWO, THREE = make_ref(1, 4), make_ref(2, 4), make_ref(3, 4)
HANG_GUARD_S = 30.0
LATER_S = 1e9


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = open_disk(tmp_path / "disk")
    yield disk
    disk.close(HANG_GUARD_S)


def open_disk(folder: Path) -> Disk:
    """Open a disk with one thread for each kind of work, whose reports are carried out at once."""
    return Disk(DiskOptions(folder, 64 << 20, read_threads=1), lambda work: work())


def chunk_of(ref: ChunkRef, namespace: Namespace | None = None) -> Chunk:
    return Chunk(Space(namespace or Namespace({"model": "mine"}), LAYOUT), ref)


def written(disk: Disk, chunk: Chunk, parts: Sequence[np.ndarray]) -> int | None:
    sizes: Future[int | None] = Future()
    disk.write(chunk, parts, sizes.set_result)
    return sizes.result(HANG_GUARD_S)


def read(disk: Disk, chunk: Chunk, parts: Sequence[np.ndarray]) -> Outcome:
    outcomes: Future[Outcome] = Future()
    freed = threading.Event()
    disk.read(chunk, parts, outcomes.set_result, freed.set)
    outcome = outcomes.result(HANG_GUARD_S)
    assert freed.wait(HANG_GUARD_S)
    return outcome


def tier_of(disk: Disk, chunk: Chunk) -> OpenTier:
    opened = disk._tiers._entries[chunk.space.id].opened
    assert opened is not None
    return opened


def payload(parts: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, CHUNK_BYTES // parts, np.uint8) for _ in range(parts)]


@pytest.mark.parametrize(("there", "back"), [(1, 2), (2, 1), (2, 2)])
def test_a_chunk_in_several_runs_comes_back(disk: Disk, there: int, back: int) -> None:
    chunk, sent = chunk_of(ONE), payload(there)
    assert written(disk, chunk, sent) is not None
    found = [np.zeros(CHUNK_BYTES // back, np.uint8) for _ in range(back)]
    assert read(disk, chunk, found) is Outcome.HIT
    assert np.array_equal(np.concatenate(found), np.concatenate(sent))


def test_what_went_while_it_waited_for_the_disk_is_not_written(disk: Disk) -> None:
    chunk = chunk_of(ONE)
    chunk.is_dropped = True
    assert written(disk, chunk, payload(1)) is None
    assert read(disk, chunk_of(ONE), payload(1)) is Outcome.MISS


def test_works_on_one_file_end_in_their_order(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal of an older version, after the write of a newer one, would delete the newer one."""
    chunk, order = chunk_of(ONE), []
    assert written(disk, chunk, payload(1)) is not None
    opened = tier_of(disk, chunk)
    began, goes_on, removed = threading.Event(), threading.Event(), threading.Event()
    real_put, real_remove = opened.raw.put, opened.raw.remove

    def put(transfers: Any) -> Any:
        began.set()
        assert goes_on.wait(HANG_GUARD_S)
        order.append("put")
        return real_put(transfers)

    def remove(refs: Any) -> None:
        order.append("remove")
        real_remove(refs)
        removed.set()

    monkeypatch.setattr(opened.raw, "put", put)
    monkeypatch.setattr(opened.raw, "remove", remove)
    disk.write(chunk, payload(1), lambda _: None)
    assert began.wait(HANG_GUARD_S)
    disk.remove([(chunk.space, chunk.ref)])
    threads = disk._writers.submit(lambda: None)  # behind the removal, if that did not wait
    threads.result(HANG_GUARD_S)
    goes_on.set()
    assert removed.wait(HANG_GUARD_S)
    assert order == ["put", "remove"]


def test_a_buffer_that_a_hung_read_may_write_to_is_not_used_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, pending, buffers = chunk_of(ONE), Future[Any](), []
    assert written(disk, chunk, payload(1)) is not None
    opened = tier_of(disk, chunk)

    def get(transfers: Any) -> Any:
        buffers.append(transfers[0].buffer)
        raise TierTimeoutError("hangs", pending)

    monkeypatch.setattr(opened.tier, "get", get)
    outcomes = [Future[Outcome]() for _ in range(2)]
    freed: list[int] = []
    for outcome in outcomes:
        disk.read(chunk, [np.zeros(PAGE_BYTES, np.uint8)] * 2, outcome.set_result, lambda: freed.append(1))
        assert outcome.result(HANG_GUARD_S) is Outcome.FAILED
    assert not np.shares_memory(*buffers)
    assert not freed, "nor are the pages given away"
    pending.set_result(None)
    assert len(freed) == 2


def test_an_error_that_nobody_foresaw_leaves_the_file_to_the_next(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = chunk_of(ONE)
    assert written(disk, chunk, payload(1)) is not None
    with monkeypatch.context() as patch:
        patch.setattr(tier_of(disk, chunk).tier, "put", Mock(side_effect=RuntimeError("a bug")))
        assert written(disk, chunk, payload(1)) is None
    assert "RuntimeError: a bug" in caplog.text
    assert written(disk, chunk, payload(1)) is not None


def test_chunks_of_past_epochs_are_not_found_at_start(tmp_path: Path) -> None:
    spaces = [Namespace({"model": "mine"}), Namespace({"model": "mine", EPOCH_FIELD: "1"})]
    disk = open_disk(tmp_path / "disk")
    for namespace in spaces:
        assert written(disk, chunk_of(ONE, namespace), payload(1)) is not None
    disk.close(HANG_GUARD_S)
    again = open_disk(tmp_path / "disk")
    assert [former.space.namespace for former in again.open_all()] == spaces[:1]
    again.close(HANG_GUARD_S)
    assert len([path for path in (tmp_path / "disk").iterdir() if len(path.name) == 16]) == 1
