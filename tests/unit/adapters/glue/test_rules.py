"""Rules that hold after a failure, one a test and each side of the adapter alone; random schedules seldom get here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_parts import BLOCK, CHUNK, ONE_GROUP, FakeRequest
from support.uses import are_loads_idle

from kvstore.adapters.vllm.plan import Fetch, FetchResult, ReqMeta, StepPlan, StepReport, StepResult, WorkerFacts
from kvstore.adapters.vllm.requests.tracker import LoadSpec, RequestTracker, SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadChoice, LoadRules
from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.engine.options import EngineOptions
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import LoadStep, Match, Place, StoreStep, chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import NO_EXTRAS, Namespace, PrefixHasher, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.paged.binding import bind_paged_kv
from kvstore.transfer.mover import LoadJob, LoadResult, StartedStores, StoreJob, as_block_ids

PROMPT = list(range(2 * CHUNK + 1))
TABLE = list(range(1, 10))
WITHIN = LoadRules(async_load=False, only_if_faster=False)
ASYNC = LoadRules(async_load=True, only_if_faster=False)
RULES = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)


def refs_of(tokens: list[int]) -> list[ChunkRef]:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(tokens)
    return chunk_refs(hasher, with_tail=True)


def make(
    *survivors: ChunkRef, ranks: int = 1, rules: LoadRules = WITHIN, disk_bytes: int = 1 << 20, **options: Any
) -> StoreScheduler:
    """Make the scheduler side over workers whose disks hold ``survivors``."""
    scheduler = StoreScheduler(SchedulerOptions(RULES, load_rules=rules, **options))
    layout = KVLayout(page_bytes=(64,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
    held = [(ref, 4096) for ref in survivors]
    scheduler.connect([WorkerFacts(16, 4096, disk_bytes, (4096,) * 4, held, Namespace({}), layout)] * ranks)
    return scheduler


def begin(scheduler: StoreScheduler, name: str, tokens: list[int]) -> FakeRequest:
    request = FakeRequest(name, list(tokens))
    scheduler.add_request(request, NO_EXTRAS)
    return request


def plan(scheduler: StoreScheduler, name: str, num_tokens: int, table: Sequence[int] = TABLE) -> StepPlan:
    return scheduler.plan_step({name: num_tokens}, lambda _: [table])


def report(scheduler: StoreScheduler, number: int, ranks: int = 1, failed: Sequence[PrefixKey] = ()) -> None:
    result = StepResult(failed_loads=set(failed), ranks_loaded=ranks, ranks_ended=ranks)
    scheduler.complete(StepReport({number: result}))


def load_within(scheduler: StoreScheduler, name: str) -> StepPlan:
    """Plan a step that loads all that the disk has of the prompt."""
    request = begin(scheduler, name, PROMPT)
    num_tokens = scheduler.num_new_matched_tokens(request, 0)
    assert num_tokens
    assert not scheduler.is_async_load(name)
    scheduler.allocated(name, [TABLE], num_tokens)
    return plan(scheduler, name, len(PROMPT) - num_tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_store_is_kept_of_steps_planned_before_a_failure_was_known(ranks: int) -> None:
    """A rank whose load succeeded knows nothing of the other's failure, and stores all the same."""
    (first, *_) = refs_of(PROMPT)
    scheduler = make(first, ranks=ranks)
    index = scheduler.index
    assert index is not None
    poisoned = load_within(scheduler, "loads")
    others = [[name, *PROMPT] for name in (11, 12, 13)]
    ahead = []
    for number, tokens in enumerate(others[:2]):
        begin(scheduler, f"other {number}", tokens)
        ahead.append(plan(scheduler, f"other {number}", len(tokens)))
        assert ahead[-1].requests[0].stores
    report(scheduler, poisoned.number, ranks, [first.prefix_key])
    for step in ahead:
        report(scheduler, step.number, ranks)
    assert not any(ref.prefix_key in index for tokens in others[:2] for ref in refs_of(tokens))
    begin(scheduler, "later", others[2])
    report(scheduler, plan(scheduler, "later", len(others[2])).number, ranks)
    assert all(index.in_memory(ref.prefix_key) for ref in refs_of(others[2]))


def test_a_step_that_ended_before_the_failure_keeps_its_stores() -> None:
    (first, *_) = refs_of(PROMPT)
    scheduler = make(first)
    begin(scheduler, "other", [9, *PROMPT])
    step = plan(scheduler, "other", len(PROMPT) + 1)
    poisoned = load_within(scheduler, "loads")
    report(scheduler, step.number)
    report(scheduler, poisoned.number, failed=[first.prefix_key])
    assert scheduler.index is not None
    assert all(scheduler.index.in_memory(ref.prefix_key) for ref in refs_of([9, *PROMPT]))


