"""Lifetimes of prompts in any order of hints, evictions, restarts, clears and jumps of clocks, against a model.

What a client retains is found until its time is over, and what has a time to live is not found after it, nor after a
restart.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fake_parts import CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.schedules import schedules
from support.situations import PROMPT

from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams
from kvstore.model.keys import NO_EXTRAS

HERE = len(PROMPT) - 1
SETUP = Setup(slots=10, disk_chunks=52, gpu_blocks=200, budget=1000)  # its share of the disk holds three prompts
LASTING = [[number, *PROMPT[1:]] for number in range(100, 103)]  # may be retained, expected back, demoted, dropped
PASSING = [[number, *PROMPT[1:]] for number in range(110, 112)]  # have a time to live
NEVER = -math.inf
TIMES = st.sampled_from([5.0, 60.0, 1000.0, 1000.0])

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.just("retain"), TIMES),
    st.tuples(st.just("ask"), st.integers(0, 2), st.sampled_from(["end", "prefetch", "drop", "demote", ""]), TIMES),
    st.tuples(st.just("pass"), st.integers(0, 1), TIMES),
    st.tuples(st.just("crowd"), st.integers(0, 1)),
    st.tuples(st.just("crowd"), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 30.0, 500.0])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 30.0, 500.0])),
    st.tuples(st.just("jump"), st.sampled_from([-1e6, -40.0, 40.0, 1e6])),
    st.tuples(st.just("restart")),
    st.tuples(st.just("clear")),
)


class Times:
    """The clocks of the scheduler: one that only goes on, and one on the wall, which jumps."""

    def __init__(self) -> None:
        self.ahead_s = self.jumped_s = 0.0
        self._real = (time.monotonic, time.time)

    def monotonic(self) -> float:
        return self._real[0]() + self.ahead_s

    def wall(self) -> float:
        return self._real[1]() + self.ahead_s + self.jumped_s


class Lifetimes:
    """One engine after the other over a folder, and what each prompt may be expected to be."""

    def __init__(self, folder: Path, times: Times) -> None:
        self.setup = replace(SETUP, folder=folder)
        self.times = times
        self.vllm = FakeVllm(self.setup)
        self.retained_s = [NEVER] * len(LASTING)  # until when, on the clock that only goes on
        self.retained_wall_s = [NEVER] * len(LASTING)
        self.expires_s = [NEVER] * len(PASSING)
        self.expires_wall_s = [NEVER] * len(PASSING)

    def act(self, action: tuple[str, *tuple[object, ...]]) -> None:
        name, *how = action
        do: Callable[..., None] = getattr(self, f"do_{name}")
        do(*how)
        self.vllm.settle()
        self.check()

    def ask(self, prompt: list[int], params: RequestParams) -> None:
        self.vllm.forget_local()
        self.vllm.ask("asked", prompt, params=params)
        self.vllm.settle()  # so that writes need not be dropped

    def do_ask(self, number: int, hint: str, seconds: float) -> None:
        hints = {
            "retain": RequestParams(retain_s=seconds),
            "end": RequestParams(retain_s=0.0),
            "prefetch": RequestParams(prefetch_s=seconds),
            "drop": RequestParams(drop=True),
            "demote": RequestParams(demote=True),
        }
        begin_s, begin_wall_s = self.times.monotonic(), self.times.wall()
        self.ask(LASTING[number], hints.get(hint, NO_PARAMS))
        if hint == "end":
            self.retained_s[number] = self.retained_wall_s[number] = NEVER
        if hint == "retain" and self.found(LASTING[number]) == HERE:
            self.retained_s[number] = max(self.retained_s[number], begin_s + seconds)
            self.retained_wall_s[number] = max(self.retained_wall_s[number], begin_wall_s + seconds)

    def do_pass(self, number: int, seconds: float) -> None:
        self.ask(PASSING[number], RequestParams(ttl_s=seconds))
        self.expires_s[number] = max(self.expires_s[number], self.times.monotonic() + seconds)
        self.expires_wall_s[number] = max(self.expires_wall_s[number], self.times.wall() + seconds + 1)  # whole seconds

    def do_crowd(self, first: int) -> None:
        """Fill memory and disk, each prompt twice, or the policy would refuse the later ones."""
        for number in range(20 * first, 20 * first + 20):
            for _ in range(2):
                self.ask([120 + number, *range(3 * CHUNK - 1)], NO_PARAMS)

    def do_wait(self, seconds: float) -> None:
        self.times.ahead_s += seconds
        self.ask([255], NO_PARAMS)

    def do_jump(self, seconds: float) -> None:
        self.times.jumped_s += seconds

    def do_restart(self) -> None:
        self.vllm.close()
        self.vllm = FakeVllm(self.setup)
        now_s, now_wall_s = self.times.monotonic(), self.times.wall()
        self.retained_s = [now_s + min(until_s - now_wall_s, 1000.0) for until_s in self.retained_wall_s]
        self.retained_wall_s = [now_wall_s + until_s - now_s for until_s in self.retained_s]
        self.expires_s = [now_s + min(until_s - now_wall_s, 1001.0) for until_s in self.expires_wall_s]
        self.expires_wall_s = [now_wall_s + until_s - now_s for until_s in self.expires_s]

    def do_clear(self) -> None:
        self.vllm.scheduler.clear()
        self.retained_s = [NEVER] * len(LASTING)
        self.retained_wall_s = [NEVER] * len(LASTING)

    def found(self, prompt: list[int]) -> int:
        return sum(self.vllm.scheduler.find(prompt, NO_EXTRAS).values())

    def check(self) -> None:
        now_s = self.times.monotonic()
        for prompt, until_s in zip(LASTING, self.retained_s, strict=True):
            assert until_s < now_s + 1 or self.found(prompt) == HERE, "it is retained"
        for prompt, until_s in zip(PASSING, self.expires_s, strict=True):
            assert until_s >= now_s or not self.found(prompt), "its time is over"


@schedules(12)
@example(actions=[("ask", 0, "retain", 1000.0), ("ask", 0, "drop", 5.0), ("crowd", 0), ("restart",), ("crowd", 1)])
@example(actions=[("ask", 0, "retain", 1000.0), ("jump", -1e6), ("restart",), ("crowd", 0), ("crowd", 1)])
@example(actions=[("ask", 0, "retain", 60.0), ("wait", 30.0), ("jump", 1e6), ("restart",), ("clear",)])
@example(actions=[("pass", 0, 5.0), ("pass", 0, 60.0), ("wait", 30.0), ("wait", 500.0)])
@example(actions=[("pass", 0, 60.0), ("restart",), ("wait", 30.0), ("wait", 30.0), ("wait", 1.0)])
@example(actions=[("pass", 0, 60.0), ("jump", -1e6), ("restart",), ("wait", 500.0), ("wait", 500.0)])
@given(actions=st.lists(ACTIONS, min_size=4, max_size=14))
def test_any_order(actions: list[tuple[str, *tuple[object, ...]]]) -> None:
    times = Times()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", times.monotonic)
        patch.setattr("kvstore.adapters.vllm.scheduler.hints.time.time", times.wall)
        patch.setattr("kvstore.adapters.vllm.scheduler.hints.time.time_ns", lambda: int(times.wall() * 1e9))
        lives = Lifetimes(Path(folder), times)
        try:
            for action in actions:
                lives.act(action)
            lives.vllm.assert_nothing_leaked()
        finally:
            lives.vllm.close()
