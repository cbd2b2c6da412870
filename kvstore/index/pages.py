"""Sorted byte strings in pages, which take ten bytes each; an entry of a dictionary with a key takes a hundred."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Final

_PAGE: Final = 512  # items of a new page; one of twice as many is cut in two
_FIRST: Final = itemgetter(0)


class SortedPages:
    """Different byte strings in order, of which none begins with another.

    One thread may change them while others search. A page is never emptied or cut, and the list of pages is replaced
    rather than changed, so a search finds each item that stays.
    """

    def __init__(self) -> None:
        self._pages: list[list[bytes]] = []  # none is empty

    def __iter__(self) -> Iterator[bytes]:
        return (item for page in self._pages for item in page)

    def find(self, start: bytes) -> bytes | None:
        """Return the item that begins with ``start``; None without one. Thread-safe."""
        pages = self._pages
        place = bisect_right(pages, start, key=_FIRST)
        for page in pages[max(0, place - 1) : place + 1]:  # it may be the first of the next page
            for item in page[(inside := bisect_left(page, start)) : inside + 1]:
                if item.startswith(start):
                    return item
        return None

    def add(self, item: bytes) -> None:
        """Add a new item."""
        if not self._pages:
            self._pages = [[item]]
            return
        place = max(0, bisect_right(self._pages, item, key=_FIRST) - 1)
        page = self._pages[place]
        page.insert(bisect_left(page, item), item)
        if len(page) >= 2 * _PAGE:
            self._pages = [*self._pages[:place], page[:_PAGE], page[_PAGE:], *self._pages[place + 1 :]]

    def add_all(self, items: Iterable[bytes]) -> None:
        """Add new items, which come in order."""
        if self._pages:
            for item in items:
                self.add(item)
            return
        added = list(items)
        self._pages = [added[begin : begin + _PAGE] for begin in range(0, len(added), _PAGE)]

    def discard(self, item: bytes) -> None:
        """Drop an item that is here."""
        place = bisect_right(self._pages, item, key=_FIRST) - 1
        page = self._pages[place]
        if len(page) > 1:
            del page[bisect_left(page, item)]
        else:
            self._pages = [*self._pages[:place], *self._pages[place + 1 :]]
