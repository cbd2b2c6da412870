"""The pool is on the NUMA node of its GPU."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda

from kvstore.memory import mapped, slabs
from kvstore.memory.mapped import map_bytes, node_near, node_of, prefer_node
from kvstore.memory.slabs import SlabPool

ADDRESS = "0000:3b:00.0"  # of the second device of the fake CUDA


def sysfs(root: Path, nodes: int, node: str) -> Path:
    """Make a machine with so many nodes, which reports a node for the device."""
    for number in range(nodes):
        (root / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    folder = root / "sys/bus/pci/devices" / ADDRESS
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "said", "node"),
    [(2, "1", 1), (2, "0", 0), (2, "-1", None), (1, "0", None), (0, "0", None), (2, "?", None)],
)
def test_the_node_of_a_device(tmp_path: Path, nodes: int, said: str, node: int | None) -> None:
    assert node_of(ADDRESS, sysfs(tmp_path, nodes, said)) == node
    assert node_of("0000:99:00.0", tmp_path) is None


def test_the_node_near_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = sysfs(tmp_path, 2, "1")
    monkeypatch.setattr(mapped, "find_runtime", FakeCuda().runtime)
    assert node_near(torch.device("cuda", 1), root) == 1
    assert node_near(torch.device("cuda", 0), root) is None
    assert node_near(torch.device("cuda", 2), root) is None  # there is no such device
    assert node_near(torch.device("cpu"), root) is None
    monkeypatch.setattr(mapped, "find_runtime", lambda: None)
    assert node_near(torch.device("cuda", 1), root) is None


class SystemCalls:
    """System calls that are recorded and answered."""

    def __init__(self, answer: int) -> None:
        self.calls: list[list[Any]] = []
        self._answer = answer

    def __call__(self, *arguments: Any) -> int:
        self.calls.append([list(given) if isinstance(given, ctypes.Array) else given.value for given in arguments])
        return self._answer


@pytest.mark.parametrize(("node", "mask"), [(0, [1]), (3, [8]), (63, [1 << 63]), (65, [0, 2])])
def test_the_kernel_is_asked_for_pages_of_the_node(node: int, mask: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    memory, kernel = map_bytes(1 << 20), SystemCalls(0)
    assert prefer_node(memory, node, kernel)
    assert kernel.calls == [[237, memory.ctypes.data, 1 << 20, 1, mask, 64 * len(mask) + 1, 0]]


def test_a_refusal_is_told_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    memory = map_bytes(1 << 20)
    with caplog.at_level("INFO", "kvstore"):
        assert not prefer_node(memory, 1, SystemCalls(-1))
    assert "cannot keep the CPU pool on NUMA node 1" in caplog.text
    memory[:] = 1


def test_a_machine_whose_calls_are_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    kernel = SystemCalls(0)
    assert not prefer_node(map_bytes(1 << 20), 1, kernel)
    assert not kernel.calls


def test_the_kernel_understands() -> None:
    memory = map_bytes(1 << 20)
    if not prefer_node(memory, 0):
        pytest.skip("the kernel, or the container, does not let processes choose")
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    policies = {int(line.split()[0], 16): line.split()[1] for line in lines}
    assert policies[memory.ctypes.data] == "prefer:0"


def test_a_pool_is_near_its_device_before_its_pages_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    class Pinner:
        is_safe_during_captures = True

        def pin(self, address: int, num_bytes: int) -> None:
            order.append("pin")

        def unpin(self, address: int) -> None:
            order.append("unpin")

    monkeypatch.setattr(slabs, "node_near", lambda device: 1 if device.type == "cuda" else None)
    monkeypatch.setattr(slabs, "prefer_node", lambda memory, node: order.append((memory.nbytes, node)))
    SlabPool(1, 4096, torch.device("cuda", 0), pinner=Pinner()).close()
    SlabPool(1, 4096).close()
    assert order == [(4096, 1), "pin", "unpin"]
