"""Prompts that are brought back to memory before their conversations go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.expected_back import Clock, crowd_out, wait
from support.fake_groups import FakeGroups, GroupSetup
from support.fake_parts import CHUNK
from support.fake_tables import FakeGroup
from support.fake_vllm import FakeVllm
from support.remote import FakeServer
from support.situations import PROMPT, Build, again, damage, in_memory

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.adapters.vllm.scheduler import prefetches as prefetching
from kvstore.adapters.vllm.scheduler.prefetches import BURST_S, SPAN_S
from kvstore.config import StoreConfig
from kvstore.model.chunks import ChunkRef
from kvstore.model.groups import GroupKind
from kvstore.model.keys import PrefixHasher
from kvstore.ops.metrics import HINTS, PREFETCHED_CHUNKS

SLOTS = 12
IN_S = 600.0
HERE = len(PROMPT) - 1  # tokens of the prompt in whole blocks
WINDOWS = (FakeGroup(GroupKind.WINDOW, 4, 7), FakeGroup(GroupKind.FULL, 4))
NEXT_TURN = [*PROMPT, *range(230, 230 + CHUNK)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, real = Clock(), time.monotonic
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.scheduler.time.monotonic", lambda: real() + clock.ahead_s)
    return clock


@pytest.fixture
def vllm(build: Build, tmp_path: Path) -> FakeVllm:
    return build(slots=SLOTS, gpu_blocks=200, budget=1000, folder=tmp_path, disk_chunks=256)


def leave(vllm: FakeVllm, prompt: list[int] = PROMPT, in_s: float = IN_S, name: str = "first") -> None:
    """Ask for a prompt that is expected back, and have it leave memory."""
    vllm.ask(name, prompt, params=RequestParams(prefetch_s=in_s))
    vllm.settle()
    crowd_out(vllm)
    assert in_memory(vllm, prompt) < len(prompt) - 1


def leave_all(vllm: FakeVllm, prompts: Sequence[list[int]]) -> None:
    """Ask for prompts that are expected back one second after the other, and have them leave memory."""
    for number, prompt in enumerate(prompts):
        vllm.ask(f"{number}", prompt, params=RequestParams(prefetch_s=IN_S + number))
        vllm.settle()
    crowd_out(vllm)


def results(vllm: FakeVllm) -> list[float]:
    vllm.scheduler.take_tally()
    return [vllm.scheduler.totals[HINTS.key("prefetch", result)] for result in ("done", "partly", "refused")]


def test_a_prompt_is_in_memory_when_its_conversation_goes_on(vllm: FakeVllm, clock: Clock) -> None:
    leave(vllm)
    clock.ahead_s += IN_S
    wait(vllm)
    assert in_memory(vllm) == HERE
    assert results(vllm) == [1, 0, 0]
    assert vllm.scheduler.totals[PREFETCHED_CHUNKS.key()] == 4
    for worker in vllm.workers:
        worker._mover.counters.chunks_loaded_from_disk = 0
    assert again(vllm, NEXT_TURN) == HERE
    assert [worker._mover.counters.chunks_loaded_from_disk for worker in vllm.workers] == [0]
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_nobody_waits_longer_than_the_client_said(vllm: FakeVllm, clock: Clock) -> None:
    """While others run, a prompt is brought when it is due, and not before."""
    leave(vllm)
    clock.ahead_s += IN_S - SPAN_S / 2
    busy = vllm.add("busy", range(200, 210), max_tokens=40)
    for _ in range(10):
        vllm.step()
    assert busy.state == "running"
    assert in_memory(vllm) < HERE
    clock.ahead_s += SPAN_S
    vllm.run()
    assert in_memory(vllm) == HERE
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(("left_s", "is_early"), [(SPAN_S - 5, True), (SPAN_S + 60, False)])
def test_an_idle_engine_brings_what_is_due_soon(vllm: FakeVllm, clock: Clock, left_s: float, *, is_early: bool) -> None:
    leave(vllm)
    clock.ahead_s += IN_S - left_s
    wait(vllm)
    assert (in_memory(vllm) == HERE) == is_early
    crowd_out(vllm, 150)  # and when it is due, it is brought again
    clock.ahead_s += left_s
    wait(vllm)
    assert in_memory(vllm) == HERE


def test_a_conversation_that_has_gone_on_is_not_expected(vllm: FakeVllm, clock: Clock) -> None:
    leave(vllm)
    vllm.ask("next turn", NEXT_TURN)
    vllm.settle()
    crowd_out(vllm, 150)
    clock.ahead_s += IN_S
    wait(vllm)
    assert in_memory(vllm) < CHUNK
    assert results(vllm) == [1, 0, 0]
    assert vllm.scheduler.totals[PREFETCHED_CHUNKS.key()] == 0


def test_a_request_gets_what_is_on_its_way(vllm: FakeVllm, clock: Clock) -> None:
    leave(vllm)
    clock.ahead_s += IN_S
    vllm.step()
    assert vllm.scheduler.has_work
    assert again(vllm, NEXT_TURN) == HERE
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_prompts_have_half_of_the_slots_together(vllm: FakeVllm, clock: Clock) -> None:
    prompts = [[number, *PROMPT[1:]] for number in (210, 211)]
    leave_all(vllm, prompts)
    clock.ahead_s += IN_S + 2
    wait(vllm)
    assert [in_memory(vllm, prompt) == HERE for prompt in prompts] == [True, False]
    prefetches = vllm.connected.prefetches
    assert len(prefetches._coming) == 1, "the other one came too late"
    clock.ahead_s += SPAN_S + 1
    wait(vllm)
    assert not any([prefetches._coming, prefetches._brought, prefetches._anchored, prefetches._num_coming])


def test_a_prompt_behind_one_without_room_is_brought(vllm: FakeVllm, clock: Clock) -> None:
    prompts = [[210, *PROMPT[1:]], [211, *PROMPT[1:]], [212, *PROMPT[1 : CHUNK + 1]]]
    leave_all(vllm, prompts)
    clock.ahead_s += IN_S + 3
    wait(vllm)
    assert [in_memory(vllm, prompt) >= len(prompt) - 1 for prompt in prompts] == [True, False, True]


def test_a_long_prompt_costs_a_step_no_more_than_a_short_one(
    build: Build, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are looked at in windows, and loaded in pieces."""
    monkeypatch.setattr(prefetching, "_WINDOW", 3)
    monkeypatch.setattr(prefetching, "_AT_ONCE", 2)
    vllm = build(slots=60, gpu_blocks=200, budget=1000, folder=tmp_path, disk_chunks=400)
    long = [*range(100, 100 + 9 * CHUNK + 1)]
    leave_all(vllm, [long])
    for first in range(2):
        crowd_out(vllm, 10 * first)
    assert in_memory(vllm, long) == 0
    pieces: list[int] = []
    prepare = vllm.connected.loads.bring

    def bring(refs: Sequence[ChunkRef], *others: Any) -> int | None:
        pieces.append(len(refs))
        return prepare(refs, *others)

    monkeypatch.setattr(vllm.connected.loads, "bring", bring)
    clock.ahead_s += IN_S
    wait(vllm)
    assert in_memory(vllm, long) == 9 * CHUNK
    assert max(pieces) <= 3
    assert vllm.scheduler.totals[PREFETCHED_CHUNKS.key()] == 0, "not told yet"
    results(vllm)
    assert vllm.scheduler.totals[PREFETCHED_CHUNKS.key()] == 9
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_an_idle_engine_is_busy_for_a_short_time_only(vllm: FakeVllm, clock: Clock) -> None:
    """Or vLLM could neither sleep nor end; a step whose end nobody plans is not waited for, either."""
    leave(vllm)
    clock.ahead_s += IN_S - 30
    vllm.step()
    assert vllm.scheduler.has_work
    clock.ahead_s += BURST_S
    assert not vllm.scheduler.has_work