def test_a_request_whose_load_failed_does_not_try_again() -> None:
    """The chunk is still on the disk, which only did not answer, so the request would try forever."""
    (first, *_) = refs_of(PROMPT)
    scheduler = make(first, rules=ASYNC)
    request = begin(scheduler, "one", PROMPT)
    assert scheduler.num_new_matched_tokens(request, 0) == CHUNK
    scheduler.allocated("one", [TABLE], CHUNK)
    (fetch,) = scheduler.plan_step({}, lambda _: [TABLE]).fetches
    failed = FetchResult(failed_loads={first.prefix_key}, ranks_ended=1)
    scheduler.complete(StepReport(fetches={fetch.number: failed}))
    assert scheduler.num_new_matched_tokens(begin(scheduler, "another", PROMPT), 0) == CHUNK
    assert scheduler.num_new_matched_tokens(request, 0) == 0
    scheduler.allocated("one", [TABLE], 0)
    assert scheduler.num_new_matched_tokens(request, 0) == CHUNK, "it has computed, and comes back after a preemption"


@pytest.mark.parametrize("failed", [False, True])
def test_a_chunk_that_could_not_be_stored_replaces_no_tail(*, failed: bool) -> None:
    short, long = PROMPT[: CHUNK - BLOCK], PROMPT[:CHUNK]
    (tail,), (whole,) = refs_of(short), refs_of(long)
    scheduler = make(disk_bytes=0)
    index = scheduler.index
    assert index is not None
    for name, tokens in (("short", short), ("long", long)):
        begin(scheduler, name, tokens)
        step = plan(scheduler, name, len(tokens))
        lost = {whole.prefix_key} if failed and name == "long" else set()
        scheduler.complete(StepReport({step.number: StepResult(failed_stores=lost, ranks_loaded=1, ranks_ended=1)}))
    assert index.counters.superseded_tails == (not failed)
    assert index.in_memory(whole.prefix_key) is not failed
    assert index.in_memory(tail.prefix_key) is failed


@pytest.mark.parametrize("rules", [WITHIN, ASYNC], ids=["within", "async_load"])
def test_blocks_whose_chunk_went_between_lookup_and_load_are_told(rules: LoadRules) -> None:
    first, second, *_ = refs_of(PROMPT)
    scheduler = make(first, second, rules=rules)
    request = begin(scheduler, "one", PROMPT)
    assert scheduler.num_new_matched_tokens(request, 0) == 2 * CHUNK
    assert scheduler.index is not None
    scheduler.index.remove([second.prefix_key])
    scheduler.allocated("one", [TABLE], 2 * CHUNK)
    step = plan(scheduler, "one", 1)
    (part,) = step.requests or step.fetches
    assert [job.block_ids.tolist() for job in part.loads] == [TABLE[:4]]
    assert part.lost_block_ids == TABLE[4:8]


def test_what_was_computed_behind_a_failed_block_is_spoilt_too() -> None:
    (first, *_) = refs_of(PROMPT)
    scheduler = make(first)
    load_within(scheduler, "one")
    assert scheduler.spoilt_blocks({TABLE[2]}) == set(TABLE), "those computed in this step, and in those to come"
    assert scheduler.spoilt_blocks({99}) == {99}


def test_a_block_that_comes_to_a_request_later_is_spoilt_too() -> None:
    (first, *_) = refs_of(PROMPT)
    scheduler = make(first)
    load_within(scheduler, "one")
    plan(scheduler, "one", 1, [*TABLE, 10])
    plan(scheduler, "other", 1, [20])
    assert scheduler.spoilt_blocks({TABLE[0]}) == {*TABLE, 10}


@pytest.mark.parametrize("is_stored", [False, True])
def test_the_blocks_of_an_ended_request_are_kept_until_its_stores_beside_are_over(*, is_stored: bool) -> None:
    scheduler = make(async_save=True)
    begin(scheduler, "one", PROMPT)
    step = plan(scheduler, "one", len(PROMPT))
    assert step.requests[0].stores
    if is_stored:
        report(scheduler, step.number)
    assert scheduler.finish_request("one", [TABLE]) is not is_stored
    told = [meta.req_id for meta in plan(scheduler, "another", 1).requests if meta.finished]
    assert told == ([] if is_stored else ["one"])


def one_loads_and_two_waits() -> tuple[StoreScheduler, FakeRequest, Fetch]:
    """Return two requests with the same prompt: one that loads, and one that waits for that load."""
    scheduler = make(*refs_of(PROMPT)[:2], rules=ASYNC)
    one, two = (begin(scheduler, name, PROMPT) for name in ("one", "two"))
    assert scheduler.num_new_matched_tokens(one, 0) == 2 * CHUNK
    scheduler.allocated("one", [TABLE], 2 * CHUNK)
    (fetch,) = scheduler.plan_step({}, lambda _: [TABLE]).fetches
    assert scheduler.num_new_matched_tokens(two, 0) is None
    return scheduler, two, fetch


