"""Bounds on resources of a proxy's requests, for all clients together and for each API key."""

from __future__ import annotations

from collections import Counter
from typing import Self


class Bound:
    """Limit on an amount, in total and for each key, for use on one event loop.

    Args:
        most: limit for all keys together.
        most_of_key: limit for one key.

    Attributes:
        taken: amount that all keys have taken now.
    """

    def __init__(self, most: int, most_of_key: int) -> None:
        self.taken = 0
        self._most = most
        self._most_of_key = most_of_key
        self._by_key = Counter[str]()

    def bound_key(self, most_of_key: int) -> None:
        """Change the limit for one key, which keeps what it has beyond it."""
        self._most_of_key = most_of_key

    def take(self, key: str, amount: int) -> bool:
        """Take an amount; return False and take nothing if it would exceed a limit."""
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
    """Context manager of the amount that one request has taken, which gives it back at the end."""

    def __init__(self, bound: Bound, key: str) -> None:
        self._bound = bound
        self._key = key
        self._amount = 0

    def take(self, amount: int = 1) -> bool:
        """Take more; return False and take nothing more if it would exceed a limit."""
        is_taken = self._bound.take(self._key, amount)
        self._amount += amount if is_taken else 0
        return is_taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._bound.give_back(self._key, self._amount)
