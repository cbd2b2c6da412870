"""Simulation of a fleet for ``kvstore simulate --fleet``: replicas behind a router, with tiers of their own and shared.

Reads the trace once, and remembers of it only the chunks that the tiers hold, and requests that wait.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from math import ceil, floor, isfinite, log
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.policies.traces import Request, read_trace
from kvstore.tools.simulate.beside import Tick
from kvstore.tools.simulate.fleetfile import FleetPlan, Router
from kvstore.tools.simulate.replica import GPU, Replica, Served, Shared
from kvstore.tools.simulate.routes import Routes

_TICK: Final = 100  # requests between two progress reports
_MAX_WAITING: Final = 1 << 16
_STEP: Final = 1.01  # between two times that are counted apart
_LEAST_S: Final = 1e-6
_MOST_TOKENS: Final = 1 << 30  # of an answer


class FleetCell(NamedTuple):
    """One of the fleets that are compared."""

    policy: str
    replicas: int
    router: Router


class Times:
    """Distribution of times, to a percent, in bounded memory."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._sum_s = 0.0

    def add(self, time_s: float) -> None:
        """Count a time."""
        self._counts[floor(log(max(time_s, _LEAST_S)) / log(_STEP))] += 1
        self._sum_s += time_s

    def percentile(self, percent: float) -> float:
        """Return the time below which ``percent`` of the times are; 0 without times."""
        left = ceil(self._counts.total() * percent / 100)
        for step, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return float(_STEP ** (step + 0.5))
        return 0.0

    def to_json(self) -> dict[str, float]:
        """Return mean and percentiles."""
        mean_s = self._sum_s / max(1, self._counts.total())
        return {"mean": mean_s, **{f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}}


class _Waiting(NamedTuple):
    request: Request
    arrival_s: float


@dataclass
class _Seat:
    """Replica with the requests that wait for it."""

    replica: Replica
    is_busy: bool = False
    waiting: deque[_Waiting] = field(default_factory=deque)


