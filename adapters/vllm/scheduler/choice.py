"""Choice of how a hit is loaded, if at all, by the times of loads and computing that are measured while running."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.index.plans import Place

BRIEF_S: Final = 0.01  # a load from memory that would hold up others for longer is asynchronous
RETRY_EVERY: Final = 16  # one in so many loads that seem too slow is done anyway, to measure again
_LEAST_SAMPLES: Final = 3
_LEAST_TOKENS: Final = 64  # fewer measure the overhead; a request has fewer in a step that decodes it
_PREFILL_SHARE: Final = 0.75  # of a step's tokens, for it to measure prefill
_WEIGHT: Final = 0.3  # of the newest sample
_SLOWNESS: Final = {place: number for number, place in enumerate((Place.MEMORY, Place.DISK, Place.REMOTE))}
_MAX_PLANNED: Final = 16


@dataclass(frozen=True)
class LoadRules:
    """Rules for loads from the configuration.

    Attributes:
        async_load: True if requests wait for their loads while others compute; None to choose for each load.
        runs_ahead: vLLM plans a step before it knows what the previous one failed to load, so only a load that
            cannot fail may happen within a step.
        layerwise: loads within a step are done layer by layer.
        only_if_faster: tokens that take longer to load than to compute are computed.
    """

    async_load: bool | None = None
    runs_ahead: bool = False
    layerwise: bool = False
    only_if_faster: bool = True


class LoadChoice:
    """Choice between loading and computing, for each load. For the scheduler's thread.

    Carried KV is counted in tokens of a chunk, each of equal bytes, also for a checkpoint.

    A load may carry more tokens than it needs, because a slower tier may only give whole chunks: its checksums cover
    whole chunks, or the rest takes hardly longer.
    """

    def __init__(self, rules: LoadRules) -> None:
        self._rules = rules
        self._loading = {place: _Pace() for place in Place}
        self._computing = _Pace()
        self._declined = 0

    def loaded(self, carried: Mapping[Place, int], seconds: float) -> None:
        """Note the seconds of a load, given the tokens that it carried from each place.

        They count for the slowest place, less the known times of the others. That place is no faster than the whole.
        """
        slowest = _slowest(carried)
        num_tokens = carried.get(slowest, 0)
        others_s = sum(self._loading[place].seconds(carried[place]) or 0.0 for place in carried if place is not slowest)
        least_s = seconds * num_tokens / max(1, sum(carried.values()))
        self._loading[slowest].note(num_tokens, max(seconds - others_s, least_s))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note the seconds of a step that loaded nothing, for ``num_tokens`` as counted by ``prefilled``."""
        self._computing.note(num_tokens, seconds)

    def declines(self, carried: Mapping[Place, int], num_tokens: int) -> bool:
        """Tell if ``num_tokens`` should be computed because ``carried`` is slower; one in ``RETRY_EVERY`` is not."""
        if not self.is_slower(carried, num_tokens):
            return False
        self._declined += 1
        return self._declined % RETRY_EVERY != 0

    def is_slower(self, carried: Mapping[Place, int], num_tokens: int) -> bool:
        """Tell if carrying these tokens takes longer than computing ``num_tokens``, and loads have to be faster."""
        load_s, compute_s = self._load_s(carried), self._computing.seconds(num_tokens)
        return self._rules.only_if_faster and load_s is not None and compute_s is not None and load_s > compute_s

    def is_async(self, carried: Mapping[Place, int], *, others_run: bool) -> bool:
        """Tell if the request, and not the step, waits for the load."""
        if self._rules.async_load is not None:
            return self._rules.async_load
        if _slowest(carried) is not Place.MEMORY:
            return self._rules.runs_ahead or others_run or not self._rules.layerwise
        return others_run and (self._load_s(carried) or 0.0) > BRIEF_S

    def _load_s(self, carried: Mapping[Place, int]) -> float | None:
        """Return the expected seconds; None if those of the slowest place are not known."""
        seconds = {place: self._loading[place].seconds(num_tokens) for place, num_tokens in carried.items()}
        return None if seconds.get(_slowest(carried)) is None else sum(each or 0.0 for each in seconds.values())


def prefilled(num_scheduled_tokens: Collection[int]) -> int:
    """Return the tokens of a step, given those of each request; 0 if it decodes too many to measure prefill."""
    num_tokens = sum(num_scheduled_tokens)
    prefill_tokens = sum(tokens for tokens in num_scheduled_tokens if tokens >= _LEAST_TOKENS)
    return num_tokens if prefill_tokens >= _PREFILL_SHARE * num_tokens else 0


class StepClock:
    """Clock of steps that overlap: each begins when it is planned, or when the one before has ended.

    Steps are identified by number, because the end of some is never reported.
    """

    def __init__(self) -> None:
        self._planned: deque[tuple[int, float, int]] = deque(maxlen=_MAX_PLANNED)
        self._last_end_s = 0.0

    def planned(self, number: int, now_s: float, num_tokens: int) -> None:
        """Note the plan of a step; ``num_tokens`` is 0 if it is not to count."""
        self._planned.append((number, now_s, num_tokens))

    def ended(self, number: int, now_s: float) -> tuple[int, float]:
        """End a step and those before it, and return its tokens and its seconds."""
        while self._planned and self._planned[0][0] <= number:
            planned_number, planned_s, num_tokens = self._planned.popleft()
            if planned_number == number:
                begin_s, self._last_end_s = max(planned_s, self._last_end_s), now_s
                return num_tokens, now_s - begin_s
        return 0, 0.0


class _Pace:
    """Seconds per token: a moving average of seconds divided by one of tokens, so that short samples weigh little."""

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
        """Return the expected seconds of ``num_tokens``; None before enough has been measured."""
        return num_tokens * self._seconds / self._tokens if self._samples >= _LEAST_SAMPLES else None


def slowest(places: Iterable[Place]) -> Place:
    """Return the slowest of some places; memory if there are none."""
    return max(places, key=_SLOWNESS.__getitem__, default=Place.MEMORY)


def _slowest(tokens: Mapping[Place, int]) -> Place:
    return slowest(place for place in tokens if tokens[place])
