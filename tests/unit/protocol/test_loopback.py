"""Sizes of the kernel's socket buffers, which are small for programs on this machine."""

from __future__ import annotations

import pytest

from kvstore.protocol.loopback import buffer_bytes


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5566", "tcp://127.0.0.5:0", "tcp://[::1]:5566", "tcp://localhost:1"]
)
def test_little_is_held_by_the_kernel_on_loopback(address: str) -> None:
    assert 0 < buffer_bytes(address) < 256 << 10


@pytest.mark.parametrize(
    "address",
    ["tcp://10.0.0.1:5566", "tcp://[fe80::1]:5566", "tcp://0.0.0.0:5566", "tcp://kv.example:1", "ipc:///run/kv"],
)
def test_elsewhere_the_system_chooses(address: str) -> None:
    assert buffer_bytes(address) == -1
