"""Order of the server's work on files, with threads that work on the test's command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvstore.server.file_order import Turns, Work

SPACE, OTHER = b"space", b"other"
End = Callable[[], None]


class Bench:
    """Turns whose works begin at once, and end on command."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.given_up: list[str] = []
        self._ends: dict[str, End] = {}
        self.turns = Turns(self._start)
        self.fails: set[str] = set()

    def _start(self, action: End, give_up: End) -> None:
        try:
            action()
        except ZeroDivisionError:
            give_up()

    def work(self, name: str) -> Work:
        def run(end: End) -> None:
            self.begun.append(name)
            self._ends[name] = end
            if name in self.fails:
                raise ZeroDivisionError

        return Work(run, partial(self.given_up.append, name))

    def end(self, name: str) -> None:
        self._ends[name]()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_after_the_other_for_one_file(bench: Bench) -> None:
    bench.turns.take(SPACE, b"a", bench.work("write"))
    bench.turns.take(SPACE, b"a", bench.work("remove"))
    bench.turns.take(SPACE, b"b", bench.work("another"))
    assert bench.begun == ["write", "another"]
    bench.end("write")
    assert bench.begun == ["write", "another", "remove"]
    for name in ("another", "remove"):
        assert bench.turns.is_busy
        bench.end(name)
    assert not bench.turns.is_busy


def test_a_clear_waits_for_what_was_before_and_keeps_what_comes_after(bench: Bench) -> None:
    bench.turns.take(SPACE, b"a", bench.work("before"))
    bench.turns.take_all(SPACE, bench.work("clear"))
    bench.turns.take(SPACE, b"b", bench.work("after"))
    bench.turns.take_all(SPACE, bench.work("clear again"))
    bench.turns.take(SPACE, b"c", bench.work("last"))
    bench.turns.take(OTHER, b"d", bench.work("elsewhere"))
    assert bench.begun == ["before", "elsewhere"]
    bench.end("elsewhere")
    for name in ("before", "clear", "after", "clear again", "last"):
        assert bench.begun[-1] == name or name == "before"
        bench.end(name)
    assert not bench.turns.is_busy


def test_what_comes_while_a_clear_ends_stays_behind_what_came_before_it(bench: Bench) -> None:
    """A removal that overtook a write of the same file would leave the file there."""
    turns, order = bench.turns, []

    def newcomer(end: End) -> None:
        order.append("newcomer")
        end()

    def begin_first(end: End) -> None:
        order.append("first")
        turns.take(SPACE, b"a", Work(newcomer, lambda: None))
        end()

    def begin_second(end: End) -> None:
        order.append("second")
        end()

    turns.take_all(SPACE, bench.work("clear"))
    turns.take(SPACE, b"b", Work(begin_first, lambda: None))
    turns.take(SPACE, b"a", Work(begin_second, lambda: None))
    bench.end("clear")
    assert order == ["first", "second", "newcomer"]


def test_what_fails_gives_the_file_to_the_next(bench: Bench) -> None:
    bench.fails = {"write", "clear"}
    bench.turns.take(SPACE, b"a", bench.work("write"))
    bench.turns.take(SPACE, b"a", bench.work("next"))
    bench.turns.take_all(SPACE, bench.work("clear"))
    bench.turns.take(SPACE, b"a", bench.work("last"))
    assert bench.begun == ["write", "next"]
    bench.end("write")  # a second end of the same is none
    bench.end("next")
    assert bench.given_up == ["write", "clear"]
    assert bench.begun == ["write", "next", "clear", "last"]
    bench.end("last")
    assert not bench.turns.is_busy