def test_an_idle_engine_stops_after_a_while(vllm: FakeVllm, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_AT_ONCE", 1)
    leave(vllm)
    clock.ahead_s += IN_S
    begun: list[Sequence[ChunkRef]] = []

    def bring(refs: Sequence[ChunkRef], *_: object) -> int:
        begun.append(refs)
        return 10**6  # the number of a load that is over

    monkeypatch.setattr(vllm.connected.loads, "bring", bring)
    monkeypatch.setattr(vllm.connected.prefetches, "_count", lambda _: None)
    for _ in range(4):
        vllm.step()
        clock.ahead_s += 0.9 * BURST_S
    assert len(begun) == 2
    vllm.ask("works", range(200, 210))
    assert len(begun) == 4, "and goes on beside others"


def test_pins_that_have_ended_give_way(vllm: FakeVllm, clock: Clock) -> None:
    vllm.ask("first", PROMPT, params=RequestParams(prefetch_s=IN_S, pin=True))
    vllm.settle()
    clock.ahead_s += StoreConfig().pin_max_secs + 1
    wait(vllm)
    assert vllm.index.leases == 0


def test_far_ones_make_room_for_near_ones(vllm: FakeVllm, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_MOST_CHUNKS", 9)
    for number, in_s in enumerate((1e7, 500.0, IN_S)):
        vllm.ask(f"{number}", [210 + number, *PROMPT[1:]], params=RequestParams(prefetch_s=in_s))
        vllm.settle()
    coming = vllm.connected.prefetches._coming
    assert [*coming] == ["1", "2"]
    assert results(vllm) == [3, 0, 0]
    vllm.ask("last", [220, *PROMPT[1:]], params=RequestParams(prefetch_s=1e7))
    vllm.settle()
    assert [*coming] == ["1", "2"]
    assert results(vllm) == [3, 0, 1]
    assert vllm.connected.prefetches._anchors.keys() == coming.keys()


def test_conversations_that_share_their_last_chunk_are_all_expected(vllm: FakeVllm, clock: Clock) -> None:
    """One of them goes on with the next prompt."""
    for number in range(3):
        vllm.add(f"{number}", [*PROMPT[: 3 * CHUNK], number, 9], params=RequestParams(prefetch_s=IN_S))
    vllm.settle()
    assert len(vllm.connected.prefetches._coming) == 3
    vllm.ask("next turn", [*PROMPT[: 3 * CHUNK], 0, 9, *range(60)])
    assert len(vllm.connected.prefetches._coming) == 2


def test_a_next_turn_that_comes_before_the_last_step_is_over(build: Build, tmp_path: Path, clock: Clock) -> None:
    vllm = build(slots=SLOTS, gpu_blocks=200, budget=1000, folder=tmp_path, run_ahead=1, save_decode=True)
    first = vllm.add("first", PROMPT, max_tokens=6, params=RequestParams(prefetch_s=IN_S))
    while first.state != "finished":
        vllm.step()
    vllm.add("next turn", NEXT_TURN)
    vllm.settle()
    prefetches = vllm.connected.prefetches
    assert not any([prefetches._coming, prefetches._anchored])


def test_an_id_that_is_used_twice_is_one_expectation(vllm: FakeVllm, clock: Clock) -> None:
    for number in range(4):
        vllm.ask("same", [210 + number, *PROMPT[1:]], params=RequestParams(prefetch_s=IN_S))
        vllm.settle()
    prefetches = vllm.connected.prefetches
    (coming,) = prefetches._coming.values()
    assert prefetches._num_coming == len(coming.refs)
    assert len(prefetches._anchored) == len(prefetches._anchors) == 1


def test_an_id_that_is_used_twice_before_its_chunks_are_stored(vllm: FakeVllm) -> None:
    prefetches = vllm.connected.prefetches
    for anchor in (b"first", b"second"):
        prefetches.announce("same", anchor, IN_S, PrefixHasher(CHUNK, CHUNK))
    assert [*prefetches._anchored] == [b"second"]


def test_a_prompt_of_more_than_half_of_the_slots_is_brought_in_part(vllm: FakeVllm, clock: Clock) -> None:
    long = [*range(120, 120 + 8 * CHUNK + 1)]
    leave(vllm, long)
    clock.ahead_s += IN_S
    wait(vllm)
    assert in_memory(vllm, long) >= SLOTS // 2 * CHUNK
    assert results(vllm) == [0, 1, 0]


def test_without_memory_nothing_is_expected(build: Build, tmp_path: Path, clock: Clock) -> None:
    vllm = build(slots=SLOTS, gpu_blocks=200, budget=1000, folder=tmp_path, local_cpu=False)
    vllm.ask("first", PROMPT, params=RequestParams(prefetch_s=IN_S))
    vllm.settle()
    clock.ahead_s += IN_S
    wait(vllm)
    assert results(vllm) == [0, 0, 1]


@pytest.mark.parametrize(
    ("event", "left"),
    [
        (lambda vllm: vllm.reset(preempt=True), 0),
        (lambda vllm: vllm.scheduler.clear(), 0),
        (lambda vllm: setattr(vllm.scheduler, "enabled", False), HERE),
    ],
    ids=["reset", "clear", "switched off"],
)
@pytest.mark.parametrize("begins", [False, True])
def test_events_in_the_middle(
    vllm: FakeVllm, clock: Clock, event: Callable[[FakeVllm], object], left: int, *, begins: bool
) -> None:
    leave(vllm)
    clock.ahead_s += IN_S
    if begins:
        vllm.step()
        assert vllm.scheduler.has_work
    event(vllm)
    wait(vllm)
    assert not vllm.scheduler.has_work
    vllm.scheduler.enabled = True
    assert again(vllm) == left
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_new_weights_end_all_expectations(vllm: FakeVllm, clock: Clock) -> None:
    leave(vllm)
    vllm.reset(preempt=True)
    assert not vllm.connected.prefetches._coming
    vllm.ask("first again", PROMPT)  # now that its chunks have the same keys
    vllm.settle()
    crowd_out(vllm, 150)
    clock.ahead_s += IN_S
    wait(vllm)
    assert in_memory(vllm) < HERE


def test_what_cannot_be_read_now_ends_it(vllm: FakeVllm, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may take the slots again before the next look."""
    leave(vllm)
    looks: list[int] = []

    def bring(*_: object) -> int:
        looks.append(1)
        return 10**6  # the number of a load that is over

    monkeypatch.setattr(vllm.connected.loads, "bring", bring)
    clock.ahead_s += IN_S
    wait(vllm)
    assert len(looks) == 1


def test_what_is_damaged_ends_it(vllm: FakeVllm, clock: Clock) -> None:
    leave(vllm)
    for path in vllm.chunk_files():
        damage(path)
    clock.ahead_s += IN_S
    wait(vllm)
    assert in_memory(vllm) < HERE
    assert not vllm.connected.prefetches._current
    again(vllm)
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_prompt_that_only_a_remote_tier_has(build: Build, clock: Clock, *, is_there: bool) -> None:
    server = FakeServer()
    vllm = build(slots=SLOTS, gpu_blocks=200, budget=1000, server=server, hold_s=1.0)
    leave(vllm)
    clock.ahead_s += IN_S
    if not is_there:
        server.lose(list(server.all_chunks()))
    wait(vllm)
    assert in_memory(vllm) == (3 * CHUNK if is_there else 0), "the queue had no room for the tail"
    vllm.settle()
    vllm.assert_nothing_leaked()


def test_two_ranks_bring_the_same(build: Build, tmp_path: Path, clock: Clock) -> None:
    vllm = build(slots=SLOTS, gpu_blocks=200, budget=1000, folder=tmp_path, ranks=2, run_ahead=1)
    leave(vllm)
    clock.ahead_s += IN_S
    wait(vllm)
    assert in_memory(vllm) == HERE
    assert again(vllm, NEXT_TURN) == HERE
    vllm.settle()
    vllm.assert_nothing_leaked()


@pytest.mark.parametrize(("slots", "is_expected"), [(24, True), (10, True), (2, False)])
def test_a_prompt_is_expected_up_to_a_checkpoint_for_which_there_is_room(
    tmp_path: Path, clock: Clock, slots: int, *, is_expected: bool
) -> None:
    setup = GroupSetup(groups=WINDOWS, stages=((2, 2),), chunk=CHUNK, slots=slots, folder=tmp_path, budget=200)
    vllm = FakeGroups(replace(setup, interval=CHUNK))
    try:
        vllm.ask("long", [number * 7 % 50 for number in range(4 * CHUNK + 1)], params=RequestParams(prefetch_s=IN_S))
        vllm.settle()
        prefetches = vllm.connected.prefetches
        assert bool(prefetches._coming) == bool(prefetches._anchored) == is_expected
        for coming in prefetches._coming.values():
            assert coming.num_parts
            assert len(coming.refs) <= slots // 2
    finally:
        vllm.close()


def test_a_checkpoint_comes_with_its_chunks(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing comes, because a part is of no use."""
    monkeypatch.setattr(prefetching, "_AT_ONCE", 2)
    vllm = FakeGroups(GroupSetup(groups=WINDOWS, stages=((2, 2),), chunk=CHUNK, slots=24, folder=tmp_path, budget=200))
    prompts = [[number * 7 % 50 for number in range(shift, shift + 4 * CHUNK + 1)] for shift in (0, 1)]
    try:
        for name, prompt in zip("ab", prompts, strict=True):
            vllm.ask(name, prompt, params=RequestParams(prefetch_s=IN_S))
            vllm.settle()
        wanted = [coming.refs for coming in vllm.connected.prefetches._coming.values()]
        assert all(coming.num_parts for coming in vllm.connected.prefetches._coming.values())
        for number in range(12):
            for turn in range(2):
                vllm.forget_local()
                vllm.ask(f"other {number} {turn}", [number, *range(3 * CHUNK - 1)])
                vllm.settle()
        assert not any(vllm.index.in_memory(ref.prefix_key) for refs in wanted for ref in refs)
        vllm.index.remove([wanted[1][1].prefix_key])
        clock.ahead_s += IN_S
        wait(vllm)
        assert [{vllm.index.in_memory(ref.prefix_key) for ref in refs} for refs in wanted] == [{True}, {False}]
        vllm.settle()
        vllm.assert_nothing_leaked()
    finally:
        vllm.close()


@pytest.mark.parametrize(
    ("salts", "expected"),
    [("aaab", {"0", "1", "3"}), ("aaaa", {"0", "1", "2"}), ("aabb", {"0", "1", "2"}), ("aabbcc", {"0", "1", "2"})],
)
def test_a_tenant_with_more_than_another_makes_room(
    vllm: FakeVllm, clock: Clock, salts: str, expected: set[str]
) -> None:
    """Three prompts fit. What was brought last leaves for the prompt of a tenant that has nothing."""
    for number, salt in enumerate(salts):
        params = RequestParams(prefetch_s=IN_S + number)
        vllm.ask(f"{number}", [10 + number, *range(2 * CHUNK)], salt=salt, params=params)
        vllm.settle()
    crowd_out(vllm)
    for _ in salts:
        clock.ahead_s += IN_S / len(salts) + 1
        wait(vllm)
    assert set(vllm.scheduler._connected.prefetches._brought) == expected  # type: ignore[union-attr]
    vllm.assert_nothing_leaked()
