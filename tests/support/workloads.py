"""Workloads that are hard for a policy: chains of one to a few chunks, all of size 1."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from kvstore.model.keys import PrefixKey

Chain = list[PrefixKey]


def chain_of(name: int, length: int = 4) -> Chain:
    """Return a chain that shares nothing with those of other names."""
    return [name.to_bytes(6, "little") + place.to_bytes(2, "little") for place in range(length)]


def scan(capacity: int, rounds: int = 60) -> Iterator[Chain]:
    """Yield a hot set of half the capacity, between long runs of chains that never return."""
    chooser, cold = random.Random(1), count(1 << 32)
    hot = capacity // 8
    for number in range(rounds):
        for _ in range(hot):
            yield chain_of(chooser.randrange(hot))
        if number % 3 == 2:
            for _ in range(hot):
                yield chain_of(next(cold))


def loop(capacity: int, rounds: int = 30) -> Iterator[Chain]:
    """Yield all chains in turn, a tenth more than fits."""
    for _ in range(rounds):
        for name in range(capacity * 11 // 40):
            yield chain_of(name)


def shifting(capacity: int, rounds: int = 30) -> Iterator[Chain]:
    """Yield a hot set of two thirds of the capacity, a quarter of which each round replaces, and some noise."""
    chooser, cold = random.Random(2), count(1 << 32)
    hot = capacity // 6
    for number in range(rounds):
        first = number * hot // 4
        for _ in range(4 * hot):
            yield chain_of(first + chooser.randrange(hot)) if chooser.random() < 0.9 else chain_of(next(cold))


def sudden(capacity: int, rounds: int = 8) -> Iterator[Chain]:
    """Yield a hot set of two thirds of the capacity that is replaced as a whole, again and again."""
    chooser = random.Random(3)
    hot = capacity // 6
    for number in range(rounds):
        for _ in range(20 * hot):
            yield chain_of(number * hot + chooser.randrange(hot))


def chats(capacity: int, users: int, rounds: int = 20) -> Iterator[Chain]:
    """Yield conversations of five turns that begin alike; with one user, one after the other."""
    chooser, names, system = random.Random(4), count(1), chain_of(0, 2)

    def talk() -> Iterator[Chain]:
        for name in names:
            for turn in range(1, 6):
                yield system + chain_of(name, 4 * turn)

    talks = [talk() for _ in range(users)]
    for _ in range(rounds * capacity // 4):
        yield next(chooser.choice(talks))


WORKLOADS: dict[str, Callable[[int], Iterator[Chain]]] = {
    "scan": scan,
    "loop": loop,
    "shifting": shifting,
    "sudden": sudden,
    "chat": partial(chats, users=1),
    "chats": partial(chats, users=3),
}
