"""Flatness of a server's memory over time."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

Life = Sequence[tuple[float, int]]
"""Samples of one server: seconds since its start, and bytes of its own."""

_MIN_SAMPLES = 8
_WARM_SHARE = 8  # this part of the samples is of a server that still fills its caches


def own_bytes(process: psutil.Process) -> int:
    """Return the memory of a process that no other process shares."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def growth_bytes(life: Life) -> int:
    """Return the growth of the highest sample from the first half of a life to the second; 0 for a short life."""
    if len(life) < _MIN_SAMPLES:
        return 0
    sizes = [size for _, size in life[len(life) // _WARM_SHARE :]]
    middle = len(sizes) // 2
    return max(sizes[middle:]) - max(sizes[:middle])


def slope_mib_per_hour(life: Life) -> float | None:
    """Return the slope of the line of least squares through the samples; None for a short life."""
    if len(life) < _MIN_SAMPLES:
        return None
    warm = life[len(life) // _WARM_SHARE :]
    mean_s = sum(at_s for at_s, _ in warm) / len(warm)
    mean_bytes = sum(size for _, size in warm) / len(warm)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in warm)
    if not spread:
        return None
    return sum((at_s - mean_s) * (size - mean_bytes) for at_s, size in warm) / spread * 3600 / (1 << 20)
