"""Memory that this process can still take: the minimum left by the machine and by its control groups.

A container's limit does not show in ``free``; with a larger pool, the kernel kills vLLM. Both versions of control
groups are read, from the process's own group up to the root that it can see.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvstore.model.errors import ConfigError

_GIB_BYTES = 2**30
_GROWTH_BYTES = 16 << 20  # less is noise
_LOOK_S = 0.2
_MAX_PATIENCES = 60
_ROOT = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that the process can still take.

    Attributes:
        available_bytes: never negative.
        decided_by: the limit that leaves the least: a file of a control group, or "free memory of the machine".
    """

    available_bytes: int
    decided_by: str


@dataclass(frozen=True)
class _Version:
    """Mount points and file names of one version of control groups."""

    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Version(
    mounts=("sys/fs/cgroup/memory",),
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_V2 = _Version(
    mounts=("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    reclaimable="inactive_file",
)


def available_memory_bytes(root: Path = _ROOT) -> MemoryLimit:
    """Return the memory left under the tightest limit; page cache that the kernel can reclaim counts as free.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    free = MemoryLimit(psutil.virtual_memory().available, "free memory of the machine")
    return min([free, *_group_limits(root)], key=lambda limit: limit.available_bytes)


def require_memory(
    needed_bytes: int,
    purpose: str,
    *,
    key: str = "max_local_cpu_size",
    root: Path = _ROOT,
    patience_s: float = 0.0,
) -> MemoryLimit:
    """Check that ``needed_bytes`` can be allocated, before doing so.

    Args:
        needed_bytes: for all workers that share the limit together.
        purpose: of the memory, as the message names it, such as "the CPU tier of 2 workers".
        key: the configuration key that reduces the need.
        root: the folder that holds ``proc`` and ``sys``.
        patience_s: how long to wait for more memory after the last increase, because the system takes half a second
            to free a GiB of a process that has ended.

    Raises:
        ConfigError: there is less.
    """
    limit, most_bytes, begin_s = available_memory_bytes(root), -_GIB_BYTES, time.monotonic()
    while needed_bytes > limit.available_bytes:
        now_s = time.monotonic()
        if limit.available_bytes >= most_bytes + _GROWTH_BYTES:
            most_bytes = limit.available_bytes
            end_s = min(now_s, begin_s + _MAX_PATIENCES * patience_s) + patience_s
        if now_s >= end_s:
            raise ConfigError(
                f"{purpose} needs {_gib(needed_bytes)} of memory and {_gib(limit.available_bytes)} are left"
                f" ({limit.decided_by}): lower {key}, or give the process more memory"
            )
        time.sleep(_LOOK_S)
        limit = available_memory_bytes(root)
    return limit


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB_BYTES:.2f} GiB"


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limit of every group that has one, this process's own first."""
    for version, path in _own_groups(root):
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for mount in version.mounts:
            # In a container the path may be the host's while the mount shows the container's group as its root:
            # levels that do not exist are skipped.
            for depth in range(len(parts), -1, -1):
                yield from _limits_of(root.joinpath(mount, *parts[:depth]), version)


def _own_groups(root: Path) -> Iterator[tuple[_Version, str]]:
    """Yield the process's group in each hierarchy that accounts memory; a line is ``id:controllers:path``."""
    text = _read_text(root / "proc/self/cgroup") or ""
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _limits_of(group: Path, version: _Version) -> Iterator[MemoryLimit]:
    used_bytes = _read_number(group / version.usage)
    if used_bytes is None:
        return
    used_bytes -= _reclaimable_bytes(group, version)
    for name in version.limits:
        limit_bytes = _read_number(group / name)
        if limit_bytes is not None:
            yield MemoryLimit(max(0, limit_bytes - used_bytes), str(group / name))


def _reclaimable_bytes(group: Path, version: _Version) -> int:
    """Return the bytes of page cache that were not used lately."""
    for line in (_read_text(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == version.reclaimable:
            return int(value) if value.isdecimal() else 0
    return 0


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None without a file, or without a limit ("max")."""
    text = (_read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
