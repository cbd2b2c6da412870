"""Recent past of a cache server, for its status page."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EACH_S: Final = 10.0
_MOST_SAMPLES: Final = 360  # an hour
_END_WAIT_S: Final = 5.0
_COUNTERS: Final = (
    "found_chunks",
    "missing_chunks",
    "stored_bytes",
    "read_bytes",
    "loaded_chunks",
    "evicted_chunks",
    "full",
    "failed",
)

Tree = dict[str, Any]


class History:
    """Samples of a server's counters, one each ten seconds, of the last hour. Thread-safe.

    Args:
        snapshot: returns the report of the server, or raises ``TimeoutError``.
        each_s: seconds between two samples.
    """

    def __init__(self, snapshot: Callable[[], Tree], each_s: float = EACH_S) -> None:
        self._snapshot = snapshot
        self._each_s = each_s
        self._samples: deque[Tree] = deque(maxlen=_MOST_SAMPLES)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-history", daemon=True)
        self._thread.start()

    def samples(self) -> list[Tree]:
        """Return the samples, the oldest first; see ``sample``."""
        return list(self._samples)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_over.set()
        self._thread.join(_END_WAIT_S)

    def _run(self) -> None:
        before: Tree | None = None
        while not self._is_over.wait(0.0 if before is None else self._each_s):
            try:
                now = self._snapshot()
            except TimeoutError:
                continue  # the next sample covers more time
            if before is not None:
                self._samples.append(sample(before, now))
            before = now


def sample(before: Mapping[str, Any], now: Mapping[str, Any]) -> Tree:
    """Return the changes between two reports, and the bytes that each tier uses.

    Namespaces that were not reported before count from now on, because all that they ever did is not recent.
    """
    then = {_name(space): space["counters"] for space in before["namespaces"]}
    both = [(then[_name(space)], space["counters"]) for space in now["namespaces"] if _name(space) in then]
    changes = {name: sum(max(new[name] - old[name], 0) for old, new in both) for name in _COUNTERS}
    used = {f"{tier}_used_bytes": of["used_bytes"] for tier, of in now["tiers"].items()}
    return {"at_s": round(time.time(), 1), "took_s": round(now["uptime_s"] - before["uptime_s"], 1), **changes, **used}


def _name(space: Mapping[str, Any]) -> str:
    return str(space["space"])