class TestWaiting:
    """Waits for a chunk that another request loads."""

    @pytest.fixture
    def refs(self) -> list[ChunkRef]:
        return refs_of(PROMPT)[:2]

    @pytest.fixture
    def index(self, refs: list[ChunkRef]) -> ChunkIndex:
        index = ChunkIndex(4, disk_capacity_bytes=1 << 20, stored_bytes=lambda _: 4096)
        index.adopt((ref, 4096) for ref in refs)
        return index

    @pytest.fixture
    def planner(self, index: ChunkIndex) -> LoadPlanner:
        return LoadPlanner(index, RULES, LoadChoice(WITHIN), 1, ONE_GROUP, plans=StepTracker())

    @pytest.mark.parametrize("async_load", [False, True])
    def test_one_that_comes_beside_the_steps(
        self, planner: LoadPlanner, refs: list[ChunkRef], *, async_load: bool
    ) -> None:
        """An asynchronous load may fail, and the other request would not be told."""
        spec, other = (LoadSpec(Match((ref,), CHUNK), 0, CHUNK, async_load=True) for ref in refs)
        tracker = RequestTracker(FakeRequest("one", list(PROMPT)), NO_EXTRAS, RULES)
        planner.plan(tracker, spec, [TABLE], CHUNK)
        assert planner.awaited(spec, any_load=async_load) is not None
        assert planner.awaited(other, any_load=async_load) is None
        (fetch,) = planner._plans.next.fetches
        planner.complete_fetch(fetch.number, FetchResult(ranks_ended=1))
        assert planner.awaited(spec, any_load=async_load) is None

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_it_ends_when_the_chunk_has_come_everywhere(
        self, index: ChunkIndex, refs: list[ChunkRef], ranks: int
    ) -> None:
        """The load may continue with other chunks, which can take long or fail."""
        planner = LoadPlanner(index, RULES, LoadChoice(WITHIN), ranks, ONE_GROUP, plans=StepTracker())
        both = LoadSpec(Match(tuple(refs), 2 * CHUNK), 0, 2 * CHUNK, async_load=True)
        first = LoadSpec(Match((refs[0],), CHUNK), 0, CHUNK)
        tracker = RequestTracker(FakeRequest("one", list(PROMPT)), NO_EXTRAS, RULES)
        planner.plan(tracker, both, [TABLE], 2 * CHUNK)
        (fetch,) = planner._plans.next.fetches
        for _ in range(ranks):
            assert planner.awaited(first, any_load=True) == refs[0].prefix_key
            assert not index.in_memory(refs[0].prefix_key)
            planner.complete_fetch(fetch.number, FetchResult(arrived=Counter([refs[0].prefix_key])))
        assert planner.awaited(first, any_load=True) is None
        assert planner.awaited(both, any_load=True) == refs[1].prefix_key
        (step,) = index.prepare_load([refs[0]])
        assert step.source is Place.MEMORY
        index.complete_load([step], set(), set())
        for _ in range(ranks):  # their blocks fail, too: chunks that arrived stay
            failed = {ref.prefix_key for ref in refs}
            planner.complete_fetch(fetch.number, FetchResult(failed_loads=failed, ranks_ended=1))
        assert index.in_memory(refs[0].prefix_key)
        assert not index.in_memory(refs[1].prefix_key)
        assert planner.awaited(both, any_load=True) is None
        assert are_loads_idle(planner)

    def test_nothing_is_looked_up_before_it_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hundreds of requests may wait for one load, and vLLM asks about each at every step."""
        scheduler, two, fetch = one_loads_and_two_waits()
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.index, "lookup", _refuse)
            assert [scheduler.num_new_matched_tokens(two, 0) for _ in range(3)] == [None] * 3
            with pytest.raises(AssertionError, match="looked up"):
                scheduler.num_new_matched_tokens(two, CHUNK)  # vLLM has some of it by now
        scheduler.complete(StepReport(fetches={fetch.number: FetchResult(ranks_ended=1)}))
        assert scheduler.num_new_matched_tokens(two, 0) == 2 * CHUNK

    def test_nothing_is_looked_up_while_chunks_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scheduler, two, fetch = one_loads_and_two_waits()
        news = FetchResult(arrived=Counter([refs_of(PROMPT)[0].prefix_key]))
        scheduler.complete(StepReport(fetches={fetch.number: news}))
        monkeypatch.setattr(scheduler.index, "lookup", _refuse)
        assert scheduler.num_new_matched_tokens(two, 0) is None

    def test_what_is_forgotten_is_not_waited_for(self) -> None:
        """After a reset the load that was to bring it may hang until its tier's deadline."""
        scheduler, two, _ = one_loads_and_two_waits()
        scheduler.reset_cache()
        assert scheduler.num_new_matched_tokens(two, 0) == 0

    @pytest.mark.parametrize("async_load", [False, True])
    def test_one_that_comes_within_a_step(
        self, planner: LoadPlanner, index: ChunkIndex, refs: list[ChunkRef], *, async_load: bool
    ) -> None:
        """An asynchronous load might run before that step, but one within a step runs after it."""
        spec = LoadSpec(Match((refs[0],), CHUNK), 0, CHUNK)
        steps = index.prepare_load([refs[0]])
        assert (planner.awaited(spec, any_load=async_load) is not None) is async_load
        index.complete_load(steps, set(), set())
        assert planner.awaited(spec, any_load=async_load) is None

    @pytest.mark.parametrize("runs_ahead", [False, True])
    def test_what_a_canary_reads_while_vllm_runs_ahead(self, refs: list[ChunkRef], *, runs_ahead: bool) -> None:
        """The read may fail, and a load within a step must not: vLLM would deliver tokens computed on garbage."""
        scheduler = make(refs[0], rules=LoadRules(runs_ahead=runs_ahead))
        one = begin(scheduler, "one", PROMPT)
        index = scheduler.index
        assert index is not None
        steps = index.prepare_load([refs[0]])
        assert steps[0].source is Place.DISK
        waits = scheduler.num_new_matched_tokens(one, 0) is None
        assert waits is runs_ahead
        index.complete_load(steps, {refs[0].prefix_key} if runs_ahead else set(), set())
        assert scheduler.num_new_matched_tokens(one, 0) == CHUNK
        assert scheduler.is_async_load("one") is runs_ahead


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("it was looked up")


