"""Load of the machine during a bench run, because a line that fails on a busy machine may pass on a quiet one."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple, Self

import psutil

_BUSY_SHARE = 0.25  # of the cores, used by others
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # the last two are included in other fields


class Load(NamedTuple):
    """Load of the machine during one run.

    Attributes:
        cores: cores of the machine.
        begin: load average over a minute at the start of the run.
        end: load average over a minute at the end, the bench included.
        others_cores: cores that other processes used during the run, on average.
    """

    cores: int
    begin: float
    end: float
    others_cores: float

    @property
    def is_busy(self) -> bool:
        """True if other processes may have slowed the paths down more than their limits."""
        return self.begin > self.cores or self.others_cores > _BUSY_SHARE * self.cores

    def __str__(self) -> str:
        return (
            f"load {self.begin:.1f} at the beginning, {self.end:.1f} at the end, on {self.cores} cores; "
            f"other processes used {self.others_cores:.1f} of them"
        )

    @property
    def warning(self) -> str:
        """Message for lines below their floors if the machine was busy."""
        return f"the machine was busy: {self}. Run again on a quiet one"


class Mark(NamedTuple):
    """State of the machine at the start or end of a run.

    Attributes:
        at_s: monotonic time.
        load: load average over a minute.
        busy_s: processor time of all processes since the machine started, in seconds.
        own_s: processor time of this process, and of its children that have ended.
    """

    at_s: float
    load: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> Self:
        """Return the mark of this event."""
        fields, own = psutil.cpu_times()._asdict(), os.times()
        busy_s = sum(seconds for name, seconds in fields.items() if name not in _NOT_BUSY)
        return cls(time.monotonic(), os.getloadavg()[0], busy_s, sum(own[:4]))

    def until(self, end: Mark) -> Load:
        """Return the load between this mark and a later one."""
        seconds = max(end.at_s - self.at_s, 1e-9)
        others_s = max(0.0, (end.busy_s - self.busy_s) - (end.own_s - self.own_s))
        return Load(os.cpu_count() or 1, self.load, end.load, others_s / seconds)


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system does not report the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    ]
    return next(filter(None, names), platform.machine())
