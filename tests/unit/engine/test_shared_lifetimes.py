"""Times to live of chunks that two engines share through a remote tier, in any order of calls, against a model.

No engine finds a block after the last end that any store of it has had, wherever its own copy came from. Before that
end, whoever stored it may find it, and an engine with room has it.
"""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.checks import check_idle
from support.redis_server import wait_for
from support.remote import REMOTE, FakeServer, install
from support.rig import BLOCK, Rig, tokens_of
from support.schedules import schedules

from kvstore.engine.engine import CacheEngine
from kvstore.engine.requests import Request
from kvstore.transfer.mover import StoreJob

SHORT, LONG = 24, 40  # tokens; a prompt of the one length begins that of the other
WAIT_S = 30.0
STEP_S = 10.0
SLACK_S = 1.0  # real time that calls may take

ENGINES = st.integers(0, 1)
PROMPTS = st.tuples(st.integers(1, 2), st.sampled_from([SHORT, LONG]))
ACTIONS = st.one_of(
    st.tuples(st.just("store"), ENGINES, PROMPTS, st.sampled_from([15.0, 35.0, 35.0, None])),
    st.tuples(st.just("store"), ENGINES, PROMPTS, st.sampled_from([15.0, 35.0, 35.0, None])),
    st.tuples(st.just("retrieve"), ENGINES, PROMPTS),
    st.tuples(st.just("wait"), st.integers(1, 2)),
    st.tuples(st.just("reopen"), ENGINES),
    st.tuples(st.just("forget"), ENGINES, PROMPTS),
    st.tuples(st.just("lose"), PROMPTS),
)
Action = tuple[str, *tuple[object, ...]]


