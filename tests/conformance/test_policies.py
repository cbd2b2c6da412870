"""Tests of every policy's contract."""

from __future__ import annotations

from kvstore.policies import ARC, LFU, LRU, POLICIES, S3FIFO, Adaptive, Policy
from kvstore.testing import PolicyConformance


class TestLRU(PolicyConformance):
    def open_policy(self, capacity_bytes: int) -> Policy:
        return LRU(capacity_bytes)


class TestLFU(PolicyConformance):
    def open_policy(self, capacity_bytes: int) -> Policy:
        return LFU(capacity_bytes)


class TestARC(PolicyConformance):
    def open_policy(self, capacity_bytes: int) -> Policy:
        return ARC(capacity_bytes)


class TestS3FIFO(PolicyConformance):
    def open_policy(self, capacity_bytes: int) -> Policy:
        return S3FIFO(capacity_bytes)


class TestAdaptive(PolicyConformance):
    def open_policy(self, capacity_bytes: int) -> Policy:
        return Adaptive(capacity_bytes)


def test_none_is_left_out() -> None:
    suites = [thing for thing in globals().values() if isinstance(thing, type) and issubclass(thing, PolicyConformance)]
    tested = [type(suite().open_policy(1)) for suite in suites if suite is not PolicyConformance]
    assert set(tested) == set(POLICIES.values())
