"""Pinning of the pool: its time, and its effect on the capture of CUDA graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_cuda import FakeCuda

from kvstore.adapters.vllm.worker.worker import StoreWorker
from kvstore.engine.options import EngineOptions
from kvstore.memory import preparing, slabs
from kvstore.memory.pinning import CudaPinner, Pinner, Refusal
from kvstore.memory.preparing import AT_START, IN_BACKGROUND, UNPINNED, Pace, pace_for
from kvstore.memory.slabs import SlabPool
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv

GPU = torch.device("cuda", 0)
HANG_GUARD_S = 30.0
FULL = Refusal("no more")
START = replace(AT_START, threads=2, piece_bytes=4096)
BEHIND = replace(IN_BACKGROUND, piece_bytes=4096, pause_s=0.0, retry_s=0.001)


class FakePinner:
    """Pinner that records calls, refuses from a given call on, and waits before each piece until it is released."""

    is_safe_during_captures = True

    def __init__(self, refuse_from: int = 100_000, refusal: Refusal = FULL) -> None:
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self.gate = threading.Semaphore(100_000)
        self.threads: set[str] = set()
        self.is_called = threading.Event()
        self._refuse_from = refuse_from
        self._refusal = refusal
        self._lock = threading.Lock()

    def pin(self, address: int, num_bytes: int) -> Refusal | None:
        self.is_called.set()
        assert self.gate.acquire(timeout=HANG_GUARD_S)
        with self._lock:
            self.calls += 1
            self.threads.add(threading.current_thread().name)
            if self.calls >= self._refuse_from:
                return self._refusal
            self.pinned[address] = num_bytes
            return None

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the log messages, each as soon as it is emitted."""
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    ours = logging.getLogger("kvstore")
    ours.addHandler(handler)
    with caplog.at_level(logging.INFO, "kvstore"):
        yield said
    ours.removeHandler(handler)


def test_pieces_are_whole_slots_and_cover_the_pool() -> None:
    pinner = FakePinner()
    pool = SlabPool(10, 12288, pinner=pinner, pace=replace(START, piece_bytes=3 * 12288 + 5000))
    base = pool.slot(0).ctypes.data
    assert {address - base: size for address, size in pinner.pinned.items()} == {
        piece * 3 * 12288: (3 if piece < 3 else 1) * 12288 for piece in range(4)
    }
    assert pinner.threads == {"kvstore-populate-0", "kvstore-populate-1"}
    pool.close()
    assert not pinner.pinned
    pool.close()


def test_a_slot_larger_than_a_piece() -> None:
    pinner = FakePinner()
    pool = SlabPool(3, 1 << 20, pinner=pinner, pace=START)
    assert set(pinner.pinned.values()) == {1 << 20}
    pool.close()


def test_a_slot_that_is_not_ready_works() -> None:
    pinner = FakePinner()
    pinner.gate = threading.Semaphore(0)
    pool = SlabPool(8, 4096, pinner=pinner, pace=replace(BEHIND, piece_bytes=2 * 4096))
    pool.slot(7)[:] = 7
    assert not pool.wait_populated(0.0)
    pinner.gate.release(4)
    assert pool.wait_populated(HANG_GUARD_S)
    assert (pool.slot(7) == 7).all()
    pool.close()


@pytest.mark.parametrize("pace", [START, BEHIND])
def test_what_cannot_be_pinned_is_told_once_and_used(pace: Pace, lines: list[str]) -> None:
    pinner = FakePinner(refuse_from=2)
    pool = SlabPool(12, 4096, pinner=pinner, pace=pace)
    assert pool.wait_populated(HANG_GUARD_S)
    assert lines == ["cannot pin the CPU pool (no more): copies between it and the GPU are slower"]
    assert pinner.calls <= 3  # each thread asks once more at most
    assert list(pinner.pinned.values()) == [4096]
    pool.slot(11)[:] = 1
    pool.close()
    assert not pinner.pinned


def test_close_unpins_what_was_pinned_so_far() -> None:
    pinner = FakePinner()
    pinner.gate = threading.Semaphore(3)
    pool = SlabPool(2000, 4096, pinner=pinner, pace=BEHIND)
    closer = threading.Thread(target=pool.close)
    closer.start()
    pinner.gate.release(10_000)
    closer.join(HANG_GUARD_S)
    assert not closer.is_alive()
    assert not pinner.pinned


def test_all_is_pinned_before_the_start_goes_on(lines: list[str]) -> None:
    pinner = FakePinner()
    pool = SlabPool(100, 4096, pinner=pinner)
    called = pinner.calls  # from here on graphs may be captured
    assert sum(pinner.pinned.values()) == 100 * 4096
    assert pool.wait_populated(HANG_GUARD_S)
    assert pinner.calls == called
    assert [line.rpartition(" in ")[0] for line in lines] == ["pinned 0.00 GiB of host memory for the GPU"]
    pool.close()


