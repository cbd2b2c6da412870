"""Parts of the adapter alone: the order of waits, and decisions of the last of several ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_parts import BLOCK, CHUNK, ONE_GROUP, FakeRequest
from support.gate import HANG_GUARD_S, Gate
from support.uses import are_loads_idle

from kvstore.adapters.vllm.plan import Fetch, FetchResult, StepReport, StepResult, WorkerFacts
from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover
from kvstore.adapters.vllm.requests.rows import NO_STATES, RowMap
from kvstore.adapters.vllm.requests.tracker import LoadSpec, RequestTracker, SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadChoice, LoadRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions, Handovers
from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.scheduler.steps import InFlightStep, StepTracker
from kvstore.adapters.vllm.worker.background import SLOW_LOADS, Background
from kvstore.config import StoreConfig
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import LoadStep, Match, Place
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.keys import NO_EXTRAS, Namespace
from kvstore.model.layout import KVLayout
from kvstore.testing.harness import make_ref
from kvstore.transfer.counters import MoverCounters
from kvstore.transfer.mover import LoadJob, LoadResult, as_block_ids

RULES = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=False)
PROMPT = list(range(2 * CHUNK + 1))
LAYOUT = KVLayout(page_bytes=(64,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
FACTS = WorkerFacts(4, 4096, 0, (0,) * 4, [], Namespace({}), LAYOUT)


class FakeMover:
    """Mover that moves nothing, and records the order of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.counters = MoverCounters()
        self.launches = False
        streams = SimpleNamespace(
            now=lambda: self.calls.append("moment"),
            hold=lambda _moment: self.calls.append("after"),
            is_reached=lambda _moment: True,
            seconds_between=lambda _begin, _end: 0.0,
        )
        self.paged = SimpleNamespace(streams=streams)

    def for_thread(self, _paged: object = None) -> FakeMover:
        return self

    def load(self, jobs: Sequence[LoadJob]) -> LoadResult:
        self.calls.append(f"load {len(jobs)}")
        return LoadResult(set(), set())


def fetched_by(mover: Any, *, revoked: bool) -> LoadResult:
    """Return the result that a courier reports for a finished load of one chunk."""
    courier = Background(mover)
    step = LoadStep(make_ref(1), 0, Place.DISK)
    courier.fetch(Fetch(1, "one", [LoadJob(step, as_block_ids([1]), 0)]))
    _, loaded, _ = courier._fetching[1]
    loaded.result(HANG_GUARD_S)
    if revoked:
        courier.revoke_fetches()
    (fetched,) = courier.take_fetched()
    courier.stop()
    assert courier.wait(HANG_GUARD_S)
    return fetched.result


@pytest.mark.parametrize("revoked", [False, True])
def test_what_was_loaded_before_a_reset_counts_as_failed(*, revoked: bool) -> None:
    result = fetched_by(FakeMover(), revoked=revoked)
    assert result == LoadResult({make_ref(1).prefix_key} if revoked else set(), set())


def test_a_load_beside_waits_for_what_was_launched_before_it() -> None:
    mover = FakeMover()
    fetched_by(mover, revoked=False)
    assert mover.calls[:4] == ["moment", "after", "moment", "load 1"]  # the second one is the watch's