# -- workers ----------------------------------------------------------------------------------------------------------

REF = ChunkRef(b"k" * 16, 2)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[StoreWorker]:
    cache = torch.arange(16 * 8, dtype=torch.int64).reshape(16, 1, 4, 2)
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = EngineOptions(4 * 4096, local_disk=tmp_path, max_local_disk_bytes=1 << 20, use_odirect=False)
    worker = StoreWorker(paged, Namespace({"model": "one"}), options, WorkerOptions(async_save=True))
    worker.facts()
    yield worker
    worker.close()


@pytest.mark.parametrize("preempts", [False, True])
def test_a_step_that_preempts_waits_for_the_stores_beside(
    worker: StoreWorker, monkeypatch: pytest.MonkeyPatch, *, preempts: bool
) -> None:
    goes_on, stored = threading.Event(), []
    storer = worker._background._storer
    finish_store = storer.finish_store

    def slow_store(stores: StartedStores) -> set[PrefixKey]:
        assert goes_on.wait(30)
        count = len(stores.waiting)
        failed = finish_store(stores)
        stored.append(count)
        return failed

    monkeypatch.setattr(storer, "finish_store", slow_store)
    finish_saves = worker._background.finish_saves

    def wait() -> None:
        goes_on.set()
        finish_saves()

    monkeypatch.setattr(worker._background, "finish_saves", wait)
    job = StoreJob(StoreStep(REF, 0, ()), as_block_ids([1, 2]))
    worker.begin_step(StepPlan(1, 0, [ReqMeta("one", stores=[job])]))
    worker.store()
    worker.prepare(StepPlan(2, 0, preempts=preempts))
    assert stored == ([1] if preempts else [])
    goes_on.set()


def test_a_load_that_a_reset_overtakes_has_failed(worker: StoreWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load brings KV of the old weights."""
    goes_on = threading.Event()

    def slow_load(jobs: Sequence[LoadJob]) -> LoadResult:
        assert goes_on.wait(30)
        return LoadResult(set(), set())

    monkeypatch.setattr(worker._background._loader, "load", slow_load)
    job = LoadJob(LoadStep(REF, 0, Place.MEMORY), as_block_ids([7, 5]), 0)
    worker.begin_step(StepPlan(1, 0, fetches=[Fetch(1, "one", [job])]))
    worker.store()
    worker.begin_step(StepPlan(2, 1, epoch="2"))
    goes_on.set()
    worker._background._fetching[1][1].result(30)
    worker.store()
    told = worker.take_report()
    assert told is not None
    assert told.fetches[1].failed_loads == {REF.prefix_key}
    assert worker.take_failed_block_ids() == {5, 7}
    assert worker.take_fetched_requests() == {"one"}
