"""The pool of slots and their labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvstore.memory import slabs
from kvstore.memory.mapped import map_bytes
from kvstore.memory.preparing import AT_START
from kvstore.memory.slabs import SlabPool
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ConfigError


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


@pytest.mark.parametrize("slot_pages", [1, 3, 16, 24])
def test_no_page_of_the_machine_is_in_two_pieces(slot_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines with pages of 64 KiB it would be pinned twice, which a driver refuses."""
    pages, page_bytes = list[tuple[int, int]](), 1 << 16
    monkeypatch.setattr(slabs, "mmap", SimpleNamespace(PAGESIZE=page_bytes))
    monkeypatch.setattr(slabs, "Preparation", lambda _memory, pieces, _pinner, _pace: pages.extend(pieces))
    slot_bytes = slot_pages * 4096
    SlabPool(100, slot_bytes, pace=replace(AT_START, piece_bytes=1 << 17))
    assert len(pages) > 1
    assert [begin for begin, _ in pages] == [0, *(end for _, end in pages[:-1])]
    assert pages[-1][1] == 100 * slot_bytes
    assert not any(begin % page_bytes or begin % slot_bytes for begin, _ in pages)


def flags_of(memory: ByteArray) -> set[str]:
    """Return the kernel's flags (``VmFlags``) of the mapping that holds the memory."""
    address, found = memory.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split(maxsplit=1)[0]
        if not word.endswith(":"):
            begin, end = (int(part, 16) for part in word.split("-"))
            found = begin <= address < end
        elif found and word == "VmFlags:":
            return set(line.split()[1:])
    raise LookupError(hex(address))


def test_a_forked_child_does_not_have_the_pool() -> None:
    pool, other = SlabPool(2, 1 << 20), map_bytes(2 << 20)  # the other as a cache server's, which processes share
    assert "dc" in flags_of(pool.slot(0))
    assert "dc" not in flags_of(other)
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_slots_are_pinned_for_the_gpu() -> None:
    device = torch.empty(1, device="cuda").device
    pool = SlabPool(8, 1 << 20, device, pace=replace(AT_START, piece_bytes=2 << 20))
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
