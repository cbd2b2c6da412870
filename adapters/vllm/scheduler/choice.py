"""How a hit is loaded, if at all: chosen by how long loads and computing took, measured while running."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.catalog.plans import Place

BRIEF_S: Final = 0.01  # a load from memory that would hold up others for longer is asynchronous
RETRY_EVERY: Final = 16  # of so many loads that seem too slow, one is done anyway, to measure again
_LEAST_SAMPLES: Final = 3
_LEAST_TOKENS: Final = 64  # fewer measure the overhead; a request has fewer in a step that decodes it
_PREFILL_SHARE: Final = 0.75  # of a step's tokens, for it to measure prefill
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

    What is carried is counted in tokens of a chunk, each of as many bytes; of a checkpoint, too.

    A load may carry more tokens than it is for: a slower tier may give a chunk as a whole only, as its checksums are
    for that, or because the rest takes hardly longer.
    """

    def __init__(self, rules: LoadRules) -> None:
        self._rules = rules
        self._loading = {place: _Pace() for place in Place}
        self._computing = _Pace()
        self._declined = 0

    def loaded(self, carried: Mapping[Place, int], seconds: float) -> None:
        """A load that carried so many tokens from each place took so long.

        It counts for the slowest place, less what the others are known to take. That one is no faster than the whole.
        """
        slowest = _slowest(carried)
        num_tokens = carried.get(slowest, 0)
        others_s = sum(self._loading[place].seconds(carried[place]) or 0.0 for place in carried if place is not slowest)
        least_s = seconds * num_tokens / max(1, sum(carried.values()))
        self._loading[slowest].note(num_tokens, max(seconds - others_s, least_s))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step that loaded nothing took so long for so many tokens, as ``prefilled`` counts them."""
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
        """None if the slowest place is not known."""
        seconds = {place: self._loading[place].seconds(num_tokens) for place, num_tokens in carried.items()}
        return None if seconds.get(_slowest(carried)) is None else sum(each or 0.0 for each in seconds.values())


def prefilled(num_scheduled_tokens: Collection[int]) -> int:
    """The tokens of a step, given those of each request; 0 if it tells little of prefill, since it decodes many."""
    num_tokens = sum(num_scheduled_tokens)
    prefill_tokens = sum(tokens for tokens in num_scheduled_tokens if tokens >= _LEAST_TOKENS)
    return num_tokens if prefill_tokens >= _PREFILL_SHARE * num_tokens else 0


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
    """Seconds a token: a moving average of the seconds by one of the tokens, so that short samples tell little."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._samples = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        if num_tokens < _LEAST_TOKENS:
            return
        weight = _WEIGHT if self._samples else 1.0
        self._seconds += weight * (seconds - self._seconds)
        self._tokens += weight * (num_tokens - self._tokens)
        self._samples += 1

    def seconds(self, num_tokens: int) -> float | None:
        """What so many tokens would take; None before enough has been measured."""
        return num_tokens * self._seconds / self._tokens if self._samples >= _LEAST_SAMPLES else None


def _slowest(tokens: Mapping[Place, int]) -> Place:
    return max((place for place in tokens if tokens[place]), key=_SLOWNESS.index, default=Place.MEMORY)
