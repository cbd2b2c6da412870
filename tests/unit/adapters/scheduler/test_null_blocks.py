"""Tables with vLLM's null block, as of models with sliding windows: it is never read, and never written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.fake_parts import BLOCK, CHUNK, FakeRequest
from support.uses import uses_of

from kvstore.adapters.vllm.plan import Fetch, FetchResult, ReqMeta, StepPlan, StepReport, StepResult, WorkerFacts
from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.worker.worker import StoreWorker
from kvstore.config import StoreConfig
from kvstore.engine.options import EngineOptions
from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import NO_EXTRAS, Namespace
from kvstore.model.layout import KVLayout
from kvstore.paged.binding import bind_paged_kv
from kvstore.transfer.mover import LoadJob, StoreJob, as_block_ids

PROMPT = list(range(4 * CHUNK + 1))
TABLE = list(range(1, 18))
NULLS = [0] * 6  # one chunk and a half
HERE = "127.0.0.1"


def make(**options: object) -> StoreScheduler:
    rules = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)
    given = SchedulerOptions(rules, load_rules=LoadRules(async_load=True, only_if_faster=False), **options)  # type: ignore[arg-type]
    scheduler = StoreScheduler(given)
    layout = KVLayout(page_bytes=(64,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
    scheduler.connect([WorkerFacts(16, 4096, 0, (0,) * 4, [], Namespace({}), layout)])
    return scheduler


def begin(scheduler: StoreScheduler, name: str, handover: Handover | None = None) -> FakeRequest:
    request = FakeRequest(name, list(PROMPT))
    scheduler.add_request(request, NO_EXTRAS, handover=handover)
    return request


def plan(scheduler: StoreScheduler, name: str, count: int, table: Sequence[int]) -> StepPlan:
    return scheduler.plan_step({name: count}, lambda _: [table])


def done(scheduler: StoreScheduler, number: int) -> None:
    scheduler.complete(StepReport({number: StepResult(ranks_loaded=1, ranks_ended=1)}))


def stored_from(step: StepPlan) -> list[list[int]]:
    return [job.block_ids.tolist() for meta in step.requests for job in meta.stores]


def fill(scheduler: StoreScheduler) -> None:
    begin(scheduler, "first")
    done(scheduler, plan(scheduler, "first", len(PROMPT), TABLE).number)
    scheduler.finish_request("first", [TABLE])


@pytest.mark.parametrize("num_nulls", [1, 4, 5, 8, 17])
def test_a_chunk_with_a_null_block_is_not_stored_and_those_behind_are(num_nulls: int) -> None:
    scheduler = make()
    begin(scheduler, "one")
    table = [*[0] * num_nulls, *TABLE[num_nulls:]]
    first = -(-num_nulls // 4)
    whole = [TABLE[number : number + 4] for number in range(4 * first, 16, 4)]
    step = plan(scheduler, "one", len(PROMPT), table)
    assert stored_from(step) == whole
    if whole:
        done(scheduler, step.number)
    assert scheduler.index is not None
    assert len(scheduler.index) == len(whole)
    assert uses_of(scheduler.index) == 0


def test_saving_that_begins_again_leaves_out_what_has_left_the_window() -> None:
    scheduler = make()
    request = begin(scheduler, "one")
    step = plan(scheduler, "one", len(PROMPT), TABLE)
    request.num_computed_tokens = len(PROMPT)
    keys = {job.step.ref.prefix_key for meta in step.requests for job in meta.stores}
    failed = StepResult(failed_stores=keys, ranks_loaded=1, ranks_ended=1)
    scheduler.complete(StepReport({step.number: failed}))
    assert stored_from(plan(scheduler, "one", 1, [*NULLS, *TABLE[6:]])) == [TABLE[8:12], TABLE[12:16]]


def test_what_lies_before_a_window_is_not_loaded() -> None:
    scheduler = make()
    fill(scheduler)
    again = begin(scheduler, "again")
    assert scheduler.num_new_matched_tokens(again, 0) == 4 * CHUNK
    scheduler.allocated("again", [[*NULLS, *TABLE[6:]]], 4 * CHUNK)
    (fetch,) = plan(scheduler, "again", 0, []).fetches
    assert [(job.block_ids.tolist(), job.first_block) for job in fetch.loads] == [
        (TABLE[6:8], 2),
        (TABLE[8:12], 0),
        (TABLE[12:16], 0),
    ]
    assert fetch.has_gaps
    assert not fetch.lost_block_ids
    scheduler.complete(StepReport(fetches={fetch.number: FetchResult(ranks_ended=1)}))
    assert scheduler.index is not None
    assert uses_of(scheduler.index) == 0


def test_what_was_lost_before_its_load_is_told_without_the_null_block() -> None:
    scheduler = make()
    fill(scheduler)
    again = begin(scheduler, "again")
    assert scheduler.num_new_matched_tokens(again, 0) == 4 * CHUNK
    scheduler.clear()
    scheduler.allocated("again", [[*NULLS, *TABLE[6:]]], 4 * CHUNK)
    (fetch,) = plan(scheduler, "again", 0, []).fetches
    assert not fetch.loads
    assert fetch.lost_block_ids == TABLE[6:16]
    scheduler.complete(StepReport(fetches={fetch.number: FetchResult(ranks_ended=1)}))
    assert scheduler.num_new_matched_tokens(again, 0) == 0


def test_a_chunk_with_a_gap_in_its_middle_is_not_loaded_nor_what_follows() -> None:
    scheduler = make()
    fill(scheduler)
    again = begin(scheduler, "again")
    assert scheduler.num_new_matched_tokens(again, 0) == 4 * CHUNK
    scheduler.allocated("again", [[*TABLE[:5], 0, *TABLE[6:]]], 4 * CHUNK)
    (fetch,) = plan(scheduler, "again", 0, []).fetches
    assert [job.block_ids.tolist() for job in fetch.loads] == [TABLE[:4]]
    assert fetch.lost_block_ids == [TABLE[4], *TABLE[6:16]]


def test_what_has_left_the_window_is_not_compared() -> None:
    scheduler = make(config=StoreConfig(verify_fraction=1.0))
    fill(scheduler)
    again = begin(scheduler, "again")
    assert scheduler.num_new_matched_tokens(again, 0) == 0, "it is computed, to compare"
    scheduler.allocated("again", [[]], 0)
    step = plan(scheduler, "again", len(PROMPT), [*NULLS, *TABLE[6:]])
    assert [job.block_ids.tolist() for meta in step.requests for job in meta.verifies] == [TABLE[8:12], TABLE[12:16]]


@pytest.mark.parametrize(("table", "sent"), [(TABLE, 4), ([*TABLE[:8], 0, *TABLE[9:]], 2), ([*NULLS, *TABLE[6:]], 0)])
def test_only_whole_chunks_are_handed_over_and_the_answer_says_how_far_they_reach(table: list[int], sent: int) -> None:
    scheduler = make(handover=HandoverOptions(sends=True, receives=False, allows_host=HERE.__eq__))
    request = begin(scheduler, "one", Handover(DisaggSpec("client", HERE, (7000,)), wants_first_token=True))
    step = plan(scheduler, "one", len(PROMPT), table)
    pushed = [job.block_ids.tolist() for meta in step.requests for job in meta.pushes]
    assert pushed == [table[number : number + 4] for number in range(0, 16, 4) if 0 not in table[number : number + 4]]
    request.num_computed_tokens = len(PROMPT)
    answer = scheduler.answer("one", first_token=5)
    assert answer is not None
    assert answer.pop("first_tok") == 5
    if not sent:
        assert not answer, "or the other engine would wait for what does not come"
    else:
        spec = answer["disagg_spec"]
        assert isinstance(spec, dict)
        assert spec["num_coming_tokens"] == sent * CHUNK


# -- workers ----------------------------------------------------------------------------------------------------------

REF = ChunkRef(b"k" * 16, 2)


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.arange(16 * 8, dtype=torch.int64).reshape(16, 1, 4, 2)


@pytest.fixture
def worker(cache: torch.Tensor, tmp_path: Path) -> Iterator[StoreWorker]:
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8, reserved_blocks=1)
    options = EngineOptions(4 * 4096, local_disk=tmp_path, max_local_disk_bytes=1 << 20, use_odirect=False)
    worker = StoreWorker(paged, Namespace({"model": "one"}), options)
    worker.facts()
    yield worker
    worker.close()


def carry_out(worker: StoreWorker, plan: StepPlan) -> None:
    worker.begin_step(plan)
    worker.load()
    worker.store()


@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_request_with_gaps_begins_anew_when_its_load_fails(worker: StoreWorker, *, has_gaps: bool) -> None:
    missing = LoadJob(LoadStep(REF, 0, Place.DISK), as_block_ids([7, 5]), 0)
    worker.begin_step(StepPlan(1, 0, fetches=[Fetch(1, "one", [missing], [9], has_gaps)]))
    worker._background._fetching[1][1].result(10)
    worker.store()
    assert worker.take_fetched_requests() == {"one"}
    assert worker.take_failed_requests() == ({"one"} if has_gaps else set())
    assert worker.take_failed_requests() == set()
    assert worker.take_failed_block_ids() == (set() if has_gaps else {5, 7, 9})


def test_no_plan_whatever_moves_the_null_block(worker: StoreWorker, cache: torch.Tensor) -> None:
    """It is the last defence: an error of the program, instead of a wrong byte."""
    before = cache.clone()
    store = ReqMeta("store", stores=[StoreJob(StoreStep(REF, 0, ()), as_block_ids([3, 0]))])
    with pytest.raises(InvalidCallError, match=r"block id 0 is not in 1\.\.15"):
        carry_out(worker, StepPlan(1, 0, [store]))
    good = ReqMeta("store", stores=[StoreJob(StoreStep(REF, 0, ()), as_block_ids([3, 4]))])
    carry_out(worker, StepPlan(2, 0, [good]))
    load = ReqMeta("load", loads=[LoadJob(LoadStep(REF, 0, Place.MEMORY), as_block_ids([0, 5]), 0)])
    with pytest.raises(InvalidCallError, match=r"block id 0 is not in 1\.\.15"):
        carry_out(worker, StepPlan(3, 2, [load]))
    assert torch.equal(cache, before)
