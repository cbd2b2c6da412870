"""The plan of the next step, and the steps that every rank has yet to report."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.adapters.vllm.plan import ReqMeta, StepPlan, StepResult
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
    """Tracker of the steps of one engine. For the scheduler's thread.

    Attributes:
        next: the plan of the next step, to which the planners add what it moves.
        number: number of the last plan that was taken.
        in_flight: steps that some rank has yet to report, by number.
    """

    def __init__(self) -> None:
        self.next = StepPlan(1, 0)
        self.number = 0
        self.in_flight: dict[int, InFlightStep] = {}
        self._metas: dict[str, ReqMeta] = {}  # of the next plan
        self._acked = 0
        self._last_poisoned = 0

    def meta(self, req_id: str) -> ReqMeta:
        """Return a request's part in the next plan."""
        if req_id not in self._metas:
            self._metas[req_id] = ReqMeta(req_id)
            self.next.requests.append(self._metas[req_id])
        return self._metas[req_id]

    def take_plan(self, *, preempts: bool) -> StepPlan:
        """Return the plan of the next step, and follow it if there is anything for the ranks to report."""
        plan, self.next, self._metas = self.next, StepPlan(self.next.number + 1, 0), {}
        plan.acked, plan.preempts, self.number = self._acked, preempts, plan.number
        if plan.requests:
            verifies = [job.step for meta in plan.requests for job in meta.verifies]
            self.in_flight[plan.number] = InFlightStep(plan.acked, verifies)
        return plan

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
