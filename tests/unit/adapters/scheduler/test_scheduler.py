"""Scheduler side and workers together, one situation at a time; `support/fake_vllm.py` checks every byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_vllm import BLOCK, CHUNK, FakeRequest, FakeVllm, Setup

from kvstore.adapters.vllm.plan import StepReport, StepResult, WorkerFacts
from kvstore.adapters.vllm.requests.params import NO_PARAMS, WITHOUT_CACHE, RequestParams
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadChoice
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.catalog.plans import Place
from kvstore.chunks import Outcome
from kvstore.keys import NO_EXTRAS, Namespace, PrefixKey
from kvstore.layout import KVLayout
from kvstore.policies import Adaptive
from kvstore.policies.traces import read_trace

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
OTHER = [5, *PROMPT]
PLAIN = Setup()

Build = Callable[..., FakeVllm]


@pytest.fixture
def build() -> Iterator[Build]:
    """Makes engines, and ends them one after the other: a new one in the same folder is a restart."""
    engines: list[FakeVllm] = []

    def build_(setup: Setup = PLAIN, **changes: object) -> FakeVllm:
        if engines:
            engines[-1].close()
        engines.append(FakeVllm(replace(setup, **changes)))  # type: ignore[arg-type] # checked by the dataclass
        return engines[-1]

    yield build_
    for engine in engines:
        engine.close()


@pytest.fixture
def on_disk(tmp_path: Path) -> Setup:
    """Chunks pass through memory to the disk, so every hit reads a file."""
    return Setup(folder=tmp_path, local_cpu=False)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096] ^= 1
    path.write_bytes(content)


def again(vllm: FakeVllm, prompt: list[int] = PROMPT, *, salt: str = "") -> int:
    """Ask with vLLM's own cache empty; how many tokens were loaded?"""
    vllm.forget_local()
    vllm.ask("again", prompt, salt=salt)
    return vllm.loaded_tokens["again"]


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
    """vLLM tells nothing of most of them. Taken for steps that compute, they made computing look like no work."""
    computed: list[int] = []
    monkeypatch.setattr(LoadChoice, "computed", lambda _, num_tokens, seconds: computed.append(num_tokens))
    vllm = build(on_disk, async_load=True)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert {again(vllm) for _ in range(20)} == {len(PROMPT) - 1}
    vllm.ask("last", OTHER)
    assert computed == [len(PROMPT), *[1] * 20, len(OTHER)]


@pytest.mark.parametrize("async_load", [True, False])
def test_a_request_is_one_use_of_each_chunk(build: Build, monkeypatch: pytest.MonkeyPatch, *, async_load: bool) -> None:
    """Also if vLLM has it, it is loaded, or others come in between: or policies would see hits that were none."""
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