class Fleet:
    """Replicas behind a router. Events come in the order of time: arrivals, first tokens, ends of answers."""

    def __init__(self, plan: FleetPlan, cell: FleetCell, *, answers: bool = True) -> None:
        """Start empty; without ``answers`` the policies do not hear of them."""
        self._plan, self._cell, self._answers = plan, cell, answers
        self._shared = None if plan.shared is None else Shared.of(plan.shared, cell.policy)
        self._replicas = [Replica(plan, cell.policy, self._shared) for _ in range(cell.replicas)]
        self._seats = {replica: _Seat(replica) for replica in self._replicas}
        self._routes = Routes(cell.router, self._replicas)
        self._events: list[tuple[float, int, Replica, bool]] = []  # a heap; True for a first token
        self._num_events = self._num_waiting = self._most_waiting = 0
        self._first_s: float | None = None
        self._now_s = self._last_s = 0.0
        self._requests = self._asked_tokens = self._declined_tokens = self._computed_tokens = 0
        self._found_tokens = Counter[str]()
        self._waits, self._firsts = Times(), Times()

    def ask(self, request: Request) -> None:
        """Let a request arrive; it may not be earlier than the one before.

        Raises:
            ConfigError: so many requests wait that the fleet is far too small.
        """
        arrival_s = max(request.time_s, self._now_s)
        self._first_s = arrival_s if self._first_s is None else self._first_s
        self._run_until(arrival_s)
        replica = self._routes.choose(request)
        replica.load += 1
        seat = self._seats[replica]
        seat.waiting.append(_Waiting(request, arrival_s))
        self._num_waiting += 1
        self._most_waiting = max(self._most_waiting, self._num_waiting)
        if self._num_waiting > _MAX_WAITING:
            raise ConfigError(
                f"{self._cell.replicas} replica(s) with {self._cell.router} routing fall behind: {_MAX_WAITING:,} "
                f"requests wait after {arrival_s - self._first_s:,.0f} s: raise replicas or prefill_tokens_per_s"
            )
        if not seat.is_busy:
            self._begin_next(seat)

    def end(self) -> None:
        """Run until the last request has its answer."""
        self._run_until(float("inf"))

    def _run_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            self._now_s, _, replica, is_first = heapq.heappop(self._events)
            if not is_first:
                replica.load -= 1
                continue
            replica.complete()
            seat = self._seats[replica]
            seat.is_busy = False
            if seat.waiting:
                self._begin_next(seat)
        if time_s != float("inf"):
            self._now_s = time_s

    def _begin_next(self, seat: _Seat) -> None:
        request, arrival_s = seat.waiting.popleft()
        self._num_waiting -= 1
        seat.is_busy = True
        known = request if self._answers else request._replace(answer_tokens=None)
        served = seat.replica.serve(known, arrival_s, self._now_s)
        answer_s = min(request.answer_tokens or 0, _MOST_TOKENS) / self._plan.decode_tokens_per_s
        self._schedule(served.end_s, seat.replica, is_first=True)
        self._schedule(served.end_s + answer_s, seat.replica, is_first=False)
        self._note(served, arrival_s)

    def _schedule(self, time_s: float, replica: Replica, *, is_first: bool) -> None:
        self._num_events += 1  # breaks ties
        heapq.heappush(self._events, (time_s, self._num_events, replica, is_first))

    def _note(self, served: Served, arrival_s: float) -> None:
        self._requests += 1
        self._asked_tokens += served.num_tokens
        self._found_tokens.update(served.loaded_tokens)
        self._declined_tokens += served.declined_tokens
        self._computed_tokens += served.computed_tokens
        self._waits.add(max(0.0, served.begin_s - arrival_s))
        self._firsts.add(served.end_s - arrival_s)
        self._last_s = max(self._last_s, served.end_s)

    # -- figures -----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return all figures of the fleet."""
        plan, found = self._plan, self._found_tokens
        asked_tokens = self._asked_tokens
        loaded_tokens = found.total() - found[GPU]
        span_s = self._last_s - (self._first_s or 0.0)
        computed_s = [replica.computed_s for replica in self._replicas]
        gpu_s = {
            "computing": sum(computed_s) * plan.gpus_per_replica,
            "saved": loaded_tokens / plan.prefill_tokens_per_s * plan.gpus_per_replica,
        }
        price = plan.gpu_price_per_hour
        return {
            **self._cell._asdict(),
            "requests": self._requests,
            "asked_tokens": asked_tokens,
            "computed_tokens": self._computed_tokens,
            "declined_tokens": self._declined_tokens,
            "hit_rate": found.total() / max(1, asked_tokens),
            "tiers": {name: self._tier(name, asked_tokens) for name in self._replicas[0].tiers},
            "ttft_s": self._firsts.to_json(),
            "wait_s": self._waits.to_json(),
            "span_s": span_s,
            "busy": sum(computed_s) / max(_LEAST_S, span_s * len(computed_s)),
            "busiest": max(computed_s) / max(_LEAST_S, span_s),
            "most_waiting": self._most_waiting,
            "gpu_s": gpu_s,
            "cost": None if price is None else {name: seconds / 3600 * price for name, seconds in gpu_s.items()},
        }

    def _tier(self, name: str, asked_tokens: int) -> dict[str, Any]:
        tiers = {replica.tiers[name] for replica in self._replicas}  # one, if it is shared
        return {
            "hit_rate": self._found_tokens[name] / max(1, asked_tokens),
            "read_bytes": self._found_tokens[name] * self._plan.bytes_per_token,
            "written_bytes": sum(tier.counts.written_bytes for tier in tiers),
            "evicted_chunks": sum(tier.counts.evicted_chunks for tier in tiers),
        }


def simulate_fleet(path: Path, plan: FleetPlan, cell: FleetCell, *, answers: bool, tick: Tick) -> dict[str, Any]:
    """Return the figures of one fleet that gets the requests of a trace.

    Raises:
        ConfigError: the trace cannot be read, names no sessions for a router by session, or the fleet is too small.
    """
    fleet, number, has_sessions = Fleet(plan, cell, answers=answers), 0, False
    for number, request in enumerate(read_trace(path), start=1):
        has_sessions = has_sessions or bool(request.session)
        if not isfinite(request.time_s):
            raise ConfigError(f"{path}: request {number} came at {request.time_s} s: remove it from the trace")
        fleet.ask(request)
        if number % _TICK == 0:
            tick(_TICK)
    tick(number % _TICK)
    if not number:
        raise ConfigError(f"{path} has no requests with at least one chunk")
    if cell.router == "session" and not has_sessions:
        raise ConfigError(f"{path} names no sessions: use another router than session")
    fleet.end()
    return fleet.to_json()