class Clock:
    """A clock that can be put forward, in the place of both of the module ``time``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = (time.monotonic, time.time)
        patch.setattr(time, "monotonic", lambda: real[0]() + self.ahead_s)
        patch.setattr(time, "time", lambda: real[1]() + self.ahead_s)


class Sharing:
    """Two engines, the server between them, and until when each block may be found."""

    def __init__(self, server: FakeServer, clock: Clock) -> None:
        self.server = server
        self.clock = clock
        self.rig = Rig()
        self.engines = [self.open(), self.open()]
        self.until_s: dict[tuple[int, int], float] = {}  # by prompt and block

    def open(self) -> CacheEngine:
        return self.rig.open(slots=16, remote=REMOTE)

    def do_store(self, which: int, prompt: tuple[int, int], ttl_s: float | None) -> None:
        seed, num_tokens = prompt
        self.rig.store(self.engines[which], tokens_of(seed, num_tokens), ttl_s=ttl_s)
        end_s = math.inf if ttl_s is None else time.time() + ttl_s
        for block in range(num_tokens // BLOCK):
            self.until_s[seed, block] = max(end_s, self.until_s.get((seed, block), 0.0))
        assert self.engines[which].lookup(tokens_of(seed, num_tokens)) == num_tokens
        assert self.engines[which].flush(WAIT_S)

    def do_retrieve(self, which: int, prompt: tuple[int, int]) -> None:
        self.rig.retrieve(self.engines[which], tokens_of(*prompt))

    def do_wait(self, steps: int) -> None:
        self.clock.ahead_s += steps * STEP_S

    def do_reopen(self, which: int) -> None:
        self.engines[which].close()
        self.engines[which] = self.open()

    def do_forget(self, which: int, prompt: tuple[int, int]) -> None:
        self.engines[which].clear(tokens_of(*prompt))

    def do_lose(self, prompt: tuple[int, int]) -> None:
        """Let the server evict every other chunk."""
        self.server.lose([ref for ref in self.server.all_chunks() if (ref.prefix_key[0] + prompt[0]) % 2])

    def check(self) -> None:
        now_s = time.time() - SLACK_S
        for seed in (1, 2):
            ends = [self.until_s.get((seed, block), 0.0) for block in range(LONG // BLOCK)]
            most = next((block for block, end_s in enumerate(ends) if end_s < now_s), LONG // BLOCK)
            for engine in self.engines:
                assert engine.lookup(tokens_of(seed, LONG)) <= most * BLOCK, f"prompt {seed} has ended"


@schedules(20)
@example(actions=[("store", 0, (1, LONG), 15.0), ("retrieve", 1, (1, LONG)), ("wait", 2)])
@example(
    actions=[("store", 0, (1, LONG), 15.0), ("store", 1, (1, SHORT), 35.0), ("wait", 2), ("retrieve", 0, (1, LONG))]
)
@example(
    actions=[("store", 0, (1, SHORT), None), ("store", 0, (1, LONG), 15.0), ("wait", 2), ("retrieve", 1, (1, LONG))]
)
@given(actions=st.lists(ACTIONS, min_size=3, max_size=12))
@pytest.mark.parametrize("reads_fronts", [True, False])
def test_any_order(monkeypatch: pytest.MonkeyPatch, *, reads_fronts: bool, actions: list[Action]) -> None:
    with monkeypatch.context() as patch:
        server = install(patch)
        server.keeps_lifetimes, server.reads_fronts = True, reads_fronts
        sharing = Sharing(server, Clock(patch))
        try:
            for name, *how in actions:
                getattr(sharing, f"do_{name}")(*how)
                sharing.check()
            for engine in sharing.engines:
                check_idle(engine)
        finally:
            for engine in sharing.engines:
                engine.close()


def test_an_engine_finds_what_another_keeps_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later end reaches the tier, and from there an engine that was not told of it."""
    server, clock = install(monkeypatch), Clock(monkeypatch)
    server.keeps_lifetimes = True
    sharing = Sharing(server, clock)
    sharing.do_store(0, (1, LONG), 15.0)
    sharing.do_store(1, (1, LONG), 35.0)
    longer_s = time.time() + 35.0 - STEP_S
    wait_for("the tier is told", lambda: min(server.ends.values()) > longer_s)  # for which no flush waits
    sharing.do_wait(2)
    assert sharing.rig.retrieve(sharing.engines[0], tokens_of(1, LONG)) == LONG
    sharing.do_wait(2)
    assert sharing.engines[0].lookup(tokens_of(1, LONG)) == 0
    for engine in sharing.engines:
        engine.close()


def test_a_time_to_live_counts_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes until a chunk is sent is not added to it."""
    server, clock = install(monkeypatch), Clock(monkeypatch)
    server.keeps_lifetimes = True
    sharing = Sharing(server, clock)
    engine = sharing.engines[0]
    plan = engine._planner.plan_store

    def plan_slowly(request: Request, ttl_s: float | None) -> list[StoreJob]:
        jobs = plan(request, ttl_s)
        clock.ahead_s += STEP_S
        return jobs

    monkeypatch.setattr(engine._planner, "plan_store", plan_slowly)
    end_s = time.time() + 15
    sharing.rig.store(engine, tokens_of(1, LONG), ttl_s=15)
    assert engine.flush(WAIT_S)
    assert len(server.ends) == 3
    assert all(0 <= sent_s - end_s <= SLACK_S for sent_s in server.ends.values())
    for engine in sharing.engines:
        engine.close()


def test_a_chunk_without_end_that_is_found_by_its_key_only_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others store a chunk again if its trail is unknown, but not with an end that its first store did not ask for."""
    server = install(monkeypatch)
    server.keeps_lifetimes = True
    sharing = Sharing(server, Clock(monkeypatch))
    sharing.rig.store(sharing.engines[0], tokens_of(1, LONG))
    assert sharing.engines[0].flush(WAIT_S)
    for trails in server.trails.values():
        trails.clear()
    sharing.rig.store(sharing.engines[1], tokens_of(1, LONG), ttl_s=15)
    assert sharing.engines[1].flush(WAIT_S)
    assert server.ends == {}
    for engine in sharing.engines:
        engine.close()
