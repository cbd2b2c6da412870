"""Requests with LoRA adapters, from their arrival until the adapter's files are known. No vLLM types."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Final

from kvstore.adapters.vllm.requests.adapterfiles import Adapter, AdapterFiles, Look

PASS_BUDGET_S: Final = 0.001
"""How long one pass of the scheduler may wait for looks at files, for all its requests together: most take less."""

Admit = Callable[[str, bool], None]
"""Admits a request: takes its adapter's fingerprint, if known, and whether it may use the cache."""


@dataclass
class _Arrival:
    adapter: Adapter
    look: Look
    deadline_s: float
    admit: Admit


class Arrivals:
    """The requests that wait for a look at their adapter's files. For the scheduler's thread.

    Args:
        adapters: looks; ``close`` closes it.
        timeout_s: how long a request waits; then it is served without the cache.
    """

    def __init__(self, adapters: AdapterFiles, timeout_s: float) -> None:
        self._adapters = adapters
        self._timeout_s = timeout_s
        self._waiting: dict[str, _Arrival] = {}
        self._left_s = PASS_BUDGET_S

    def add(self, request_id: str, adapter: Adapter, admit: Admit) -> None:
        """A request has come. ``admit`` is called once, from ``is_admitted``: with its files, or after its deadline."""
        deadline_s = time.monotonic() + self._timeout_s
        self._waiting[request_id] = _Arrival(adapter, self._adapters.look(adapter), deadline_s, admit)

    def is_admitted(self, request_id: str) -> bool:
        """Whether a request need not wait any longer."""
        arrival = self._waiting.get(request_id)
        if arrival is None:
            return True
        if not arrival.look.done() and self._left_s > 0:
            begin_s = time.monotonic()
            wait_for([arrival.look], self._left_s)
            self._left_s -= time.monotonic() - begin_s
        if not arrival.look.done() and time.monotonic() < arrival.deadline_s:
            return False
        del self._waiting[request_id]
        files = self._adapters.take(arrival.adapter, arrival.look)
        arrival.admit(files or "", files is not None)
        return True

    def end(self, request_id: str) -> None:
        """A request is gone."""
        self._waiting.pop(request_id, None)

    def end_pass(self) -> None:
        """The scheduler has planned a step; the next pass may wait again."""
        self._left_s = PASS_BUDGET_S

    def close(self) -> None:
        """End the threads that look."""
        self._waiting.clear()
        self._adapters.close()
