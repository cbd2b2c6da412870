"""Order of the server's work on files, with threads that work on the test's command."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.server.file_order import FileOrder, Work

SPACE, OTHER = b"space", b"other"
End = Callable[[], None]


class Bench:
    """An order whose works begin at once, and end on command."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ends: dict[str, End] = {}
        self.order = FileOrder()

    def work(self, name: str) -> Work:
        def begin(end: End) -> None:
            self.begun.append(name)
            self._ends[name] = end

        return begin

    def end(self, name: str) -> None:
        self._ends[name]()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_after_the_other_for_one_file(bench: Bench) -> None:
    bench.order.queue(SPACE, b"a", bench.work("write"))
    bench.order.queue(SPACE, b"a", bench.work("remove"))
    bench.order.queue(SPACE, b"b", bench.work("another"))
    assert bench.begun == ["write", "another"]
    bench.end("write")
    assert bench.begun == ["write", "another", "remove"]
    for name in ("another", "remove"):
        assert bench.order.is_busy
        bench.end(name)
    assert not bench.order.is_busy


def test_a_clear_waits_for_what_was_before_and_keeps_what_comes_after(bench: Bench) -> None:
    bench.order.queue(SPACE, b"a", bench.work("before"))
    bench.order.queue_alone(SPACE, bench.work("clear"))
    bench.order.queue(SPACE, b"b", bench.work("after"))
    bench.order.queue_alone(SPACE, bench.work("clear again"))
    bench.order.queue(SPACE, b"c", bench.work("last"))
    bench.order.queue(OTHER, b"d", bench.work("elsewhere"))
    assert bench.begun == ["before", "elsewhere"]
    bench.end("elsewhere")
    for name in ("before", "clear", "after", "clear again", "last"):
        assert bench.begun[-1] == name or name == "before"
        bench.end(name)
    assert not bench.order.is_busy


def test_what_comes_while_a_clear_ends_stays_behind_what_came_before_it(bench: Bench) -> None:
    """A removal that overtook a write of the same file would leave the file there."""
    files, order = bench.order, list[str]()

    def newcomer(end: End) -> None:
        order.append("newcomer")
        end()

    def begin_first(end: End) -> None:
        order.append("first")
        files.queue(SPACE, b"a", newcomer)
        end()

    def begin_second(end: End) -> None:
        order.append("second")
        end()

    files.queue_alone(SPACE, bench.work("clear"))
    files.queue(SPACE, b"b", begin_first)
    files.queue(SPACE, b"a", begin_second)
    bench.end("clear")
    assert order == ["first", "second", "newcomer"]
