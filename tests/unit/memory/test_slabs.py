"""The pool of slots and the labels on them."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout
from kvstore.memory.pinning import NoPinner, find_pinner
from kvstore.memory.slabs import SlabPool

LAYOUT = KVLayout(page_bytes=(1024, 1024), planes=1, block_tokens=16, chunk_tokens=32)


def test_slots_are_aligned_apart_and_stay_where_they_are() -> None:
    pool = SlabPool(5, 3 * 4096)
    try:
        for number in range(5):
            slot = pool.slot(number)
            assert slot.dtype == np.uint8
            assert (slot.shape, slot.flags.writeable) == ((3 * 4096,), True)
            assert slot.ctypes.data % 4096 == 0
            assert pool.slot(number) is slot
            slot[:] = number
        assert all((pool.slot(number) == number).all() for number in range(5))
    finally:
        pool.close()


def test_populating_keeps_what_was_written() -> None:
    pool = SlabPool(64, 1 << 20)
    for number in range(64):
        pool.slot(number)[:8] = number + 1
    assert pool.wait_populated(60.0)
    assert [int(pool.slot(number)[0]) for number in range(64)] == list(range(1, 65))
    assert not pool.slot(63)[8:].any()  # fresh memory is zero
    pool.close()


def test_close_ends_populating_and_may_be_repeated() -> None:
    pool = SlabPool(2048, 1 << 20)  # 2 GiB of addresses, of which almost nothing is touched before the end
    slot = pool.slot(0)
    pool.close()
    pool.close()
    assert pool.wait_populated(0.0)
    slot[:] = 1  # views stay valid
    assert slot.all()


class FakePinner:
    """Remembers what is pinned; refuses from a given call on; waits before each piece until it is let go."""

    def __init__(self, refuse_from: int = 1000) -> None:
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self.gate = threading.Semaphore(1000)
        self.threads: set[str] = set()
        self._refuse_from = refuse_from
        self._lock = threading.Lock()

    def pin(self, address: int, num_bytes: int) -> str | None:
        assert self.gate.acquire(timeout=30.0)
        with self._lock:
            self.calls += 1
            self.threads.add(threading.current_thread().name)
            if self.calls >= self._refuse_from:
                return "no more"
            self.pinned[address] = num_bytes
            return None

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_pieces_are_whole_slots_and_cover_the_pool() -> None:
    pinner = FakePinner()
    pool = SlabPool(10, 12288, pinner=pinner, piece_bytes=3 * 12288 + 5000)
    assert pool.wait_populated(30.0)
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
    pool = SlabPool(3, 1 << 20, pinner=pinner, piece_bytes=4096)
    assert pool.wait_populated(30.0)
    assert set(pinner.pinned.values()) == {1 << 20}
    pool.close()


def test_a_slot_that_is_not_ready_works() -> None:
    pinner = FakePinner()
    pinner.gate = threading.Semaphore(0)
    pool = SlabPool(8, 4096, pinner=pinner, piece_bytes=2 * 4096)
    pool.slot(7)[:] = 7
    assert not pool.wait_populated(0.0)
    pinner.gate.release(4)
    assert pool.wait_populated(30.0)
    assert (pool.slot(7) == 7).all()
    pool.close()


def test_what_cannot_be_pinned_is_told_once_and_used(caplog: pytest.LogCaptureFixture) -> None:
    pinner = FakePinner(refuse_from=2)
    with caplog.at_level(logging.WARNING):
        pool = SlabPool(12, 4096, pinner=pinner, piece_bytes=4096)
        assert pool.wait_populated(30.0)
    assert [record.getMessage() for record in caplog.records] == [
        "cannot pin the CPU pool (no more): copies between it and the GPU are slower"
    ]
    assert pinner.calls <= 3  # each thread asks once more at most
    assert list(pinner.pinned.values()) == [4096]
    pool.slot(11)[:] = 1
    pool.close()
    assert not pinner.pinned


def test_close_unpins_what_was_pinned_so_far() -> None:
    pinner = FakePinner()
    pinner.gate = threading.Semaphore(3)
    pool = SlabPool(2000, 4096, pinner=pinner, piece_bytes=4096)
    closer = threading.Thread(target=pool.close)
    closer.start()
    pinner.gate.release(1000)
    closer.join(30.0)
    assert not closer.is_alive()
    assert not pinner.pinned


def test_without_cuda_nothing_is_pinned() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("CUDA is in use")
    assert isinstance(find_pinner(), NoPinner)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_slots_are_pinned_for_the_gpu() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    pool = SlabPool(8, 1 << 20, piece_bytes=2 << 20)
    assert pool.wait_populated(30.0)
    slots = [torch.from_numpy(pool.slot(number)) for number in range(8)]
    assert all(slot.is_pinned() for slot in slots)
    for number, slot in enumerate(slots):
        slot.copy_(torch.full((1 << 20,), number, dtype=torch.uint8, device="cuda"))
    assert [int(slot.sum()) for slot in slots] == [number << 20 for number in range(8)]
    pool.close()
    assert not slots[0].is_pinned()


@pytest.mark.parametrize(("slots", "size"), [(0, 4096), (-1, 4096), (1, 0), (1, 100), (1, 4097), (1, -4096)])
def test_impossible_pools(slots: int, size: int) -> None:
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        SlabPool(slots, size)


@pytest.mark.parametrize("slots", [2**46, 2**60, 2**80])
def test_absurd_pools(slots: int) -> None:
    with pytest.raises(ConfigError, match="lower max_local_cpu_size"):
        SlabPool(slots, 4096)
