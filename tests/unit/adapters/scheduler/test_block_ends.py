"""Prompts that part inside a chunk; `support/fake_vllm.py` checks every byte of every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm, one_after_the_other

from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.telemetry.announcer import Stored
from kvstore.index.plans import Place
from kvstore.ops import metrics

FIRST = list(range(3 * CHUNK + 1))

Build = Callable[..., FakeVllm]
WAYS: list[dict[str, Any]] = [{}, {"async_load": True}, {"layerwise": True}, {"ranks": 2}, {"stages": (2, 3)}]


def parting(shared: int) -> list[int]:
    """Return a prompt that has so many tokens in common with the first one."""
    return [*FIRST[:shared], *range(100, 100 + 2 * CHUNK)]


@pytest.fixture
def build() -> Iterator[Build]:
    """Yield a function that makes engines, one after the other."""
    with one_after_the_other(Setup()) as build:
        yield build


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize("shared", [BLOCK, CHUNK - 1, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 2 * BLOCK])
def test_what_is_shared_is_loaded(
    build: Build, tmp_path: Path, shared: int, way: dict[str, Any], *, from_disk: bool
) -> None:
    vllm = build(folder=tmp_path, **way)
    vllm.ask("first", FIRST)
    vllm.settle()
    if from_disk:
        vllm = build(folder=tmp_path, **way)
    vllm.forget_local()
    vllm.ask("other", parting(shared))
    assert vllm.loaded_tokens["other"] == shared // BLOCK * BLOCK
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_a_part_is_announced_as_far_as_a_request_has_it(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of chunks on disk at start are unknown until a request has them; the rest is announced later."""
    build(folder=tmp_path).ask("first", FIRST)
    vllm = build(folder=tmp_path, saves=False)
    heard: list[object] = []
    monkeypatch.setattr(vllm.heard, "hear", heard.extend)
    other = vllm.ask("other", parting(CHUNK + 2 * BLOCK))
    vllm.settle()
    names = {name for event in heard if isinstance(event, Stored) for name in event.blocks.hashes}
    assert names == set(other.block_hashes[: CHUNK // BLOCK + 2])
    vllm.forget_local()
    first = vllm.ask("first", FIRST)
    vllm.settle()
    names = {name for event in heard if isinstance(event, Stored) for name in event.blocks.hashes}
    assert names == set(first.block_hashes[: 3 * CHUNK // BLOCK])


def test_a_part_is_not_compared(build: Build) -> None:
    """From some block on the request computes other tokens."""
    vllm = build(verify_fraction=1.0)
    vllm.ask("first", FIRST)
    vllm.forget_local()
    vllm.ask("other", parting(CHUNK + 2 * BLOCK))
    vllm.settle()
    vllm.scheduler.take_tally()
    assert vllm.scheduler.totals[metrics.VERIFIED_CHUNKS.key("mismatch")] == 0
    assert vllm.scheduler.totals[metrics.VERIFIED_CHUNKS.key("equal")] == 1
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("only_if_faster", [True, False])
def test_a_part_that_is_computed_faster_is_not_read(build: Build, tmp_path: Path, *, only_if_faster: bool) -> None:
    vllm = build(folder=tmp_path, local_cpu=False)
    vllm.ask("first", FIRST)
    vllm.settle()
    choice = vllm.scheduler._connected.choice  # type: ignore[union-attr]
    choice._rules = LoadRules(only_if_faster=only_if_faster)
    for _ in range(3):
        choice.loaded({Place.DISK: 256}, 0.1)
        choice.computed(256, 0.2)
    vllm.forget_local()
    vllm.ask("most of it", parting(2 * CHUNK - BLOCK))
    vllm.settle()  # until then its own chunks are in memory
    vllm.forget_local()
    vllm.ask("one block", [*FIRST[: CHUNK + BLOCK], *range(200, 200 + CHUNK)])
    assert vllm.loaded_tokens["most of it"] == 2 * CHUNK - BLOCK
    assert vllm.loaded_tokens["one block"] == (CHUNK if only_if_faster else CHUNK + BLOCK)


def test_a_part_that_was_computed_instead_is_in_memory_from_then_on(build: Build, tmp_path: Path) -> None:
    """Otherwise it would be computed for each request, as the chunk that has it stays on disk."""
    build(folder=tmp_path).ask("first", FIRST)
    vllm = build(folder=tmp_path)
    choice = vllm.scheduler._connected.choice  # type: ignore[union-attr]
    for _ in range(3):
        choice.loaded({Place.DISK: 256}, 0.1)
        choice.computed(256, 0.2)
    written = vllm.index.disk_used_bytes
    for number in range(5):
        vllm.forget_local()
        vllm.ask(f"request {number}", FIRST[: CHUNK + BLOCK + 1])
        vllm.settle()
    assert [vllm.loaded_tokens[f"request {number}"] for number in range(5)] == [CHUNK, *[CHUNK + BLOCK] * 4]
    assert vllm.index.disk_used_bytes == written, "not once more where the chunk is"
    vllm.assert_nothing_leaked()
