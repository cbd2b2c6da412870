"""Hits that are computed all the same: chunks that were stored wrong are found, counted, removed and stored again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm, one_after_the_other
from support.remote import FakeServer

from kvstore.adapters.vllm.scheduler.canary import Canary
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.index.entries import NO_SLOT
from kvstore.index.plans import Place
from kvstore.model.chunks import ChunkRef
from kvstore.ops import metrics

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
WHOLE = len(PROMPT) - 1

Build = Callable[..., FakeVllm]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, one after the other."""
    with one_after_the_other(Setup()) as build:
        yield build


def loaded_again(vllm: FakeVllm, name: str = "again", prompt: list[int] = PROMPT) -> int:
    """Ask with vLLM's own cache empty. Returns the tokens loaded."""
    vllm.forget_local()
    vllm.ask(name, prompt)
    vllm.settle()
    return vllm.loaded_tokens[name]


def verified(vllm: FakeVllm) -> tuple[int, int]:
    """Return the numbers of compared chunks that were equal and that were not."""
    vllm.scheduler.take_tally()
    totals = vllm.scheduler.totals
    return int(totals[metrics.VERIFIED_CHUNKS.key("equal")]), int(totals[metrics.VERIFIED_CHUNKS.key("mismatch")])


def spoil(vllm: FakeVllm, rank: int = 0) -> None:
    """Change the contents of all slots."""
    cpu = vllm.workers[rank]._tiers.cpu
    held = [(chunk.slot, chunk.ref) for chunk in vllm.index._chunks.values() if chunk.memory is not NO_SLOT]
    assert held
    for slot, ref in held:
        stored = cpu.read(slot, ref)
        assert stored is not None
        stored ^= 0xFF


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [10, 64])
def test_what_is_right_stays(build: Build, ranks: int, budget: int) -> None:
    vllm = build(verify_fraction=1.0, ranks=ranks, budget=budget)
    vllm.ask("first", PROMPT)
    assert loaded_again(vllm) == 0
    assert verified(vllm) == (4 * ranks, 0)
    assert vllm.index.counters.stored == 4, "nothing is stored twice"
    assert vllm.scheduler.totals[metrics.MISSES.key("verified")] == 1
    vllm.assert_nothing_leaked()


def test_what_is_only_on_disk(build: Build, tmp_path: Path) -> None:
    vllm = build(verify_fraction=1.0, folder=tmp_path, local_cpu=False)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert loaded_again(vllm) == 0
    assert verified(vllm) == (4, 0)
    vllm.chunk_files()[0].unlink()
    assert loaded_again(vllm, "one is missing") == 0
    assert verified(vllm) == (7, 0)
    assert vllm.recovered == 0, "nobody needed it"
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_wrong_is_removed_and_stored_anew(
    build: Build, rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = build(verify_fraction=1.0, ranks=2)
    vllm.ask("first", PROMPT)
    spoil(vllm, rank)
    vllm.forget_local()
    with caplog.at_level(logging.ERROR):
        vllm.ask("again", PROMPT, max_tokens=4)
    vllm.settle()
    assert verified(vllm) == (4, 4)
    assert vllm.scheduler.totals.levels()[metrics.VERIFY_DEVIATION.key()] == 1.0
    assert len([line for line in caplog.messages if "deviates" in line]) == 1
    assert vllm.index.counters.stored == 8
    monkeypatch.setattr(vllm.scheduler._canary, "_fraction", 0.0)
    assert loaded_again(vllm, "right again") == WHOLE
    vllm.assert_nothing_leaked()


def test_wrong_bytes_leave_the_remote_tier_too(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    vllm = build(verify_fraction=1.0, server=server, max_write_queue=64)
    vllm.ask("first", PROMPT)
    vllm.settle()
    spoil(vllm)
    for chunks in server.chunks.values():
        chunks.update((ref, bytes(byte ^ 0xFF for byte in payload)) for ref, payload in chunks.items())
    vllm.forget_local()
    vllm.ask("again", PROMPT, max_tokens=4)
    vllm.settle()
    assert verified(vllm) == (0, 4)
    monkeypatch.setattr(vllm.scheduler._canary, "_fraction", 0.0)
    vllm.index.remove_all()
    assert loaded_again(vllm, "from the server") == WHOLE
    vllm.assert_nothing_leaked()


def test_what_comes_from_a_remote_tier_to_be_compared_is_announced(build: Build) -> None:
    """It is then in memory, like any loaded chunk, and routers may send other requests to it."""
    server = FakeServer()
    build(server=server, max_write_queue=64).ask("first", PROMPT)
    vllm = build(server=server, max_write_queue=64, verify_fraction=1.0, saves=False)
    vllm.ask("again", PROMPT)
    vllm.settle()
    assert verified(vllm) == (4, 0)
    assert len(vllm.heard.blocks[Place.MEMORY]) == WHOLE // BLOCK
    vllm.assert_nothing_leaked()


def test_what_was_computed_on_garbage_proves_nothing(build: Build) -> None:
    vllm = build(verify_fraction=1.0)
    vllm.ask("first", PROMPT)
    spoil(vllm)
    vllm.workers[0]._poisoned_step = 10**9
    vllm.forget_local()
    vllm.ask("again", PROMPT)
    assert verified(vllm) == (0, 0)
    assert len(vllm.index) == 4


def test_a_part_of_the_hits(build: Build) -> None:
    vllm = build(verify_fraction=0.25)
    vllm.ask("first", PROMPT)
    loaded = [loaded_again(vllm, f"hit {number}") for number in range(8)]
    assert loaded == [WHOLE, WHOLE, WHOLE, 0] * 2
    assert verified(vllm) == (8, 0)


def test_only_what_vllm_does_not_have_is_compared(build: Build) -> None:
    vllm = build(verify_fraction=1.0)
    vllm.ask("first", PROMPT)
    vllm.forget_local()
    vllm.ask("short", PROMPT[: CHUNK + BLOCK + 1])
    assert verified(vllm) == (1, 0), "the second chunk is longer than this prompt"
    vllm.ask("again", PROMPT)
    vllm.settle()
    assert verified(vllm) == (3, 0), "of the second chunk vLLM has the beginning itself"
    vllm.assert_nothing_leaked()


def test_the_answer_stays_the_same_when_vllm_asks_again() -> None:
    canary = Canary(0.5, BLOCK, StepTracker())
    chunks = [(ChunkRef(bytes([number]) * 16, 4), number * 4) for number in range(3)]
    answers = [canary.takes(request, chunks, 0) for request in ("one", "one", "two", "two", "one", "three", "four")]
    assert answers == [False, False, True, True, False, False, True]
    assert canary.take_due("two", 4 * BLOCK - 1) == []
    assert canary.take_due("two", 8 * BLOCK) == chunks[:2]
    assert canary.take_due("two", 8 * BLOCK) == []
    assert canary.take_due("one", 100 * BLOCK) == []
    canary.takes("two", chunks, 4 * BLOCK)  # preempted: it begins again
    assert canary.take_due("two", 100 * BLOCK) == chunks[1:]
    canary.end("two")
    assert canary.take_due("two", 100 * BLOCK) == []