def test_a_worker_pins_its_pool_before_it_registers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As soon as the worker is made, vLLM captures graphs."""
    pinner = FakePinner()
    monkeypatch.setattr(slabs, "find_pinner", lambda device: pinner)
    cache = torch.zeros(16, 1, 4, 2, dtype=torch.int64)
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    worker = StoreWorker(paged, Namespace({"model": "one"}), EngineOptions(64 * 4096))
    called = pinner.calls
    assert sum(pinner.pinned.values()) == 64 * 4096
    worker.close()
    assert pinner.calls == called
    assert not pinner.pinned


def test_the_start_tells_once_how_far_it_is(lines: list[str]) -> None:
    pool = SlabPool(6, 4096, pinner=FakePinner(), pace=replace(START, threads=1, logged_after_s=0.0))
    assert [line.split(" GiB")[0] for line in lines] == ["pinning 0.00", "pinned 0.00"]
    pool.close()


def test_a_driver_that_does_not_answer_does_not_hold_up_the_start(lines: list[str]) -> None:
    pinner = FakePinner()
    pinner.gate = threading.Semaphore(3)
    pool = SlabPool(100, 4096, pinner=pinner, pace=replace(START, stall_s=0.2))
    assert lines == ["cannot pin the CPU pool (nothing was pinned for 0.2 s): copies between it and the GPU are slower"]
    called = pinner.calls
    pinner.gate.release(100)
    assert pool.wait_populated(HANG_GUARD_S)
    assert pinner.calls <= called + START.threads  # those that hung
    pool.close()
    assert not pinner.pinned


def test_a_driver_that_does_not_answer_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(preparing, "_CLOSE_S", 0.1)
    pinner = FakePinner()
    pinner.gate = threading.Semaphore(0)
    pool = SlabPool(4, 4096, pinner=pinner, pace=BEHIND)
    assert pinner.is_called.wait(HANG_GUARD_S)
    pool.close()
    assert lines == ["memory stays pinned: the driver has not answered for 0 s"]
    pinner.gate.release(100)
    assert pool.wait_populated(HANG_GUARD_S)
    pool.close()
    assert not pinner.pinned


class TestBesideACapture:
    """Pinning of the pool in the background, while a thread captures graphs."""

    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        cuda = FakeCuda()
        cuda.install(monkeypatch)
        return cuda

    @pytest.mark.parametrize("hangs", [False, True])
    def test_it_is_pinned_and_the_capture_stays_whole(self, cuda: FakeCuda, hangs: bool, lines: list[str]) -> None:
        cuda.capturing, cuda.hangs = True, hangs
        pool = SlabPool(20, 4096, pinner=CudaPinner(GPU, cuda.runtime()), pace=BEHIND)
        assert pool.wait_populated(HANG_GUARD_S)
        assert (len(cuda.registered), cuda.broken) == (20, 0)
        assert [line.rpartition(" in ")[0] for line in lines] == ["pinned 0.00 GiB of host memory for the GPU"]
        pool.close()
        assert not cuda.registered

    @pytest.mark.parametrize("hangs", [False, True])
    def test_it_is_pinned_at_start_where_that_cannot_be(self, cuda: FakeCuda, hangs: bool, lines: list[str]) -> None:
        cuda.hangs = hangs
        pool = SlabPool(20, 4096, GPU, pin_in_background=True, pinner=CudaPinner(GPU, None))
        cuda.capturing = True
        assert sum(cuda.registered.values()) == 20 * 4096
        assert pool.wait_populated(HANG_GUARD_S)
        assert lines[0] == (
            "the CPU pool is pinned at start: the CUDA runtime was not found, so it cannot be done later"
        )
        cuda.end_capture()
        pool.close()
        assert cuda.broken == 0

    def test_refusals_that_pass_are_waited_for(self, cuda: FakeCuda, lines: list[str]) -> None:
        left = threading.Semaphore(5)

        class Refused(CudaPinner):
            def pin(self, address: int, num_bytes: int) -> Refusal | None:
                return Refusal("a capture", may_pass=True) if left.acquire(blocking=False) else super().pin(address, 1)

        pool = SlabPool(20, 4096, pinner=Refused(GPU, cuda.runtime()), pace=BEHIND)
        assert pool.wait_populated(HANG_GUARD_S)
        assert len(cuda.registered) == 20
        assert len(lines) == 1
        pool.close()

    def test_a_capture_that_does_not_end_is_told_once(self, lines: list[str]) -> None:
        pinner = FakePinner(refuse_from=1, refusal=Refusal("error 900", may_pass=True))
        pool = SlabPool(20, 4096, pinner=pinner, pace=replace(BEHIND, tries=3))
        assert pool.wait_populated(HANG_GUARD_S)
        assert lines == ["cannot pin the CPU pool (error 900): copies between it and the GPU are slower"]
        assert pinner.calls <= 6  # three tries of each thread
        pool.close()


def test_when_and_in_which_pieces_memory_is_pinned() -> None:
    pinner: Pinner = FakePinner()
    assert pace_for(None, in_background=True) is UNPINNED
    assert pace_for(pinner, in_background=False) is AT_START
    assert pace_for(pinner, in_background=True) is IN_BACKGROUND
    assert AT_START.waits
    assert not IN_BACKGROUND.waits
    assert not UNPINNED.waits
    assert 16 << 20 <= IN_BACKGROUND.piece_bytes <= 64 << 20
    assert IN_BACKGROUND.pause_s > 0
    assert 1 <= AT_START.threads <= 8
    assert AT_START.tries * AT_START.retry_s < AT_START.stall_s
