"""Scheduler side and workers together, one situation at a time; `support/fake_vllm.py` checks every byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest
from support.fake_parts import BLOCK, CHUNK, FakeRequest, Setup
from support.situations import OTHER, PROMPT, Build, again

from kvstore.adapters.vllm.plan import StepReport, StepResult, WorkerFacts
from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler import choice
from kvstore.adapters.vllm.scheduler.choice import LoadChoice
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.config import StoreConfig
from kvstore.index.plans import Place, chunk_refs
from kvstore.model.keys import NO_EXTRAS, Namespace, PrefixHasher, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.policies import Adaptive
from kvstore.policies.traces import read_trace


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [10, 100])
def test_second_time_is_loaded(build: Build, *, ranks: int, budget: int) -> None:
    vllm = build(ranks=ranks, budget=budget)
    vllm.ask("first", PROMPT)
    assert again(vllm) == len(PROMPT) - 1
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_full_hit_leaves_one_token(build: Build) -> None:
    vllm = build()
    vllm.ask("first", PROMPT[: 2 * CHUNK])
    assert again(vllm, PROMPT[: 2 * CHUNK]) == 2 * CHUNK - 1


def test_salts_do_not_share(build: Build) -> None:
    vllm = build()
    vllm.ask("first", PROMPT, salt="mine")
    assert again(vllm) == 0
    assert again(vllm, salt="mine") > 0


def test_only_what_vllm_lacks_is_loaded(build: Build) -> None:
    vllm = build()
    vllm.ask("first", PROMPT)
    vllm.forget_local()
    vllm.ask("short", PROMPT[: CHUNK + BLOCK + 1])
    vllm.ask("again", PROMPT)
    assert vllm.loaded_tokens["again"] == len(PROMPT) - 1 - (CHUNK + BLOCK)


def test_steps_that_only_wait_for_loads_do_not_count_as_computing(
    build: Build, on_disk: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reports most of them not at all. Counted as compute steps, they made computing look free."""
    computed: list[int] = []
    monkeypatch.setattr(choice, "_LEAST_TOKENS", 1)  # the prompts are short
    monkeypatch.setattr(LoadChoice, "computed", lambda _, num_tokens, seconds: computed.append(num_tokens))
    vllm = build(on_disk, async_load=True)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert {again(vllm) for _ in range(20)} == {len(PROMPT) - 1}
    vllm.ask("last", OTHER)
    assert computed == [len(PROMPT), *[1] * 20, len(OTHER)]


