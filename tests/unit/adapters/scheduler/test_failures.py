"""Failed loads, aborts, preemption, new weights: no wrong KV is used, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.situations import PROMPT, Build, again, damage

from kvstore.adapters.vllm.requests.params import NO_PARAMS, WITHOUT_CACHE, RequestParams
from kvstore.index.plans import Place
from kvstore.model.chunks import Outcome


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
    known = [key for key in vllm.index._chunks if key in vllm.index]
    assert preempt == bool(known), "what a request computes on old weights is not kept"
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
    disk = vllm.workers[1]._mover._lanes[Place.DISK]._tier
    monkeypatch.setattr(disk, "put", lambda transfers: [Outcome.FAILED] * len(transfers))
    vllm.ask("first", PROMPT)
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert vllm.chunk_files(rank=0) == []
