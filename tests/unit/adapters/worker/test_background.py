"""Asynchronous loads and stores: other requests continue, no access is at a wrong time, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm, one_after_the_other
from support.gate import HANG_GUARD_S, Gate, until

from kvstore.adapters.vllm.scheduler import choice
from kvstore.index.plans import MissReason, Place
from kvstore.model.chunks import Outcome
from kvstore.model.keys import NO_EXTRAS, PrefixHasher
from kvstore.ops import metrics
from kvstore.paged.base import HostPagedKV
from kvstore.tiers.disk.tier import DiskTier
from kvstore.transfer.mover import Mover

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))
OTHER = [7, *range(20)]

Build = Callable[..., FakeVllm]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Yield a function that makes engines over one folder, whose hits are all loaded from disk asynchronously."""
    plain = Setup(folder=tmp_path, local_cpu=False, async_load=True, async_save=True)
    with one_after_the_other(plain) as build:
        yield build


@pytest.fixture
def slow_disk(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return a gate at which reads wait."""
    monkeypatch.setattr(DiskTier, "get", gate.before(DiskTier.get))
    return gate


def warm(vllm: FakeVllm) -> FakeVllm:
    """Put the prompt on disk, and nowhere else."""
    vllm.ask("first", PROMPT)
    vllm.settle()
    vllm.forget_local()
    return vllm


def reads(vllm: FakeVllm) -> int:
    return sum(worker._counters().chunks_loaded_from_disk for worker in vllm.workers)


def assert_idle(vllm: FakeVllm) -> None:
    vllm.settle()
    vllm.assert_nothing_leaked()


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


def logged(caplog: pytest.LogCaptureFixture) -> list[type[BaseException] | None]:
    """Return the kinds of exceptions whose tracebacks are in the log."""
    return [record.exc_info[0] for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("ranks", [1, 2])
def test_others_compute_while_a_request_waits(build: Build, slow_disk: Gate, ranks: int) -> None:
    vllm = warm(build(ranks=ranks))
    waiting = vllm.add("waiting", PROMPT)
    vllm.step()
    assert slow_disk.reached.wait(HANG_GUARD_S)
    other = vllm.add("other", OTHER, max_tokens=5)
    for _ in range(6):
        vllm.step()
    assert (other.state, waiting.state) == ("finished", "loading")
    slow_disk.open()
    vllm.run()
    assert waiting.state == "finished"
    assert vllm.loaded_tokens["waiting"] == len(PROMPT) - 1
    assert reads(vllm) == 4 * ranks
    assert_idle(vllm)


def fail_chunk(monkeypatch: pytest.MonkeyPatch, number: int) -> list[None]:
    """Let every read of the prompt's chunk of this number fail. Returns a list that grows with each."""
    hasher = PrefixHasher(CHUNK, BLOCK, NO_EXTRAS)
    hasher.update(PROMPT)
    original, tries = DiskTier.get, list[None]()

    def get(self: DiskTier, transfers: Any) -> list[Outcome]:
        outcomes = original(self, transfers)
        for position, transfer in enumerate(transfers):
            if transfer.ref.prefix_key == hasher.chunk_keys()[number]:
                outcomes[position] = Outcome.FAILED
                tries.append(None)
        return outcomes

    monkeypatch.setattr(DiskTier, "get", get)
    return tries


def test_a_failed_load_is_computed_and_not_tried_again(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = warm(build())
    tries = fail_chunk(monkeypatch, 0)
    vllm.ask("again", PROMPT)
    assert len(tries) == 1
    assert vllm.recovered == 1
    assert_idle(vllm)


def test_what_lies_before_a_failure_is_used(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = warm(build())
    fail_chunk(monkeypatch, 1)
    request = vllm.add("again", PROMPT, max_tokens=3)
    while request.state != "running":
        loaded_tokens = request.num_computed_tokens
        vllm.step()
        time.sleep(0.002)
    assert loaded_tokens == CHUNK
    vllm.run()
    assert_idle(vllm)


def test_an_aborted_request_keeps_its_blocks_until_the_load_is_over(build: Build, slow_disk: Gate) -> None:
    vllm = warm(build())
    request = vllm.add("gone", PROMPT)
    vllm.step()
    assert slow_disk.reached.wait(HANG_GUARD_S)
    vllm.abort(request)
    free = len(vllm.free)
    vllm.step()
    assert len(vllm.free) == free, "somebody else would have got blocks that are being written"
    slow_disk.open()
    vllm.run()
    assert_idle(vllm)


def test_a_chunk_on_its_way_is_waited_for_and_read_once(build: Build, slow_disk: Gate) -> None:
    warm(build())
    vllm = build(local_cpu=True)  # memory keeps what is loaded
    before = reads(vllm)
    for name in ("one", "two"):
        vllm.add(name, PROMPT)
    vllm.step()
    assert slow_disk.reached.wait(HANG_GUARD_S)
    vllm.step()
    assert [request.state for request in vllm.waiting] == ["loading", "waiting"]
    slow_disk.open()
    vllm.run()
    assert reads(vllm) - before == 4
    whole_tokens = len(PROMPT) - 1
    assert vllm.loaded_tokens["one"] == whole_tokens
    assert vllm.loaded_tokens["two"] in {0, whole_tokens}, "by then vLLM has it itself, or memory a moment before"
    assert_idle(vllm)


def test_a_load_from_memory_does_not_wait_for_a_slower_one(build: Build, slow_disk: Gate) -> None:
    warm(build())
    vllm = build(local_cpu=True)  # the prompt is on disk only
    other = [7, *PROMPT]
    vllm.ask("first", other)
    vllm.settle()
    vllm.forget_local()
    waiting = vllm.add("waiting", PROMPT)
    vllm.step()
    assert slow_disk.reached.wait(HANG_GUARD_S)
    brief = vllm.add("brief", other)

    def has_ended() -> bool:
        vllm.step()
        return brief.state == "finished"

    assert until(has_ended)
    assert waiting.state == "loading"
    assert vllm.loaded_tokens["brief"] > 2 * CHUNK
    slow_disk.open()
    vllm.run()
    assert_idle(vllm)


def test_a_load_that_new_weights_overtake_is_of_no_use(build: Build, slow_disk: Gate) -> None:
    vllm = warm(build())
    request = vllm.add("old", PROMPT)
    vllm.step()
    assert slow_disk.reached.wait(HANG_GUARD_S)
    vllm.weights += 1
    vllm.forget_local()
    vllm.scheduler.reset_cache()
    vllm.step()
    slow_disk.open()
    vllm.run()  # vLLM's model notices if one byte of the old weights is used
    assert request.state == "finished"
    assert vllm.recovered == 1
    assert_idle(vllm)


def test_blocks_of_a_preempted_request_are_read_before_they_are_given_away(
    build: Build, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = build(local_cpu=True)
    slow = vllm.add("slow", PROMPT, max_tokens=8)
    with monkeypatch.context() as patch:
        patch.setattr(HostPagedKV, "gather_chunks", gate.before(HostPagedKV.gather_chunks))
        vllm.step()
        assert gate.reached.wait(HANG_GUARD_S)
        assert vllm.index.counters.stored == 0, "the step did not wait for it"
        vllm.preempt(slow)
        (worker,) = vllm.workers
        waits: list[bool] = []
        original = worker._background.finish_saves

        def finish_saves() -> None:
            waits.append(True)
            gate.open()
            original()

        patch.setattr(worker._background, "finish_saves", finish_saves)
        vllm.step()
        assert waits == [True]
    vllm.run()
    vllm.forget_local()
    vllm.ask("again", PROMPT)
    assert vllm.loaded_tokens["again"] == len(PROMPT) - 1
    assert_idle(vllm)


def test_an_ended_request_keeps_its_blocks_until_they_are_read(
    build: Build, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = build()
    monkeypatch.setattr(HostPagedKV, "gather_chunks", gate.before(HostPagedKV.gather_chunks))
    vllm.add("quick", PROMPT)
    for _ in range(3):
        vllm.step()
    assert set(vllm.kept) == {"quick"}
    gate.open()
    vllm.run()
    assert not vllm.kept
    assert_idle(vllm)


def test_computing_what_is_dear_to_load(build: Build) -> None:
    vllm = warm(build())
    choice = vllm.connected.choice
    for _ in range(3):
        choice.loaded({Place.DISK: 64}, 60.0)
        choice.computed(64, 0.001)
    vllm.ask("again", PROMPT)
    assert vllm.loaded_tokens["again"] == 0
    vllm.scheduler.take_tally()
    assert vllm.scheduler.totals[metrics.MISSES.key(MissReason.RECOMPUTE_FASTER.value)] == 1
    assert_idle(vllm)


def test_a_fault_in_a_load_beside_the_steps_fails_that_load(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = warm(build())
    monkeypatch.setattr(Mover, "_scatter_arrivals", raising(ZeroDivisionError()))
    assert vllm.ask("again", PROMPT).state == "finished"
    assert vllm.recovered == 1
    assert logged(caplog) == [ZeroDivisionError]
    monkeypatch.undo()
    vllm.settle()
    vllm.forget_local()
    vllm.ask("later", PROMPT)
    assert vllm.loaded_tokens["later"] == len(PROMPT) - 1
    assert_idle(vllm)


def test_a_fault_in_a_store_beside_the_steps_fails_that_store(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = build()
    (worker,) = vllm.workers
    monkeypatch.setattr(worker._background._storer.paged, "gather_chunks", raising(ZeroDivisionError()))
    assert vllm.ask("first", PROMPT).state == "finished"
    vllm.settle()
    assert set(logged(caplog)) == {ZeroDivisionError}
    monkeypatch.undo()
    vllm.forget_local()
    vllm.ask("again", PROMPT)
    assert vllm.loaded_tokens["again"] == 0
    assert_idle(vllm)


def test_those_that_have_ended_do_not_count_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chat, turn after turn, no other request would gain from an asynchronous load, so none is made."""
    monkeypatch.setattr(choice, "BRIEF_S", 0.0)
    with one_after_the_other(Setup(gpu_blocks=200, slots=40, async_load=None)) as build:
        vllm = build()
        prompt = [number % 50 for number in range(8 * CHUNK)]  # long enough to be measured
        for number in range(6):
            vllm.ask(f"turn {number}", prompt)
            vllm.forget_local()
            assert vllm.loaded_tokens[f"turn {number}"] == (len(prompt) - 1 if number else 0)
        assert vllm.connected.choice._load_s({Place.MEMORY: len(prompt)})  # enough is known to choose
        assert vllm.connected.loads._number == 0
