"""Numbers the steps, and follows those that move something until every rank has reported them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.adapters.vllm.plan import StepPlan, StepResult
from kvstore.index.plans import LoadStep


@dataclass
class InFlightStep:
    """A step in flight.

    Attributes:
        acked: the last step whose loads were known when this one was planned.
        verifies: chunks to compare with what the step computes.
        result: merged result of the ranks that have reported.
        is_loaded: every rank has reported the loads.
        distrusted: it may have computed on blocks that another step failed to load.
    """

    acked: int
    verifies: list[LoadStep] = field(default_factory=list)
    result: StepResult = field(default_factory=StepResult)
    is_loaded: bool = False
    distrusted: bool = False


class StepTracker:
    """Tracker of the steps of one engine. For the scheduler's thread."""

    def __init__(self) -> None:
        self.number = 0  # of the last plan
        self.in_flight: dict[int, InFlightStep] = {}
        self._acked = 0
        self._last_poisoned = 0

    def next_plan(self, *, preempts: bool) -> StepPlan:
        """Return the plan of the next step, still empty."""
        self.number += 1
        return StepPlan(self.number, self._acked, preempts=preempts)

    def follow(self, plan: StepPlan) -> None:
        """Follow a step, if there is anything for the ranks to report."""
        if plan.requests:
            verifies = [job.step for meta in plan.requests for job in meta.verifies]
            self.in_flight[plan.number] = InFlightStep(plan.acked, verifies)

    def merge(self, number: int, result: StepResult) -> InFlightStep:
        """Add the result that one or more ranks have reported for a step."""
        step = self.in_flight[number]
        step.result.merge(result)
        return step

    def end_loads(self, number: int) -> None:
        """End the loads of a step, which every rank has reported."""
        step = self.in_flight[number]
        step.is_loaded = True
        self._acked = number
        if step.result.is_poisoned:
            self._last_poisoned = number
        # A step planned before the failed load was known computed on its garbage, too, on every rank.
        step.distrusted = step.acked < self._last_poisoned <= number

    def is_over(self, number: int) -> bool:
        """Tell if all steps up to this one were planned and have ended."""
        return number <= self.number and min(self.in_flight, default=number + 1) > number
