"""Limits of control groups, read from fake ``/proc`` and ``/sys`` trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from kvstore.memory import limits
from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GIB = 2**30
MACHINE_GIB = 100
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=MACHINE_GIB * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write_tree(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    limit = limits.available_memory_bytes(tmp_path)
    assert limit == limits.MemoryLimit(MACHINE_GIB * GIB, "free memory of the machine")


def test_v2_subtracts_usage_but_not_idle_page_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/worker"
    stat = f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}"
    files = {
        "proc/self/cgroup": "0::/pod/worker",
        f"{group}/memory.max": 10 * GIB,
        f"{group}/memory.high": "max",
        f"{group}/memory.current": 5 * GIB,
        f"{group}/memory.stat": stat,
    }
    write_tree(tmp_path, files)
    limit = limits.available_memory_bytes(tmp_path)
    assert limit.available_bytes == 7 * GIB
    assert limit.decided_by.endswith("pod/worker/memory.max")


def test_v2_takes_the_tightest_group_of_the_hierarchy(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/worker",
        "sys/fs/cgroup/pod/worker/memory.max": "max",
        "sys/fs/cgroup/pod/worker/memory.current": GIB,
        "sys/fs/cgroup/pod/memory.max": 8 * GIB,
        "sys/fs/cgroup/pod/memory.high": 6 * GIB,
        "sys/fs/cgroup/pod/memory.current": 2 * GIB,
    }
    write_tree(tmp_path, files)
    limit = limits.available_memory_bytes(tmp_path)
    assert limit.available_bytes == 4 * GIB
    assert limit.decided_by.endswith("pod/memory.high")


@pytest.mark.parametrize("own_path", ["/", "/docker/0123", "/../other"])
def test_v2_in_a_container_the_mounts_root_counts(tmp_path: Path, own_path: str) -> None:
    files = {
        "proc/self/cgroup": f"0::{own_path}",
        "sys/fs/cgroup/memory.max": 4 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    write_tree(tmp_path, files)
    assert limits.available_memory_bytes(tmp_path).available_bytes == 3 * GIB


def test_v1_reads_the_memory_controller(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "7:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 3 * GIB,
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 50 * GIB,
    }
    write_tree(tmp_path, files)
    limit = limits.available_memory_bytes(tmp_path)
    assert limit.available_bytes == 2 * GIB
    assert limit.decided_by.endswith("memory/job/memory.limit_in_bytes")


def test_a_limit_larger_than_the_machine_does_not_decide(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 2 * MACHINE_GIB * GIB,
        "sys/fs/cgroup/memory.current": 0,
    }
    write_tree(tmp_path, files)
    assert limits.available_memory_bytes(tmp_path).decided_by == "free memory of the machine"


def test_an_exceeded_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.high": GIB,
        "sys/fs/cgroup/memory.current": 2 * GIB,
    }
    write_tree(tmp_path, files)
    assert limits.available_memory_bytes(tmp_path).available_bytes == 0


def test_files_that_make_no_sense_are_passed_by(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "nonsense\n0::/",
        "sys/fs/cgroup/memory.max": "lots",
        "sys/fs/cgroup/memory.current": "some",
        "sys/fs/cgroup/memory.stat": "inactive_file few",
    }
    write_tree(tmp_path, files)
    assert limits.available_memory_bytes(tmp_path).decided_by == "free memory of the machine"


def test_this_machine_has_memory() -> None:
    assert limits.available_memory_bytes().available_bytes > 0


def test_require_memory_names_what_was_asked_what_is_left_and_the_key(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 4 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    write_tree(tmp_path, files)
    assert limits.require_memory(3 * GIB, "the CPU tier", root=tmp_path).available_bytes == 3 * GIB
    with pytest.raises(ConfigError) as caught:
        limits.require_memory(10 * GIB, "the CPU tier of 2 workers", root=tmp_path)
    message = str(caught.value)
    for part in ("the CPU tier of 2 workers", "10.00 GiB", "3.00 GiB", "memory.max", "lower max_local_cpu_size"):
        assert part in message


class Clock:
    """Clock that advances only in ``sleep``, which also frees memory."""

    def __init__(self, current: Path, freed: list[int]) -> None:
        self.now_s = 0.0
        self._current = current
        self._freed = freed

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self._freed and self.now_s >= 5.0 * (4 - len(self._freed)):
            self._current.write_text(str(int(self._current.read_text()) - self._freed.pop()))


@pytest.mark.parametrize(("freed", "gets"), [([GIB, GIB, GIB], True), ([GIB], False), ([], False)])
def test_memory_that_is_being_freed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: list[int], gets: bool
) -> None:
    """The wait lasts as long as free memory grows, as after the death of a server whose successor takes as much."""
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 4 * GIB,
        "sys/fs/cgroup/memory.current": 4 * GIB,
    }
    write_tree(tmp_path, files)
    clock = Clock(tmp_path / "sys/fs/cgroup/memory.current", list(freed))
    monkeypatch.setattr(limits, "time", clock)
    if gets:
        assert limits.require_memory(3 * GIB, "it", root=tmp_path, patience_s=10.0).available_bytes == 3 * GIB
    else:
        with pytest.raises(ConfigError):
            limits.require_memory(3 * GIB, "it", root=tmp_path, patience_s=10.0)
        assert clock.now_s < 40.0
