"""Slots in device memory, on a CPU device. Real devices: tests/conformance/test_gpu_streams.py."""

from __future__ import annotations

import weakref

import pytest
import torch

from kvstore.memory.slabs import DeviceSlots
from kvstore.model.errors import ConfigError
from kvstore.paged.streams import Streams

CPU = Streams(torch.device("cpu"))


def test_each_slot_has_its_own_bytes() -> None:
    slots = DeviceSlots(3, 4096, CPU)
    for number in range(3):
        with slots.using(number) as memory:
            assert (memory.shape, memory.dtype) == ((4096,), torch.uint8)
            memory.fill_(number)
    for number in range(3):
        with slots.using(number) as memory:
            assert (memory == number).all()


@pytest.mark.parametrize("num_slots", [2**50, 2**68])
def test_a_device_without_room(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=r"GiB of the memory of cpu: lower max_local_gpu_size, or"):
        DeviceSlots(num_slots, 4096, CPU)


def test_closed_slots_hold_no_memory() -> None:
    slots = DeviceSlots(2, 4096, CPU)
    pool = weakref.ref(slots._pool)
    slots.close()
    assert pool() is None


def test_opened_in_inference_mode_they_can_be_used_outside() -> None:
    with torch.inference_mode():  # engines like to start in this mode
        slots = DeviceSlots(1, 4096, CPU)
    with slots.using(0) as memory:
        memory.zero_()
    with torch.inference_mode(), slots.using(0) as memory:
        memory.fill_(1)
    with slots.using(0) as memory:
        assert (memory == 1).all()