def test_slow_loads_go_side_by_side_and_their_time_in_the_queue_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many loads hang as may run at once, and one more waits for a thread."""
    gate, began = Gate(), threading.Semaphore(0)

    def load(_self: FakeMover, _jobs: Sequence[LoadJob]) -> LoadResult:
        began.release()
        gate()
        return LoadResult(set(), set())

    monkeypatch.setattr(FakeMover, "load", load)
    mover: Any = FakeMover()
    courier = Background(mover)
    job = LoadJob(LoadStep(make_ref(1), 0, Place.DISK), as_block_ids([1]), 0)
    for number in range(SLOW_LOADS):
        courier.fetch(Fetch(number, "one", [job]))
    begun = [began.acquire(timeout=HANG_GUARD_S) for _ in range(SLOW_LOADS)]
    courier.fetch(Fetch(SLOW_LOADS, "last", [job]))
    begun_more = began.acquire(timeout=0.02)
    gate.open()
    assert courier.wait(HANG_GUARD_S)
    assert (begun, begun_more) == ([True] * SLOW_LOADS, False)
    (last,) = (fetched for fetched in courier.take_fetched() if fetched.fetch.number == SLOW_LOADS)
    assert last.seconds >= 0.02, "it was in the queue for as long"
    courier.stop()


def test_nobody_relies_on_a_load_that_another_request_waits_for() -> None:
    """It may fail; a load within a step that shares its slot would be told too late."""
    index = ChunkIndex(4, disk_capacity_bytes=1000, stored_bytes=lambda _: 1)
    tracker = RequestTracker(FakeRequest("one", PROMPT), NO_EXTRAS, RULES)
    tracker.hasher.update(PROMPT)
    index.adopt([(make_ref(0)._replace(prefix_key=key), 1) for key in tracker.hasher.chunk_keys()])
    planner = LoadPlanner(index, RULES, LoadChoice(LoadRules()), 1, ONE_GROUP, plans=StepTracker())
    match = index.lookup(tracker.hasher)
    assert len(match.refs) == 2
    spec = LoadSpec(match, 0, 2 * CHUNK, async_load=True)
    assert planner.awaited(spec, any_load=False) is None
    planner.plan(tracker, spec, [list(range(8))], 2 * CHUNK)
    assert planner.awaited(spec, any_load=False) is not None
    assert planner.awaited(replace(spec, num_external_tokens=0), any_load=False) is None, "it loads none of them"
    (fetch,) = planner._plans.next.fetches
    planner.complete_fetch(fetch.number, FetchResult(ranks_ended=1))
    assert planner.awaited(spec, any_load=False) is None
    assert are_loads_idle(planner)


def scheduler_of(num_ranks: int) -> StoreScheduler:
    scheduler = StoreScheduler(SchedulerOptions(RULES))
    scheduler.connect([FACTS] * num_ranks)
    return scheduler


def test_steps_of_many_decodes_teach_nothing_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    monkeypatch.setattr(LoadChoice, "computed", lambda _, num_tokens, seconds: computed.append(num_tokens))
    scheduler = scheduler_of(1)
    for scheduled in ({f"{number}": 1 for number in range(128)}, {"one": 256}):
        plan = scheduler.plan_step(scheduled, lambda _: [[]])
        assert plan.computes
        scheduler.complete(StepReport(computed=plan.number))
    assert computed == [0, 256]


def test_a_checkpoint_counts_where_it_lies_and_by_its_bytes() -> None:
    groups = Groups(
        (Group(GroupKind.FULL, BLOCK, LAYOUT.block_bytes), Group(GroupKind.WINDOW, BLOCK, 3 * BLOCK, 5 * BLOCK))
    )
    checkpoints = Checkpoints((groups,), (LAYOUT,))
    parts, chunk = tuple(checkpoints.refs(make_ref(1).prefix_key, CHUNK)), make_ref(1, CHUNK // BLOCK)
    where = {chunk: Place.MEMORY, **dict.fromkeys(parts, Place.REMOTE)}
    index: Any = SimpleNamespace(source=lambda ref, _told: where[ref])
    planner = LoadPlanner(index, RULES, LoadChoice(LoadRules()), 1, RowMap(groups, checkpoints), plans=StepTracker())
    spec = LoadSpec(Match((chunk,), CHUNK, 0, parts, CHUNK), 0, CHUNK)
    part_blocks = sum(part.num_blocks for part in parts)
    assert part_blocks > 0
    assert planner.carried(spec) == {Place.MEMORY: CHUNK, Place.REMOTE: part_blocks * BLOCK}
    assert planner.sources(spec) == {Place.MEMORY: CHUNK}


def acked(scheduler: StoreScheduler) -> int:
    return scheduler.plan_step({}, lambda _: [[]]).acked


def test_a_step_is_known_when_its_last_rank_has_reported_its_loads() -> None:
    """A failed load of one rank spoils, on every rank, the steps planned before the failure was known."""
    scheduler = scheduler_of(2)
    scheduler._steps.in_flight[1] = InFlightStep(acked=0)
    scheduler.complete(StepReport({1: StepResult(ranks_loaded=1)}))
    assert acked(scheduler) == 0
    scheduler.complete(StepReport({1: StepResult(ranks_loaded=1)}))
    assert acked(scheduler) == 1


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_what_seems_wrong_is_removed_only_if_it_was_compared_with_what_is_right(*, is_poisoned: bool) -> None:
    scheduler = scheduler_of(1)
    index = scheduler.index
    assert index is not None
    (store,) = index.prepare_store([make_ref(1)])
    index.complete_store([store], set())
    key = store.ref.prefix_key
    scheduler._steps.in_flight = {
        1: InFlightStep(acked=0),
        2: InFlightStep(acked=0, verifies=index.prepare_load([store.ref])),
    }
    scheduler.complete(StepReport({1: StepResult(lost_blocks=is_poisoned, ranks_loaded=1, ranks_ended=1)}))
    scheduler.complete(StepReport({2: StepResult(mismatches={key}, ranks_loaded=1, ranks_ended=1)}))
    assert (key in index) is is_poisoned


@pytest.mark.parametrize(("computed_tokens", "sent_tokens"), [(CHUNK, 0), (len(PROMPT), 2 * CHUNK)])
def test_an_answer_says_how_much_was_handed_over_only_of_a_whole_prompt(computed_tokens: int, sent_tokens: int) -> None:
    """It may have been ended early, and the receiver must not wait for chunks that are never sent."""
    handovers = Handovers(
        HandoverOptions(sends=True, receives=False, allows_host=lambda *_: True), RULES, StepTracker()
    )
    request = FakeRequest("one", PROMPT)
    tracker = RequestTracker(request, NO_EXTRAS, RULES)
    handovers.start(tracker, Handover(DisaggSpec("one", "there", (5000,))))
    handovers.outgoing.plan(tracker, computed_tokens, lambda _: [list(range(1, 10))], ONE_GROUP, lambda _: NO_STATES)
    request.num_computed_tokens = computed_tokens
    answer = handovers.answer(tracker, first_token=None)
    assert answer is not None
    spec: Any = answer.get("disagg_spec", {})
    assert spec.get("num_coming_tokens", 0) == sent_tokens
    assert spec.get("is_last_prefill", False) is (sent_tokens > 0)


@pytest.mark.parametrize("on_device", [False, True])
def test_slots_take_turns_if_a_worker_is_on_a_device(*, on_device: bool) -> None:
    scheduler = StoreScheduler(SchedulerOptions(RULES, StoreConfig(local_cpu=False)))
    scheduler.connect([replace(FACTS, slots_take_turns=on_device), FACTS])
    assert scheduler.index is not None
    assert scheduler.index._slots._take_turns is on_device
