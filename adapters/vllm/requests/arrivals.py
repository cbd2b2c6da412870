"""Requests from their arrival until the inputs of their keys are known. No vLLM types."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.adapters.vllm.requests.adapterfiles import Adapter, AdapterFiles, Look
from kvstore.adapters.vllm.requests.contents import Contents, Unnamed
from kvstore.model.keys import Feature
from kvstore.model.throttle import Throttle

logger = logging.getLogger(__name__)

PASS_BUDGET_S: Final = 0.001
"""The time that one pass of the scheduler may wait for looks, for all requests together; most looks take less."""


class Known(NamedTuple):
    """Inputs of a request's keys that had to be computed.

    Attributes:
        files: the fingerprint of its LoRA adapter, if it names one.
        features: its multimodal items, in order of their offset.
    """

    files: str = ""
    features: tuple[Feature, ...] = ()


NOTHING_KNOWN: Final = Known()

Admit = Callable[[Known | None], None]
"""Admits a request with the inputs of its keys; None if they are unknown, so that it must not use the cache."""


@dataclass
class _Arrival:
    adapter: Adapter | None
    files: Look | None
    features: Sequence[Feature | Unnamed]
    contents: list[Look]  # of the unnamed features, in order
    deadline_s: float
    admit: Admit

    def missing(self) -> list[Look]:
        looks = self.contents if self.files is None else [self.files, *self.contents]
        return [look for look in looks if not look.done()]


class Arrivals:
    """Requests that wait for a look at their adapter's files or their images. For the scheduler's thread.

    Args:
        adapters: looks at files; ``close`` closes it.
        timeout_s: the longest that a request waits before it is served without the cache.
    """

    def __init__(self, adapters: AdapterFiles, timeout_s: float) -> None:
        self._adapters = adapters
        self._contents = Contents()
        self._timeout_s = timeout_s
        self._waiting: dict[str, _Arrival] = {}
        self._left_s = PASS_BUDGET_S
        self._throttle = Throttle(logger)

    def add(
        self, request_id: str, adapter: Adapter | None, features: Sequence[Feature | Unnamed], admit: Admit
    ) -> None:
        """Add a request that has arrived.

        ``admit`` is called once: now if there is nothing to look at, else from ``is_admitted``, when all is known or
        after the deadline.
        """
        contents = [self._contents.look(feature) for feature in features if isinstance(feature, Unnamed)]
        if adapter is None and not contents:
            admit(Known(features=tuple(feature for feature in features if isinstance(feature, Feature))))
            return
        files = None if adapter is None else self._adapters.look(adapter)
        deadline_s = time.monotonic() + self._timeout_s
        self._waiting[request_id] = _Arrival(adapter, files, features, contents, deadline_s, admit)

    def is_admitted(self, request_id: str) -> bool:
        """Tell if a request need not wait any longer, and admit it then."""
        arrival = self._waiting.get(request_id)
        if arrival is None:
            return True
        missing = arrival.missing()
        if missing and self._left_s > 0:
            begin_s = time.monotonic()
            wait_for(missing, self._left_s)
            self._left_s -= time.monotonic() - begin_s
        if arrival.missing() and time.monotonic() < arrival.deadline_s:
            return False
        self.end(request_id)
        arrival.admit(self._known(arrival))
        return True

    def end(self, request_id: str) -> None:
        """Forget a request that has ended or waits no longer."""
        arrival = self._waiting.pop(request_id, None)
        for look in arrival.contents if arrival is not None else ():
            look.cancel()  # a look that has started ends by itself

    def end_pass(self) -> None:
        """End a pass once the scheduler has planned a step, so that the next pass may wait again."""
        self._left_s = PASS_BUDGET_S

    def close(self) -> None:
        """End all looks and their threads."""
        for request_id in list(self._waiting):
            self.end(request_id)
        self._contents.close()
        self._adapters.close()

    def _known(self, arrival: _Arrival) -> Known | None:
        files: str | None = ""
        if arrival.adapter is not None and arrival.files is not None:
            files = self._adapters.take(arrival.adapter, arrival.files)
        features = self._named(arrival)
        return Known(files, features) if files is not None and features is not None else None

    def _named(self, arrival: _Arrival) -> tuple[Feature, ...] | None:
        """Return all features named by their content, or None if one has no name."""
        looks, named = iter(arrival.contents), []
        for feature in arrival.features:
            if isinstance(feature, Unnamed):
                look = next(looks)
                name = look.result() if look.done() and not look.cancelled() else None
                if name is None:
                    self._throttle.log(
                        "unnamed",
                        "a request is served without the cache: vLLM names its %s by a counter, and its content %s. "
                        "Start vLLM with --enable-prefix-caching or --mm-processor-cache-gb above 0: then it names "
                        "such inputs by their content",
                        feature.modality,
                        "cannot be hashed here" if look.done() else "was not hashed within lookup_timeout_ms",
                    )
                    return None
                named.append(Feature(name, feature.offset, feature.length))
            else:
                named.append(feature)
        return tuple(named)
