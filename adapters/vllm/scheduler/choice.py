"""How a hit is loaded, if at all: chosen by how long loads and computing took, measured while running."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.catalog.plans import Place

BRIEF_S: Final = 0.01  # a load from memory that would hold up others for longer is asynchronous
RETRY_EVERY: Final = 16  # of so many loads that seem too slow, one is done anyway, to measure again
_LEAST_SAMPLES: Final = 3
_LEAST_TOKENS: Final = 64  # fewer measure the overhead, and a step of fewer decodes
_WEIGHT: Final = 0.3  # of the newest sample
_SLOWNESS: Final = (Place.MEMORY, Place.DISK, Place.REMOTE)
_MAX_PLANNED: Final = 16


@dataclass(frozen=True)
class LoadRules:
    """What the configuration says about loads.

    Attributes:
        async_load: whether requests wait for their loads while others compute; None to choose for each.
        runs_ahead: vLLM plans a step before it knows what the previous one failed to load, so only a load that
            cannot fail may happen within a step.
        layerwise: loads within a step go layer by layer.
        only_if_faster: what takes longer to load than to compute is computed.
    """

    async_load: bool | None = None
    runs_ahead: bool = False
    layerwise: bool = False
    only_if_faster: bool = True


class LoadChoice:
    """Decides for each load. For the scheduler's thread.

    A load may carry more tokens than it is for: a slower tier may give a chunk as a whole only, as its checksums are
    for that, or because the rest takes hardly longer.
    """

    def __init__(self, rules: LoadRules) -> None:
        self._rules = rules
        self._loading = {place: _Pace() for place in Place}
        self._computing = _Pace()
        self._declined = 0

    def loaded(self, carried: Mapping[Place, int], seconds: float) -> None:
        """A load that carried so many tokens from each place took so long. It counts for the slowest place."""
        self._loading[_slowest(carried)].note(sum(carried.values()), seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step that loaded nothing took so long for so many tokens."""
        self._computing.note(num_tokens, seconds)

    def declines(self, carried: Mapping[Place, int], num_tokens: int) -> bool:
        """Whether to compute ``num_tokens`` and not to carry so many from each place, because that is faster."""
        if not self.is_slower(carried, num_tokens):
            return False
        self._declined += 1
        return self._declined % RETRY_EVERY != 0

    def is_slower(self, carried: Mapping[Place, int], num_tokens: int) -> bool:
        """Whether carrying so many tokens from each place takes longer than computing ``num_tokens``."""
        load_s, compute_s = self._load_s(carried), self._computing.seconds(num_tokens)
        return self._rules.only_if_faster and load_s is not None and compute_s is not None and load_s > compute_s

    def is_async(self, carried: Mapping[Place, int], *, others_run: bool) -> bool:
        """Whether the request, and not the step, waits for the load."""
        if self._rules.async_load is not None:
            return self._rules.async_load
        if _slowest(carried) is not Place.MEMORY:
            return self._rules.runs_ahead or others_run or not self._rules.layerwise
        return others_run and (self._load_s(carried) or 0.0) > BRIEF_S

    def _load_s(self, carried: Mapping[Place, int]) -> float | None:
        return self._loading[_slowest(carried)].seconds(sum(carried.values()))


class StepClock:
    """How long steps take, although they overlap: each begins when it is planned, or when the one before has ended.

    Steps go by their numbers, because the end of some steps is never reported.
    """

    def __init__(self) -> None:
        self._planned: deque[tuple[int, float, int]] = deque(maxlen=_MAX_PLANNED)
        self._last_end_s = 0.0

    def planned(self, number: int, now_s: float, num_tokens: int) -> None:
        """A step of so many tokens is planned; 0 if it is not to count."""
        self._planned.append((number, now_s, num_tokens))

    def ended(self, number: int, now_s: float) -> tuple[int, float]:
        """A step is over, and so are those before it: its tokens and its seconds."""
        while self._planned and self._planned[0][0] <= number:
            planned_number, planned_s, num_tokens = self._planned.popleft()
            if planned_number == number:
                begin_s, self._last_end_s = max(planned_s, self._last_end_s), now_s
                return num_tokens, now_s - begin_s
        return 0, 0.0


class _Pace:
    """Seconds a token, a moving average."""

    def __init__(self) -> None:
        self._seconds_per_token = 0.0
        self._samples = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        if num_tokens < _LEAST_TOKENS:
            return
        weight = _WEIGHT if self._samples else 1.0
        self._seconds_per_token += weight * (seconds / num_tokens - self._seconds_per_token)
        self._samples += 1

    def seconds(self, num_tokens: int) -> float | None:
        """What so many tokens would take; None before enough has been measured."""
        return num_tokens * self._seconds_per_token if self._samples >= _LEAST_SAMPLES else None


def _slowest(tokens: Mapping[Place, int]) -> Place:
    return max((place for place in tokens if tokens[place]), key=_SLOWNESS.index, default=Place.MEMORY)
