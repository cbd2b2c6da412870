"""Counters of a tier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict

from kvstore.model.chunks import Outcome
from kvstore.tiers.base import TierCounters


def test_every_outcome_is_counted_and_bytes_that_moved() -> None:
    counters = TierCounters()
    assert [counters.count(outcome, 10) for outcome in Outcome] == list(Outcome)
    assert counters == TierCounters(1, 1, 1, 1, 1, 1, bytes_read=10, bytes_written=10)


def test_a_chunk_read_in_several_calls_is_one_hit() -> None:
    counters = TierCounters()
    for is_last in (False, False, True):
        counters.count(Outcome.HIT, 10, is_last=is_last)
    counters.count(Outcome.MISS, 10, is_last=False)
    assert counters == TierCounters(hits=1, misses=1, bytes_read=30)


def test_no_outcome_is_lost_among_threads() -> None:
    counters = TierCounters()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: counters.count(Outcome.STORED, 3), range(4000)))
    assert counters == TierCounters(stored=4000, bytes_written=12_000)


def test_they_are_plain_data() -> None:
    """A caller may send or print the counters that an engine returns."""
    counters = TierCounters(hits=3)
    assert deepcopy(counters) == counters, "a lock among them could not be copied"
    assert TierCounters(**asdict(counters)) == counters