@pytest.mark.parametrize("async_load", [True, False])
def test_a_request_is_one_use_of_each_chunk(build: Build, monkeypatch: pytest.MonkeyPatch, *, async_load: bool) -> None:
    """This holds if vLLM has it, it is loaded, or others come in between; otherwise policies would count false hits."""
    uses: Counter[PrefixKey] = Counter()
    on_touch = Adaptive._on_touch

    def note(policy: Adaptive, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        uses.update(used)
        on_touch(policy, chain, used)

    monkeypatch.setattr(Adaptive, "_on_touch", note)
    vllm = build(async_load=async_load, budget=10)

    def uses_by(ask: Callable[[], object]) -> set[int]:
        uses.clear()
        ask()
        vllm.settle()
        return set(uses.values())

    def side_by_side() -> None:
        vllm.forget_local()
        vllm.add("one", PROMPT)
        vllm.add("other", OTHER)
        vllm.run()

    assert uses_by(lambda: vllm.ask("first", PROMPT)) == {1}
    assert uses_by(lambda: vllm.ask("second", PROMPT)) == {1}, "vLLM itself has the blocks"
    assert uses_by(lambda: again(vllm)) == {1}
    vllm.ask("other", OTHER)
    assert uses_by(side_by_side) == {1}
    assert vllm.loaded_tokens["one"] == len(PROMPT) - 1


@pytest.mark.parametrize("taken", [0, 1, BLOCK, CHUNK + 3])
def test_vllm_may_take_less_than_offered(build: Build, taken: int) -> None:
    vllm = build()
    vllm.ask("first", PROMPT)
    vllm.take = lambda offered: min(offered, taken)
    assert again(vllm) == taken
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(("least", "loaded"), [(len(PROMPT) - 1, len(PROMPT) - 1), (len(PROMPT), 0)])
def test_short_hits_are_computed(build: Build, least: int, loaded: int) -> None:
    vllm = build(min_retrieve_tokens=least)
    vllm.ask("first", PROMPT)
    assert again(vllm) == loaded


@pytest.mark.parametrize("skip", [1, BLOCK, 2 * BLOCK + 3])
def test_the_last_tokens_are_neither_stored_nor_loaded(build: Build, tmp_path: Path, skip: int) -> None:
    vllm = build(Setup(folder=tmp_path))
    vllm.ask("first", PROMPT)
    vllm.settle()
    vllm = build(Setup(folder=tmp_path, skip_last_tokens=skip))
    assert again(vllm) == len(PROMPT) - skip
    vllm.ask("longer", [*PROMPT[:CHUNK], *range(200, 200 + CHUNK)])
    assert again(vllm, [*PROMPT[:CHUNK], *range(200, 200 + CHUNK), 1, 2, 3]) == 2 * CHUNK - -(-skip // BLOCK) * BLOCK
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(
    ("most", "loaded"), [(BLOCK - 1, 0), (BLOCK, BLOCK), (CHUNK + 3, CHUNK), (999, len(PROMPT) - 1)]
)
def test_a_long_hit_is_cut_in_whole_blocks(build: Build, most: int, loaded: int) -> None:
    vllm = build(max_tokens_per_load=most, min_retrieve_tokens=CHUNK)
    vllm.ask("first", PROMPT)
    assert again(vllm) == loaded
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert vllm.index.counters.stored == 4, "the rest was computed, and is known"


@pytest.mark.parametrize(("priority", "loaded"), [(-1, True), (3, True), (4, False)])
def test_less_urgent_requests_are_not_stored_but_loaded(build: Build, priority: int, *, loaded: bool) -> None:
    vllm = build(priority_limit=3)
    vllm.ask("first", PROMPT, priority=priority)
    assert again(vllm) == (len(PROMPT) - 1 if loaded else 0)
    vllm.forget_local()
    vllm.ask("last", PROMPT, priority=99)
    assert vllm.loaded_tokens["last"] == len(PROMPT) - 1


@pytest.mark.parametrize("save_decode", [False, True])
def test_skip_save(build: Build, *, save_decode: bool) -> None:
    vllm = build(save_decode=save_decode)
    vllm.ask("first", PROMPT, max_tokens=9, params=RequestParams(skip_save=True))
    assert len(vllm.index) == 0
    assert again(vllm) == 0
    vllm.forget_local()
    vllm.ask("loads", PROMPT, params=RequestParams(skip_save=True))
    assert vllm.loaded_tokens["loads"] == len(PROMPT) - 1


@pytest.mark.parametrize("save_decode", [False, True])
@pytest.mark.parametrize(("most", "loaded"), [(0, 0), (3, 0), (21, 20), (32, 32), (10_000, None)])
def test_max_save_tokens(build: Build, most: int, loaded: int | None, *, save_decode: bool) -> None:
    """The first tokens are stored, in whole blocks."""
    vllm = build(save_decode=save_decode)
    vllm.ask("first", PROMPT, max_tokens=9, params=RequestParams(max_save_tokens=most))
    assert again(vllm) == (len(PROMPT) - 1 if loaded is None else loaded)


def test_skip_load(build: Build) -> None:
    vllm = build()
    vllm.ask("first", PROMPT)
    vllm.forget_local()
    vllm.ask("computes", PROMPT, params=RequestParams(skip_load=True))
    assert vllm.loaded_tokens["computes"] == 0
    assert again(vllm) == len(PROMPT) - 1


def test_tags_do_not_share(build: Build) -> None:
    vllm = build()
    red = RequestParams(tags=(("team", "red"),))
    vllm.ask("first", PROMPT, params=red)
    assert again(vllm) == 0
    vllm.forget_local()
    vllm.ask("red", PROMPT, params=red)
    assert vllm.loaded_tokens["red"] == len(PROMPT) - 1


@pytest.mark.parametrize(("loads", "saves"), [(True, False), (False, True)])
def test_roles(build: Build, tmp_path: Path, *, loads: bool, saves: bool) -> None:
    vllm = build(Setup(folder=tmp_path, loads=loads, saves=saves))
    vllm.ask("first", PROMPT)
    assert again(vllm) == 0
    vllm.settle()
    assert bool(vllm.chunk_files()) is saves
    vllm = build(Setup(folder=tmp_path))
    assert again(vllm) == (len(PROMPT) - 1 if saves else 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_restart_serves_from_disk(build: Build, tmp_path: Path, ranks: int) -> None:
    setup = Setup(folder=tmp_path, ranks=ranks)
    vllm = build(setup)
    vllm.ask("first", PROMPT)
    vllm.settle()
    vllm = build(setup)
    vllm.add("again", PROMPT)
    vllm.step()
    assert +Counter(vllm.scheduler.hit_tokens("again")) == {Place.DISK: len(PROMPT) - 1}
    vllm.run()
    assert vllm.loaded_tokens["again"] == len(PROMPT) - 1


def test_a_chunk_that_only_one_rank_holds_is_not_known_and_goes(build: Build, tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, ranks=2)
    vllm = build(setup)
    vllm.ask("first", PROMPT[: CHUNK + 1])
    vllm.settle()
    vllm.close()
    (lost,) = vllm.chunk_files(rank=1)
    lost.unlink()
    vllm = build(setup)
    assert len(vllm.index) == 0
    vllm.step()
    assert vllm.chunk_files(rank=0) == []
    assert again(vllm, PROMPT[: CHUNK + 1]) == 0


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_decode_is_saved_with_its_tail(build: Build, run_ahead: int) -> None:
    vllm = build(save_decode=True, run_ahead=run_ahead, gpu_blocks=40)
    request = vllm.ask("first", PROMPT, max_tokens=20)
    known = len(request.all_token_ids) - 1  # the last token's KV is not computed, unless a step ran ahead
    loaded = again(vllm, [*request.all_token_ids, 1])
    assert known // BLOCK * BLOCK <= loaded <= known + 1
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_rejected_drafts_are_never_stored(build: Build) -> None:
    vllm = build(save_decode=True, drafts=4, run_ahead=1, seed=5)
    request = vllm.ask("first", PROMPT, max_tokens=40)
    assert again(vllm, [*request.all_token_ids, 1]) > len(PROMPT) + CHUNK
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("local_cpu", [True, False])
def test_a_pool_smaller_than_a_request_keeps_its_front(build: Build, tmp_path: Path, *, local_cpu: bool) -> None:
    vllm = build(slots=2, local_cpu=local_cpu, max_write_queue=2, folder=tmp_path)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert again(vllm) == 2 * CHUNK
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_a_step_is_over_when_every_rank_says_so(build: Build) -> None:
    vllm = build(ranks=2, defer_stores=True)
    vllm.add("first", PROMPT)
    vllm.step()
    assert vllm.index.counters.stored == 0, "the report left before the stores"
    vllm.settle()
    assert vllm.index.counters.stored == 4
    vllm.assert_nothing_leaked()


def test_a_trace_of_what_requests_used(tmp_path: Path) -> None:
    rules = SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)
    for start in range(2):
        scheduler = StoreScheduler(SchedulerOptions(rules, StoreConfig(record_trace=str(tmp_path / "trace"))))
        for name in ("one", "two"):
            scheduler.add_request(FakeRequest(name, PROMPT), NO_EXTRAS)
            scheduler.finish_request(name, [[]])
        scheduler.add_request(FakeRequest("short", PROMPT[: BLOCK - 1]), NO_EXTRAS)
        scheduler.finish_request("short", [[]])
        scheduler.close()
        trace = list(read_trace(tmp_path / ("trace.1" if start else "trace")))
        assert len(trace) == 2
        assert trace[0].keys == trace[1].keys
        assert len(trace[0].keys) == -(-len(PROMPT) // CHUNK)
        assert trace[0].answer_tokens == 0


@pytest.mark.parametrize("save_decode", [False, True])
def test_policies_hear_of_the_answer_when_the_request_has_ended(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, save_decode: bool
) -> None:
    """The chunks that are stored with the end of the answer count, too."""
    vllm = build(save_decode=save_decode, folder=tmp_path)
    heard: list[tuple[type, set[bytes], int]] = []
    for order in vllm.index._orders:
        monkeypatch.setattr(
            order, "end_chain", lambda keys, tokens, order=order: heard.append((type(order), {*keys}, tokens))
        )
    request = vllm.ask("one", PROMPT, max_tokens=2 * CHUNK)
    vllm.settle()
    assert [(kind, tokens) for kind, _, tokens in heard] == [(Adaptive, 2 * CHUNK)] * 2
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(request.all_token_ids)
    stored = {ref.prefix_key for ref in chunk_refs(hasher, with_tail=True) if ref.prefix_key in vllm.index}
    assert len(stored) >= 3
    assert all(stored <= keys for _, keys, _ in heard)


@pytest.mark.parametrize("failed", [False, True])
def test_a_chunk_counts_when_the_slowest_rank_has_it(*, failed: bool) -> None:
    scheduler = StoreScheduler(SchedulerOptions(SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=False)))
    layout = KVLayout(page_bytes=(64,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
    scheduler.connect([WorkerFacts(4, 4096, 0, (0,) * 4, [], Namespace({}), layout)] * 2)
    scheduler.add_request(FakeRequest("one", PROMPT), NO_EXTRAS)
    plan = scheduler.plan_step({"one": CHUNK}, lambda _: [[1, 2, 3, 4]])
    (job,) = plan.requests[0].stores
    later = FakeRequest("two", PROMPT)
    scheduler.add_request(later, NO_EXTRAS)

    scheduler.complete(StepReport({plan.number: StepResult(ranks_loaded=1, ranks_ended=1)}))
    assert scheduler.num_new_matched_tokens(later, 0) == 0
    refused = {job.step.ref.prefix_key} if failed else set()
    scheduler.complete(StepReport({plan.number: StepResult(failed_stores=refused, ranks_loaded=1, ranks_ended=1)}))
    assert scheduler.num_new_matched_tokens(later, 0) == (0 if failed else CHUNK)
    assert not scheduler._steps.in_flight


def test_known_chunks_are_not_moved_again(build: Build) -> None:
    vllm = build(budget=1000)
    for name in ("one", "two"):
        vllm.add(name, PROMPT)
    vllm.settle()
    assert vllm.index.counters.stored == 4
    assert vllm.workers[0]._mover.counters.chunks_stored == 4
    vllm.forget_local()
    vllm.ask("three", PROMPT)
    assert not vllm.scheduler._steps.in_flight
    assert vllm.workers[0]._mover.counters.chunks_stored == 4


def test_a_full_chunk_replaces_the_tail_in_its_place(build: Build) -> None:
    vllm = build()
    vllm.ask("first", PROMPT)
    vllm.ask("longer", [*PROMPT, *range(CHUNK)])
    assert vllm.index.counters.superseded_tails == 1


def test_a_chunk_is_written_in_the_stead_of_a_tail(build: Build, tmp_path: Path) -> None:
    """The queue has room for one write a step, and lost writes are repeated when any of it is offered again."""
    vllm = build(folder=tmp_path, max_write_queue=1)
    vllm.ask("longer", [*PROMPT, *range(-len(PROMPT) % CHUNK)])  # whole chunks: its own tail could be written in time
    for number in range(4):
        vllm.settle()
        vllm.ask(f"shorter {number}", PROMPT)
    vllm.settle()
    sizes = Counter(chunk.ref.num_blocks for chunk in vllm.index._chunks.values() if chunk.on_disk)
    assert sizes == {CHUNK // BLOCK: 4}, "the shorter one's end is in the fourth chunk, which it does not fill"
    vllm.assert_nothing_leaked()


def test_an_impossible_token_id_is_only_not_cached(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    vllm = build()
    request = FakeRequest("odd", [1, -5, 3])
    vllm.scheduler.add_request(request, NO_EXTRAS)
    assert vllm.scheduler.num_new_matched_tokens(request, 0) == 0
    assert vllm.scheduler.finish_request("odd", [[1]]) is False
    assert "not cached" in caplog.text


def test_before_the_workers_have_reported_nothing_is_cached() -> None:
    fresh = StoreScheduler(SchedulerOptions(SaveRules(BLOCK, CHUNK, save_decode=True, save_tails=True)))
    request = FakeRequest("early", PROMPT)
    fresh.add_request(request, NO_EXTRAS)
    assert fresh.num_new_matched_tokens(request, 0) == 0
    fresh.allocated("early", [[1, 2, 3]], 0)
    assert fresh.plan_step({"early": 40}, lambda _: [[1, 2, 3]]).requests == []
    assert fresh.finish_request("early", [[1]]) is False


def test_an_emptied_index_still_sends_its_removals(build: Build, tmp_path: Path) -> None:
    """Otherwise the files would stay, and be found again after a restart."""
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert vllm.chunk_files()
    vllm.index.remove(list(vllm.index._chunks))
    assert len(vllm.index) == 0
    vllm.settle()
    assert vllm.chunk_files() == []
