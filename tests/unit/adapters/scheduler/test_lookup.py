"""Lookups at a remote tier off the scheduler's thread: number of questions, wait of a step, validity of an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from support.gate import HANG_GUARD_S
from support.lookups import SOURCE, Remote, World, refs

from kvstore.adapters.vllm.scheduler import lookup as lookups
from kvstore.adapters.vllm.scheduler.lookup import PASS_BUDGET_S, RemoteLookup
from kvstore.index.remote_view import RemoteView
from kvstore.model.errors import ClosedError, TierError
from kvstore.tiers import questions
from kvstore.tiers.directory import RemoteDirectory
from kvstore.tiers.questions import MAX_TOGETHER, Question


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for gate in made.gates:
        gate.open()
    made.lookup.close()


# Number of questions


def test_what_queues_behind_a_question_is_asked_together(world: World) -> None:
    gate = world.hang(world.remote)
    world.remote.there = set(refs(*range(0, 256, 2)))
    assert not world.lookup.answered("0", refs(0))
    assert gate.reached.wait(HANG_GUARD_S)
    for number in range(1, 256):
        assert not world.lookup.answered(str(number), refs(number))
    gate.open()
    assert [world.ask(str(number), refs(number)) for number in range(256)] == [
        [number % 2 == 0] for number in range(256)
    ]
    assert [len(question) for question in world.remote.questions] == [1, 255]
    assert world.lookup.timeouts == 0


def test_a_question_is_of_bounded_size_but_for_one_that_is_longer_by_itself(world: World) -> None:
    gate = world.hang(world.remote)
    world.lookup.answered("first", refs(0))
    assert gate.reached.wait(HANG_GUARD_S)
    sizes = [MAX_TOGETHER // 2, MAX_TOGETHER // 2, MAX_TOGETHER + 1, 1]
    begin = 1
    for number, size in enumerate(sizes):
        world.lookup.answered(f"next {number}", refs(*range(begin, begin + size)))
        begin += size
    gate.open()
    world.ask("next 3", refs(begin - 1))
    assert [len(question) for question in world.remote.questions] == [1, MAX_TOGETHER, MAX_TOGETHER + 1, 1]


def test_what_somebody_asks_about_nobody_asks_again(world: World) -> None:
    """A prefix that requests share is one question."""
    gate = world.hang(world.remote)
    world.remote.there = set(refs(1, 2, 3))
    world.lookup.answered("one", refs(1, 2))
    assert gate.reached.wait(HANG_GUARD_S)
    world.lookup.answered("two", refs(1, 2, 3))
    world.lookup.answered("three", refs(2, 1))
    gate.open()
    assert world.ask("three", refs(2, 1)) == [True, True]
    assert world.ask("two", refs(1, 2, 3)) == [True, True, True]
    assert world.ask("one", refs(1, 2)) == [True, True]
    assert [list(question) for question in world.remote.questions] == [refs(1, 2), refs(3)]


def test_the_answer_for_a_request_that_is_gone_is_not_lost(world: World) -> None:
    gate = world.hang(world.remote)
    world.remote.there = set(refs(1))
    world.lookup.answered("aborted", refs(1))
    assert gate.reached.wait(HANG_GUARD_S)
    world.lookup.answered("waits", refs(1))
    world.lookup.end("aborted")
    gate.open()
    assert world.ask("waits", refs(1)) == [True]
    assert world.unknown(refs(1)) == []
    assert len(world.remote.questions) == 1
    world.lookup.end("waits")
    assert not world.lookup._requests
    assert not world.lookup._open


# Wait of a step


class Clock:
    """Clock that stands still except during waits."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now_s


