"""Sorted pages, compared with a plain set."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import schedules

from kvstore.index import pages as pages_module
from kvstore.index.pages import SortedPages
from kvstore.index.trails import Trails

ITEMS = [bytes([first, 0, number]) for number, first in enumerate((0, 1, 1, 7, 7, 7, 9, 200, 255))]
ITEMS = list({item[:1]: item for item in ITEMS}.values()) + [bytes([first]) for first in (3, 4, 5, 6)]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_PAGE", 2)


@schedules(300)
@given(begin=st.sets(st.sampled_from(ITEMS)), changes=st.lists(st.sampled_from(ITEMS), max_size=40))
def test_any_changes(begin: set[bytes], changes: list[bytes]) -> None:
    pages, model = SortedPages(1), set(begin)
    pages.add_all(sorted(begin))
    for item in changes:
        if item in model:
            pages.discard(item)
            model.remove(item)
        else:
            pages.add(item)
            model.add(item)
        assert list(pages) == sorted(model)
        assert all(0 < len(page) < 2 * pages_module._PAGE for page in pages._pages[1]) or not model
        for first in range(256):
            start = bytes([first])
            assert pages.find(start) == next((known for known in model if known.startswith(start)), None)


def test_many_are_added_to_some() -> None:
    pages = SortedPages(1)
    for item in ITEMS[::2]:
        pages.add(item)
    pages.add_all(sorted(ITEMS[1::2]))
    assert list(pages) == sorted(ITEMS)


def test_a_beginning_of_another_length_finds_nothing() -> None:
    pages = SortedPages(2)
    pages.add(b"abc")
    assert pages.find(b"ab") == b"abc"
    assert [pages.find(start) for start in (b"", b"a", b"abc")] == [None, None, None]


def test_an_item_that_is_not_here_takes_no_other_with_it() -> None:
    pages = SortedPages(1)
    pages.add(b"b")
    for item in (b"a", b"c"):
        with pytest.raises(KeyError):
            pages.discard(item)
    assert list(pages) == [b"b"]


def test_a_search_uses_pages_that_stay_as_they_are() -> None:
    pages = SortedPages(1)
    pages.add(b"m")
    (page,) = pages._pages[1]
    pages.add(b"a")
    pages.discard(b"m")
    assert page == [b"m"]


def test_other_threads_find_what_stays_while_others_come_and_go() -> None:
    trails = Trails()
    staying = [b"%016d" % number for number in range(0, 400, 4)]
    for trail in staying:
        trails.add(trail)
    ended, missed = threading.Event(), list[bytes]()

    def change() -> None:
        others = [b"%016d" % number for number in range(400) if number % 4]
        longer = [trail + b"x" * 16 for trail in others[::3]]
        while not ended.is_set():
            trails.add_all(others[::2])
            for trail in (*others[1::2], *longer):
                trails.add(trail)
            for trail in (*others, *longer):
                trails.discard(trail)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(50):
            missed += [trail for trail in staying if (trail, 1) not in trails.neighbours(trail)]
    finally:
        ended.set()
        thread.join()
    assert not missed
    assert sorted(trails) == staying
