"""The pool of slots and the labels on them."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.slabs import SlabPool
from kvstore.tiers.base import ChunkRef
from kvstore.tiers.cpu import CpuTier


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


@pytest.mark.parametrize(("slots", "size"), [(0, 4096), (-1, 4096), (1, 0), (1, 100), (1, 4097), (1, -4096)])
def test_impossible_pools(slots: int, size: int) -> None:
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        SlabPool(slots, size)


@pytest.mark.parametrize("slots", [2**46, 2**60, 2**80])
def test_absurd_pools(slots: int) -> None:
    with pytest.raises(ConfigError, match="lower max_local_cpu_size"):
        SlabPool(slots, 4096)


def test_a_slot_is_read_only_as_what_it_was_published_as() -> None:
    tier = CpuTier(SlabPool(2, 4096))
    one, other = ChunkRef(b"1" * 16, 1), ChunkRef(b"2" * 16, 1)
    assert tier.capacity_bytes == 8192
    assert tier.read(0, one) is None
    slot = tier.claim(0)
    assert tier.read(0, one) is None
    tier.publish(0, one)
    assert tier.read(0, one) is slot
    assert tier.read(0, other) is tier.read(1, one) is tier.read(0, ChunkRef(one.prefix_key, 2)) is None
    tier.claim(0)
    assert tier.read(0, one) is None
    tier.publish(0, other)
    tier.clear()
    assert tier.read(0, other) is None
    tier.close()
