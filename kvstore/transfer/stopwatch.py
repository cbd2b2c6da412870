"""How long copies take, also on a device, where they begin after what the model still computes, and end later."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from kvstore.paged.base import PagedKV
from kvstore.paged.streams import Moment


class Stopwatch:
    """Runs within ``with``, any number of times. What is measured is the sum.

    The host's part is what it read from slower tiers and launched meanwhile. The device's part begins when its stream
    comes to the copies, so what it had to do before does not count. Both go on at the same time: the longer one counts.

    Args:
        paged: whose current stream the copies are launched on.

    Attributes:
        queued_s: how long it took until a thread began; counts in full.
    """

    def __init__(self, paged: PagedKV) -> None:
        self._streams = paged.streams
        self.queued_s = 0.0
        self._host_s = 0.0
        self._begin_s = 0.0
        self._begin: Moment = None
        self._laps: list[tuple[Moment, Moment]] = []

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
        """Whether the device has done what was launched. Never waits."""
        return not self._laps or self._streams.is_reached(self._laps[-1][1])

    @property
    def seconds(self) -> float:
        """What it took; once it ``has_stopped``."""
        device_s = sum(self._streams.seconds_between(begin, end) for begin, end in self._laps)
        return self.queued_s + max(self._host_s, device_s)
