"""Bounds on what the requests of a proxy take: for all clients together, and for each API key a share of it."""

from __future__ import annotations

from collections import Counter
from typing import Self


class Bound:
    """An amount that may be taken in all, and by each key. Belongs to one event loop.

    Args:
        most: by all keys together.
        most_of_key: by one of them.

    Attributes:
        taken: by all keys now.
    """

    def __init__(self, most: int, most_of_key: int) -> None:
        self.taken = 0
        self._most = most
        self._most_of_key = most_of_key
        self._by_key = Counter[str]()

    def take(self, key: str, amount: int) -> bool:
        """Take an amount; False, and nothing is taken, if that were too much."""
        if self.taken + amount > self._most or self._by_key[key] + amount > self._most_of_key:
            return False
        self.taken += amount
        self._by_key[key] += amount
        return True

    def give_back(self, key: str, amount: int) -> None:
        """Undo ``take``."""
        self.taken -= amount
        self._by_key[key] -= amount


class Taken:
    """The part of a bound that one request has. A context manager that gives it back."""

    def __init__(self, bound: Bound, key: str) -> None:
        self._bound = bound
        self._key = key
        self._amount = 0

    def take(self, amount: int = 1) -> bool:
        """Take more; False, and nothing more is taken, if that were too much."""
        is_taken = self._bound.take(self._key, amount)
        self._amount += amount if is_taken else 0
        return is_taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._bound.give_back(self._key, self._amount)
