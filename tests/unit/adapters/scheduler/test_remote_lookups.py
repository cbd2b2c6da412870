"""Lookups at a remote tier through the whole engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.fake_parts import CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S, Gate
from support.remote import FakeServer

from kvstore.adapters.vllm.scheduler.lookup import PASS_BUDGET_S
from kvstore.ops import metrics

PROMPT = list(range(2 * CHUNK + 1))


@pytest.fixture
def build() -> Iterator[Callable[..., FakeVllm]]:
    """Yield a function that makes engines over one remote tier, which live until the end of the test."""
    engines: list[FakeVllm] = []

    def build_(**setup: object) -> FakeVllm:
        engines.append(FakeVllm(Setup(**setup)))  # type: ignore[arg-type]
        return engines[-1]

    yield build_
    for engine in engines:
        engine.close()


def filled(build: Callable[..., FakeVllm]) -> FakeServer:
    """Return a remote tier that has a prompt."""
    server = FakeServer()
    vllm = build(server=server, max_write_queue=16)
    vllm.ask("first", PROMPT)
    vllm.settle()
    assert len(server.all_chunks()) == 2
    server.questions.clear()
    return server


@pytest.mark.parametrize("async_load", [False, True])
@pytest.mark.parametrize("hold_s", [0.0, 60.0])
def test_an_answer_that_nobody_else_may_use_is_enough_to_load(
    build: Callable[..., FakeVllm], hold_s: float, *, async_load: bool
) -> None:
    vllm = build(server=filled(build), hold_s=hold_s, async_load=async_load)
    for number in range(2):
        vllm.forget_local()
        vllm.scheduler.clear()
        vllm.ask(f"{number}", PROMPT)
        assert vllm.loaded_tokens[f"{number}"] == 2 * CHUNK
    vllm.settle()
    vllm.assert_nothing_leaked()
    assert not vllm.connected.remote._requests


def test_a_lookup_that_times_out_is_computed_and_the_next_one_is_not(build: Callable[..., FakeVllm]) -> None:
    """They share the prompt, and the missing answer to the first one says nothing about it."""
    server, gate = filled(build), Gate()
    vllm = build(server=server, lookup_timeout_s=HANG_GUARD_S)
    vllm.connected.remote._timeout_s = 0.02  # of the request, and not of the tier
    server.before_contains = gate
    vllm.ask("late", PROMPT, max_tokens=1)
    assert vllm.loaded_tokens["late"] == 0
    gate.open()
    vllm.connected.remote._timeout_s = HANG_GUARD_S
    vllm.forget_local()
    vllm.settle()
    vllm.scheduler.clear()
    vllm.ask("next", PROMPT)
    assert vllm.loaded_tokens["next"] == 2 * CHUNK
    vllm.scheduler.take_tally()
    assert vllm.scheduler.totals[metrics.LOOKUP_TIMEOUTS.key()] == 1


def test_every_plan_ends_a_pass(build: Callable[..., FakeVllm]) -> None:
    vllm = build(server=FakeServer())
    vllm.connected.remote._left_s = 0.0
    vllm.scheduler.plan_step({}, lambda _: [[]])
    assert vllm.connected.remote._left_s == PASS_BUDGET_S
