"""Sorted byte strings in pages, which take ten bytes each; an entry of a dictionary with a key takes a hundred."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

_PAGE: Final = 256  # items of a new page; one of twice as many is cut in two


class SortedPages:
    """Byte strings in order, each the only one with its beginning.

    One thread may change them while others search. Pages, their list and the places where they begin are replaced
    rather than changed, so a search finds each item that stays.

    Args:
        start_bytes: the length of a beginning.
    """

    def __init__(self, start_bytes: int) -> None:
        self._start_bytes = start_bytes
        self._pages: tuple[list[bytes], list[list[bytes]]] = [b""], [[]]  # and the least beginning in each

    def __iter__(self) -> Iterator[bytes]:
        return (item for page in self._pages[1] for item in page)

    def find(self, start: bytes) -> bytes | None:
        """Return the item with a beginning; None without one, or if ``start`` has another length. Thread-safe."""
        if len(start) != self._start_bytes:
            return None  # a shorter one begins several items
        starts, pages = self._pages
        page = pages[bisect_right(starts, start) - 1]
        place = bisect_left(page, start)
        return page[place] if place < len(page) and page[place].startswith(start) else None

    def add(self, item: bytes) -> None:
        """Add an item with a new beginning."""
        starts, pages = self._pages
        number = bisect_right(starts, item) - 1
        place = bisect_left(pages[number], item)
        page = [*pages[number][:place], item, *pages[number][place:]]
        if len(page) >= 2 * _PAGE:
            self._replace(number, [page[:_PAGE], page[_PAGE:]])
        else:
            pages[number] = page

    def add_all(self, items: Iterable[bytes]) -> None:
        """Add items with new beginnings, which come in order."""
        if any(self._pages[1]):
            for item in items:
                self.add(item)
            return
        added = list(items)
        pages = [added[begin : begin + _PAGE] for begin in range(0, len(added), _PAGE)]
        self._pages = [b""], [[]]
        if pages:
            self._replace(0, pages)

    def discard(self, item: bytes) -> None:
        """Drop an item that is here.

        Raises:
            KeyError: it is not.
        """
        starts, pages = self._pages
        number = bisect_right(starts, item) - 1
        place = bisect_left(pages[number], item)
        if pages[number][place : place + 1] != [item]:
            raise KeyError(item)
        page = [*pages[number][:place], *pages[number][place + 1 :]]
        if page or len(pages) == 1:
            pages[number] = page
        else:
            self._replace(number, [])

    def _replace(self, number: int, by: list[list[bytes]]) -> None:
        """Put pages, none of them empty, in place of one."""
        starts, pages = self._pages
        own = [page[0][: self._start_bytes] for page in by]
        starts = [*starts[:number], *own, *starts[number + 1 :]]
        starts[0] = b""  # what is less than all others belongs to the first one
        self._pages = starts, [*pages[:number], *by, *pages[number + 1 :]]
