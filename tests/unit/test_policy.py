"""The order of eviction."""

from __future__ import annotations

from kvstore.policy import LRU


def order_of(lru: LRU) -> str:
    return b"".join(lru.oldest_first()).decode()


def lru_of(keys: str) -> LRU:
    lru = LRU()
    for key in keys:
        lru.add(key.encode())
    return lru


def test_added_last_goes_last() -> None:
    lru = lru_of("abc")
    assert (order_of(lru), len(lru), b"b" in lru, b"z" in lru) == ("abc", 3, True, False)
    lru.add(b"a")
    assert (order_of(lru), len(lru)) == ("bca", 3)


def test_a_chain_goes_from_its_end() -> None:
    lru = lru_of("abcdef")
    lru.touch_chain([b"a", b"c", b"d"])
    assert order_of(lru) == "befdca"


def test_touching_unknown_keys_adds_nothing() -> None:
    lru = lru_of("ab")
    lru.touch_chain(iter([b"a", b"z"]))
    assert order_of(lru) == "ba"


def test_remove() -> None:
    lru = lru_of("abc")
    lru.remove(b"b")
    lru.remove(b"b")
    assert order_of(lru) == "ac"
