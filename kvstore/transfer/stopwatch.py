"""Measurement of the time of copies, also on a device, where they begin after the model's work and end later."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from kvstore.paged.base import PagedKV
from kvstore.paged.streams import DeviceEvent


class Stopwatch:
    """Stopwatch that runs within ``with``, any number of times, and measures the sum.

    The host's part is reading from slower tiers and launching copies. The device's part begins when its stream reaches
    the copies, so earlier work does not count. Both run at the same time, so the longer one counts.

    Args:
        paged: the cache whose current stream the copies are launched on.

    Attributes:
        queued_s: time until a thread began; counts in full.
    """

    def __init__(self, paged: PagedKV) -> None:
        self._streams = paged.streams
        self.queued_s = 0.0
        self._host_s = 0.0
        self._begin_s = 0.0
        self._begin: DeviceEvent = None
        self._laps: list[tuple[DeviceEvent, DeviceEvent]] = []

    def __enter__(self) -> Self:
        self._begin, self._begin_s = self._streams.now(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host_s += time.perf_counter() - self._begin_s
        self._laps.append((self._begin, self._streams.now()))

    @property
    def has_stopped(self) -> bool:
        """True if the device has completed the launched work. Never waits."""
        return not self._laps or self._streams.is_reached(self._laps[-1][1])

    @property
    def seconds(self) -> float:
        """Measured time; valid once it ``has_stopped``."""
        device_s = sum(self._streams.seconds_between(begin, end) for begin, end in self._laps)
        return self.queued_s + max(self._host_s, device_s)