def test_all_requests_of_a_pass_have_one_budget(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(lookups, "time", clock)
    monkeypatch.setattr(questions, "time", clock)
    answer = world.lookup._directory.wait

    def wait(asked: Sequence[Question], timeout_s: float) -> bool:
        """Each answer takes 1.5 ms."""
        clock.waits.append(timeout_s)
        clock.now_s += 0.0015
        return timeout_s > 0.0015 and answer(asked, HANG_GUARD_S)

    monkeypatch.setattr(world.lookup._directory, "wait", wait)
    for _ in range(2):
        clock.waits.clear()
        gate = world.hang(world.remote)
        begin_s, first = clock.now_s, len(world.remote.questions) * 1000
        for number in range(first, first + 256):
            if len(clock.waits) == 2:
                gate = world.hang(world.remote)  # no answer comes any more
            else:
                gate.open()
            world.lookup.answered(str(number), refs(number))
        assert clock.waits == pytest.approx([PASS_BUDGET_S, PASS_BUDGET_S - 0.0015, PASS_BUDGET_S - 0.003])
        assert clock.now_s - begin_s == pytest.approx(0.0045)
        gate.open()
        world.lookup.end_pass()
        world.lookup._took_s = 0.0


def test_while_the_tier_is_slow_a_pass_does_not_wait_at_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(_: object, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    gate = world.hang(world.remote)
    monkeypatch.setattr(world.lookup._directory, "wait", wait)
    for number in range(10):
        assert not world.lookup.answered(str(number), refs(number))
        world.lookup.end_pass()
    assert len(waits) == 1
    gate.open()
    assert world.ask("9", refs(9)) == [False]
    world.hang(world.remote)
    waits.clear()
    world.lookup._took_s = 0.001  # of the last answer
    world.lookup.answered("next", refs(100))
    assert len(waits) == 1, "it answers soon again"


# Validity of an answer


def test_who_has_waited_too_long_finds_nothing_and_others_are_told_all_the_same(world: World) -> None:
    lookup = world.new(timeout_s=0.02)
    world.remote.there = set(refs(1))
    gate = world.hang(world.remote)
    assert world.ask("late", refs(1)) == [False]
    assert lookup.timeouts == 1
    assert world.unknown(refs(1)) == refs(1), "that nobody answered is no answer"
    assert lookup.view.unknown(refs(1, 2), time.monotonic(), lookup.told("late")) == [], "it asks nothing more"
    gate.open()
    lookup._timeout_s = HANG_GUARD_S
    assert world.ask("next", refs(1)) == [True]
    assert len(world.remote.questions) == 1, "its answer came late, and was not lost"
    lookup.end("late")
    assert world.ask("late", refs(1)) == [True], "another lookup, as after a preemption"
    assert lookup.timeouts == 1


def test_a_tier_that_fails_says_nothing_about_what_it_holds(world: World) -> None:
    def fail() -> None:
        raise TierError("broken on purpose")

    world.remote.there = set(refs(1))
    world.remote.before = fail
    assert world.ask("one", refs(1)) == [False]
    assert world.unknown(refs(1)) == refs(1)
    world.remote.before = lambda: None
    assert world.holds("one", refs(1)) == [False]
    assert world.ask("two", refs(1)) == [True]


def test_a_shard_that_fails_is_no_answer_but_one_that_lacks_its_part_is(world: World) -> None:
    def fail() -> None:
        raise TierError("broken on purpose")

    parts = [Remote(), Remote()]
    world.lookup.close()
    world.lookup = RemoteLookup(RemoteDirectory(parts), RemoteView(60.0), HANG_GUARD_S)
    parts[0].there = set(refs(1))
    parts[1].before = fail
    assert world.ask("one", refs(1, 2)) == [False, False]
    assert world.unknown(refs(1, 2)) == refs(1)


@pytest.mark.parametrize("hold_s", [0.0, 60.0])
def test_an_answer_counts_for_who_asked_and_for_others_as_long_as_it_is_held(world: World, hold_s: float) -> None:
    world.new(hold_s=hold_s)
    world.remote.there = set(refs(1))
    assert world.ask("one", refs(1, 2)) == [True, False]
    assert world.holds("one", refs(1, 2)) == [True, False], "also when vLLM asks again"
    assert world.unknown(refs(1, 2)) == ([] if hold_s else refs(1, 2))
    assert world.holds("two", refs(1)) == [bool(hold_s)]


def test_what_was_removed_is_not_loaded_by_who_was_told_of_it_before(world: World) -> None:
    world.new(hold_s=0.0)
    world.remote.there = set(refs(1, 2, 3))
    assert world.ask("one", refs(1, 2, 3)) == [True, True, True]
    world.lookup.view.deny(refs(1), time.monotonic())
    world.lookup.view.forget(refs(2))
    assert world.holds("one", refs(1, 2, 3)) == [False, False, True]
    assert world.ask("two", refs(1, 2, 3)) == [True, True, True], "asked anew"
    world.lookup.view.clear()
    assert world.holds("two", refs(1, 2, 3)) == [False, False, False]


@pytest.mark.parametrize("hold_s", [0.0, 60.0])
@pytest.mark.parametrize("source", ["", SOURCE])
def test_what_was_removed_while_the_tier_was_asked_is_not_there(world: World, hold_s: float, source: str) -> None:
    """The answer is older than the removal, although it arrives later."""
    world.new(hold_s=hold_s)
    world.lookup.begin("one", source)
    gate = world.hang(world.remote)
    world.remote.there = world.source.there = set(refs(1, 2))
    assert not world.lookup.answered("one", refs(1, 2))
    assert gate.reached.wait(HANG_GUARD_S)
    world.lookup.view.forget(refs(1))
    gate.open()
    assert world.ask("one", refs(1, 2)) == [False, True]
    assert world.unknown(refs(1, 2)) == (refs(1) if hold_s else refs(1, 2))


def test_who_comes_after_a_removal_asks_anew(world: World) -> None:
    gate = world.hang(world.remote)
    world.remote.there = set(refs(1))
    assert not world.lookup.answered("before", refs(1))
    assert gate.reached.wait(HANG_GUARD_S)
    world.lookup.view.forget(refs(1))
    assert not world.lookup.answered("after", refs(1))
    gate.open()
    assert world.ask("after", refs(1)) == [True]
    assert world.remote.questions == [refs(1), refs(1)]


def test_after_new_weights_old_answers_count_for_nobody(world: World) -> None:
    gate = world.hang(world.remote)
    world.remote.there = set(refs(1))
    world.lookup.answered("one", refs(1))
    assert gate.reached.wait(HANG_GUARD_S)
    world.lookup.reset("new")
    world.remote.there.clear()
    gate.open()
    assert world.ask("one", refs(1)) == [False]
    assert world.ask("two", refs(1)) == [False]
    assert world.unknown(refs(1)) == []


# Engines that requests name


def test_a_source_is_asked_for_who_names_it_and_its_answers_are_nobody_elses(world: World) -> None:
    world.source.there = set(refs(1, 2))
    world.remote.there = set(refs(3))
    assert world.ask("before", refs(1)) == [False]
    world.lookup.begin("names", SOURCE)
    assert world.ask("names", refs(1, 2, 3, 4)) == [True, True, True, False]
    assert world.holds("other", refs(1, 2, 3)) == [False, False, True]
    assert world.ask("other", refs(1, 2)) == [False, False]
    assert [list(question) for question in world.source.questions] == [refs(1, 2, 3, 4)]
    world.lookup.end("names")
    assert world.ask("names", refs(5)) == [False]
    assert len(world.source.questions) == 1, "named once, for one lookup"


def test_a_source_that_is_not_listed_is_not_asked(world: World) -> None:
    world.source.there = set(refs(1))
    world.lookup.begin("names", "kvs://source:2")
    assert world.lookup.told("names").source == ""
    assert world.ask("names", refs(1)) == [False]
    assert not world.lookup._directory._source_askers
    assert world.source.questions == []


def test_a_source_that_hangs_holds_up_only_who_names_it(world: World) -> None:
    gate = world.hang(world.source)
    world.remote.there = set(refs(*range(100)))
    for number in range(10):
        world.lookup.begin(f"names {number}", SOURCE)
        world.lookup.answered(f"names {number}", refs(number))
    assert gate.reached.wait(HANG_GUARD_S)
    for number in range(20):
        assert world.ask(f"other {number}", refs(number, 50 + number)) == [True, True]
    assert not world.lookup.answered("names 0", refs(0))
    assert len(world.source.questions) == 1
    gate.open()
    assert world.ask("names 9", refs(9)) == [True]


# Close


def test_a_pass_waits_once_for_a_source_that_hangs_and_goes_on_waiting_for_the_tier(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.hang(world.source)
    lookup, waits = world.lookup, list[int]()
    wait = lookup._directory.wait

    def counted(questions: Sequence[Question], timeout_s: float) -> bool:
        waits.append(len(questions))
        wait(questions[:1], HANG_GUARD_S)  # the tier answers in time, even if this machine is busy
        return all(question.is_done for question in questions)

    monkeypatch.setattr(lookup._directory, "wait", counted)
    lookup.begin("names", SOURCE)
    for _ in range(3):
        assert not lookup.answered("names", refs(1))
        lookup._left_s = PASS_BUDGET_S
    assert waits == [2]
    lookup._took_s = 0.0
    assert lookup.answered("another", refs(2))
    lookup.end_pass()
    assert not lookup.answered("names", refs(1))
    assert waits == [2, 1]


def test_close_answers_who_waits_and_ends_the_threads(world: World) -> None:
    gate = world.hang(world.remote)
    directory = world.lookup._directory
    under_way = directory.ask(refs(1))
    assert gate.reached.wait(HANG_GUARD_S)
    waiting = [directory.ask(refs(2)), directory.ask(refs(3), SOURCE)]
    closing = threading.Thread(target=directory.close)
    closing.start()
    assert directory.wait(waiting[:1], HANG_GUARD_S)
    gate.open()
    closing.join(HANG_GUARD_S)
    assert not closing.is_alive()
    assert list(under_way.answers) == [False]
    assert list(waiting[0].answers) == [None]
    late = directory.ask(refs(4))
    assert late.is_done
    assert list(late.answers) == [None]
    assert directory.ask(refs(4), SOURCE).is_done
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-ask")]
    with pytest.raises(ClosedError):
        directory.answer(refs(1))


def test_close_waits_for_all_that_hang_at_once(world: World) -> None:
    """Otherwise each source might begin one more question during the wait for the others."""
    gates = world.hang(world.remote), world.hang(world.source)
    directory = world.lookup._directory
    for gate, source in zip(gates, ("", SOURCE), strict=True):
        directory.ask(refs(1), source)
        assert gate.reached.wait(HANG_GUARD_S)
    waiting = [directory.ask(refs(2)), directory.ask(refs(2), SOURCE)]
    closing = threading.Thread(target=directory.close)
    closing.start()
    assert directory.wait(waiting, HANG_GUARD_S)
    for gate in gates:
        gate.open()
    closing.join(HANG_GUARD_S)
    assert not closing.is_alive()
    assert [list(question.answers) for question in waiting] == [[None], [None]]


def test_an_error_that_nobody_expected_is_said_and_ends_no_thread(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    world.lookup.close()
    remote = Remote()
    world.lookup = RemoteLookup(RemoteDirectory([remote]), RemoteView(60.0), HANG_GUARD_S)
    remote.before = fail
    assert world.ask("one", refs(1)) == [False]
    assert "failed unexpectedly" in caplog.text
    remote.before, remote.there = lambda: None, set(refs(1))
    assert world.ask("two", refs(1)) == [True]


def test_a_tier_that_does_not_answer_about_every_chunk_has_not_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.lookup.close()
    remote = Remote()
    world.lookup = RemoteLookup(RemoteDirectory([remote]), RemoteView(60.0), HANG_GUARD_S)
    monkeypatch.setattr(remote, "contains", lambda _: [True])
    assert world.ask("one", refs(1, 2)) == [False, False]
    assert world.unknown(refs(1, 2)) == refs(1, 2)
    assert world.ask("two", refs(3)) == [True], "the thread goes on"