@pytest.mark.parametrize("params", [WITHOUT_CACHE, RequestParams(tags=(("team", "red"),))], ids=["without", "tagged"])
@pytest.mark.parametrize("owner_is_tagged", [False, True])
def test_whoever_shares_vllms_blocks_waits_for_a_load_that_may_fail(
    build: Build, on_disk: Setup, params: RequestParams, *, owner_is_tagged: bool
) -> None:
    owners = RequestParams(tags=(("team", "blue"),)) if owner_is_tagged else NO_PARAMS
    vllm = build(on_disk, run_ahead=1)
    vllm.ask("first", PROMPT, params=owners)
    vllm.settle()
    for path in vllm.chunk_files():
        damage(path)
    vllm.forget_local()
    vllm.add("owner", PROMPT, params=owners)
    sharer = vllm.add("sharer", [*PROMPT[: 2 * CHUNK + BLOCK], 7, 7, 7, 7, 7], params=params)
    vllm.step()
    assert sharer.state == "waiting"
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_a_time_to_live(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    vllm.settle()
    assert vllm.chunk_files() == [], "it stays in memory"
    now_s += 59
    vllm.forget_local()
    vllm.ask("in time", PROMPT, params=RequestParams(skip_save=True))
    assert vllm.loaded_tokens["in time"] == len(PROMPT) - 1
    now_s += 2
    vllm.forget_local()
    vllm.ask("late", PROMPT)
    assert vllm.loaded_tokens["late"] == 0
    vllm.settle()
    assert len(vllm.chunk_files()) == 4, "what is computed anew has no time to live"
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(("ttl_s", "expired"), [(10, True), (1000, False), (None, False)])
def test_who_stores_it_for_longer_keeps_it(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ttl_s: float | None, *, expired: bool
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    vllm.ask("second", PROMPT, params=RequestParams(ttl_s=ttl_s))
    vllm.settle()
    assert len(vllm.chunk_files()) == (4 if ttl_s is None else 0)
    now_s += 61
    assert again(vllm) == (0 if expired else len(PROMPT) - 1)
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_a_tail_that_stays_is_not_given_up_for_a_chunk_that_goes(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build()
    vllm.ask("first", PROMPT)
    vllm.ask("longer", [*PROMPT, *range(CHUNK)], params=RequestParams(ttl_s=60))
    now_s += 61
    assert again(vllm) == len(PROMPT) - 1


def test_a_time_to_live_counts_where_nobody_looks_anything_up(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(loads=False)
    vllm.ask("first", PROMPT, params=RequestParams(ttl_s=60))
    now_s += 61
    vllm.ask("other", range(100, 100 + CHUNK))
    assert vllm.index.counters.expired == 4


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("pin", [True, None])
def test_a_pinned_prompt_is_not_evicted(build: Build, run_ahead: int, *, pin: bool | None) -> None:
    vllm = build(slots=8, run_ahead=run_ahead, gpu_blocks=200, budget=CHUNK)
    vllm.ask("first", PROMPT, params=RequestParams(pin=pin))
    vllm.run()
    for number in range(6):
        vllm.ask(f"other {number}", [100 + number, *range(3 * CHUNK - 1)])
    assert again(vllm) == (len(PROMPT) - 1 if pin else 0)
    vllm.ask("unpin", PROMPT, params=replace(WITHOUT_CACHE, pin=False))
    assert vllm.index.leases == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("save_decode", [False, True])
def test_a_pin_waits_for_whoever_stores_the_same(build: Build, *, save_decode: bool) -> None:
    vllm = build(budget=1000, save_decode=save_decode)
    vllm.add("stores", PROMPT)
    vllm.add("pins", PROMPT, params=RequestParams(pin=True))
    vllm.settle()
    assert sum(chunk.uses for chunk in vllm.index._chunks.values()) == 4
    vllm.ask("unpin", PROMPT, params=replace(WITHOUT_CACHE, pin=False))
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_a_pin_ends_with_its_time_unless_it_is_renewed(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: now_s)
    vllm = build(slots=8, gpu_blocks=200)
    longest_s = SchedulerOptions(vllm.scheduler._rules).pin_max_s
    vllm.ask("first", PROMPT, params=RequestParams(pin=True))
    now_s += longest_s - 1
    vllm.ask("renewed", PROMPT, params=RequestParams(pin=True))
    now_s += longest_s - 1
    vllm.ask("other", range(100, 100 + CHUNK))
    assert vllm.index.leases == 1
    now_s += 1
    vllm.ask("another", range(200, 200 + CHUNK))
    assert vllm.index.leases == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_pins_hold_half_of_the_pool_and_end_with_new_weights(build: Build) -> None:
    vllm = build(slots=8, gpu_blocks=200)
    for number in range(3):
        vllm.ask(f"{number}", [100 + number, *range(3 * CHUNK - 1)], params=RequestParams(pin=True))
    assert sum(chunk.uses for chunk in vllm.index._chunks.values()) == 4
    vllm.reset(preempt=True)
    assert vllm.index.leases == 0
    vllm.settle()
    vllm.assert_nothing_leaked()


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
    assert vllm.scheduler.hit_split("again") == (0, len(PROMPT) - 1, 0)
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
@pytest.mark.parametrize("broken_rank", [0, 1])
@pytest.mark.parametrize("fault", [Path.unlink, damage])
def test_failed_load_is_computed_and_stored_anew(
    build: Build, on_disk: Setup, fault: Callable[[Path], None], broken_rank: int, run_ahead: int
) -> None:
    vllm = build(on_disk, ranks=2, run_ahead=run_ahead)
    vllm.ask("first", PROMPT)
    vllm.settle()
    for path in vllm.chunk_files(broken_rank):
        fault(path)
    again(vllm)
    assert vllm.recovered == 1
    assert vllm.index.counters.failed_loads > 0
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert again(vllm) > 0
    assert vllm.recovered == 1


def test_nothing_is_stored_from_steps_planned_before_a_failure_was_known(build: Build, on_disk: Setup) -> None:
    vllm = build(on_disk, run_ahead=2, budget=CHUNK)
    vllm.ask("first", PROMPT)
    vllm.settle()
    for path in vllm.chunk_files():
        damage(path)
    vllm.forget_local()
    stored = vllm.index.counters.stored
    vllm.add("again", [*PROMPT, *range(20, 20 + 2 * CHUNK)])
    vllm.step()
    vllm.step()
    assert [bool(step.failed_blocks) for step in vllm.in_flight] == [True, False]
    vllm.step()  # the first report
    assert vllm.index.counters.stored == stored
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_others_wait_for_blocks_whose_load_may_fail(build: Build, on_disk: Setup) -> None:
    vllm = build(on_disk, run_ahead=1)
    vllm.ask("first", PROMPT)
    vllm.settle()
    for path in vllm.chunk_files():
        damage(path)
    vllm.forget_local()
    vllm.add("owner", PROMPT)
    sharer = vllm.add("sharer", [*PROMPT[: 2 * CHUNK + BLOCK], 7, 7, 7, 7, 7])
    stranger = vllm.add("stranger", [9] * CHUNK)
    vllm.step()
    assert (sharer.state, stranger.state) == ("waiting", "running")
    vllm.step()
    vllm.step()
    assert sharer.state == "running"
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_blocks_spoilt_by_a_failed_load_are_not_found_after_an_abort(build: Build, on_disk: Setup) -> None:
    vllm = build(on_disk)
    vllm.ask("first", PROMPT)
    vllm.settle()
    for path in vllm.chunk_files():
        damage(path)
    vllm.forget_local()
    owner = vllm.add("owner", PROMPT)
    vllm.step()
    assert owner.state == "running"
    vllm.abort(owner)
    vllm.ask("next", PROMPT)
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_abort_before_scheduled(build: Build) -> None:
    vllm = build(save_decode=True)
    vllm.abort(vllm.add("gone", PROMPT))
    vllm.run()
    assert not vllm.kept
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("save_decode", [False, True])
def test_abort_in_the_middle_of_a_prefill(build: Build, *, save_decode: bool) -> None:
    vllm = build(budget=CHUNK + BLOCK, save_decode=save_decode)
    request = vllm.add("gone", PROMPT)
    vllm.step()
    vllm.abort(request)
    assert bool(vllm.kept) is save_decode
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert again(vllm) == (CHUNK + BLOCK if save_decode else CHUNK)


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


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_preempted_and_resumed(build: Build, run_ahead: int) -> None:
    vllm = build(run_ahead=run_ahead, save_decode=True, budget=20)
    request = vllm.add("one", PROMPT, max_tokens=9)
    for _ in range(5):
        vllm.step()
    vllm.preempt(request)
    vllm.forget_local()
    vllm.run()
    assert vllm.loaded_tokens["one"] >= 2 * CHUNK, "it came back by way of the cache"
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_few_blocks_force_preemption(build: Build) -> None:
    vllm = build(gpu_blocks=20, save_decode=True)
    requests = [vllm.add(f"{salt}", PROMPT[:30], max_tokens=30, salt=f"{salt}") for salt in range(3)]
    vllm.settle()
    assert all(request.num_outputs == 30 for request in requests)
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("local_cpu", [True, False])
def test_a_pool_smaller_than_a_request_keeps_its_front(build: Build, tmp_path: Path, *, local_cpu: bool) -> None:
    vllm = build(slots=2, local_cpu=local_cpu, max_write_queue=2, folder=tmp_path)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert again(vllm) == 2 * CHUNK
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("preempt", [True, False])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_reset_in_the_middle_forgets_old_weights(
    build: Build, tmp_path: Path, *, preempt: bool, run_ahead: int
) -> None:
    vllm = build(folder=tmp_path, run_ahead=run_ahead, budget=CHUNK, save_decode=True)
    vllm.add("one", PROMPT, max_tokens=20)
    vllm.step()
    vllm.step()
    vllm.reset(preempt=preempt)
    vllm.run()
    vllm.forget_local()
    vllm.ask("two", PROMPT)
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert vllm.chunk_files(), "the new weights' KV is written, too"
    assert len(build(folder=tmp_path).index) == 0, "but nobody else may find it"


def test_reset_cancels_what_an_ended_request_was_about_to_store(build: Build, tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, save_decode=True)
    vllm = build(setup)
    request = vllm.add("old", PROMPT, max_tokens=9)
    while request.num_outputs < 6:
        vllm.step()
    vllm.abort(request)
    assert vllm.kept
    vllm.reset(preempt=True)
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert vllm.chunk_files() == []
    assert len(build(setup).index) == 0


def test_a_write_that_fails_on_one_rank_leaves_nothing_on_the_other(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = build(folder=tmp_path, ranks=2)
    monkeypatch.setattr(vllm.workers[1]._mover._lanes[Place.DISK], "_write", lambda *_: [Outcome.FAILED])
    vllm.ask("first", PROMPT)
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert vllm.chunk_files(rank=0) == []


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
        scheduler = StoreScheduler(SchedulerOptions(rules, record_trace=tmp_path / "trace"))
        for name in ("one", "two"):
            scheduler.add_request(FakeRequest(name, PROMPT), NO_EXTRAS)
            scheduler.finish_request(name, [])
        scheduler.add_request(FakeRequest("short", PROMPT[: BLOCK - 1]), NO_EXTRAS)
        scheduler.finish_request("short", [])
        scheduler.close()
        trace = list(read_trace(tmp_path / ("trace.1" if start else "trace")))
        assert len(trace) == 2
        assert trace[0].keys == trace[1].keys
        assert len(trace[0].keys) == -(-len(PROMPT) // CHUNK)


@pytest.mark.parametrize("failed", [False, True])
def test_a_chunk_counts_when_the_slowest_rank_has_it(*, failed: bool) -> None:
    scheduler = StoreScheduler(SchedulerOptions(SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=False)))
    layout = KVLayout(page_bytes=(64,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
    scheduler.connect([WorkerFacts(4, 4096, 0, (0,) * 4, [], Namespace({}), layout)] * 2)
    scheduler.add_request(FakeRequest("one", PROMPT), NO_EXTRAS)
    plan = scheduler.plan_step({"one": CHUNK}, lambda _: [1, 2, 3, 4])
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


def test_an_impossible_token_id_is_only_not_cached(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    vllm = build()
    request = FakeRequest("odd", [1, -5, 3])
    vllm.scheduler.add_request(request, NO_EXTRAS)
    assert vllm.scheduler.num_new_matched_tokens(request, 0) == 0
    assert vllm.scheduler.finish_request("odd", [1]) is False
    assert "not cached" in caplog.text


def test_before_the_workers_have_reported_nothing_is_cached() -> None:
    fresh = StoreScheduler(SchedulerOptions(SaveRules(BLOCK, CHUNK, save_decode=True, save_tails=True)))
    request = FakeRequest("early", PROMPT)
    fresh.add_request(request, NO_EXTRAS)
    assert fresh.num_new_matched_tokens(request, 0) == 0
    fresh.allocated("early", [1, 2, 3], 0)
    assert fresh.plan_step({"early": 40}, lambda _: [1, 2, 3]).requests == []
    assert fresh.finish_request("early", [1]) is False


def test_an_emptied_index_still_sends_its_removals(build: Build, tmp_path: Path) -> None:
    """Or the files would stay, and be found again after a restart."""
    vllm = build(folder=tmp_path)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert vllm.chunk_files()
    vllm.index.remove(list(vllm.index._chunks))
    assert len(vllm.index) == 0
    vllm.settle()
    assert vllm.chunk_files() == []
