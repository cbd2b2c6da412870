"""Chunks assembled from the heads in other engines' chunks: questions, their order, and the cost of a failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.divided import CHUNK_BLOCKS, Worker
from support.rig import FakeTier

from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import ClosedError, TierError
from kvstore.testing.harness import make_buffer, make_ref
from kvstore.tiers.base import Transfer
from kvstore.tiers.resharded import ReshardedTier

ONE, TWO, THREE = (make_ref(number, CHUNK_BLOCKS) for number in (1, 2, 3))
OURS = Worker(0, 1)


class Storage(FakeTier):
    """Storage that counts its calls."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self.asked: list[ChunkRef] = []
        self.read: list[ChunkRef] = []

    def hold(self, *refs: ChunkRef, filled_with: int = 1) -> None:
        layout = OURS.division(2).parts[0].layout
        self.put([Transfer(ref, np.full(layout.slot_bytes, filled_with, np.uint8)) for ref in refs])

    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        self.asked += refs
        return super().contains(refs)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self.read += [transfer.ref for transfer in transfers]
        return super().get(transfers)


@pytest.fixture
def parts() -> list[Storage]:
    return [Storage(), Storage()]


@pytest.fixture
def tier(parts: list[Storage]) -> ReshardedTier:
    return ReshardedTier(OURS.division(2), parts, timeout_s=1.0)


def get(tier: ReshardedTier, *refs: ChunkRef) -> list[Outcome]:
    return tier.get([Transfer(ref, make_buffer(OURS.paged.layout.slot_bytes)) for ref in refs])


def test_a_chunk_is_there_if_all_parts_are(tier: ReshardedTier, parts: list[Storage]) -> None:
    parts[0].hold(ONE, TWO)
    parts[1].hold(TWO, THREE)
    assert tier.contains([ONE, TWO, THREE]) == [False, True, False]
    assert parts[1].asked == [ONE, TWO], "of what the first part lacks, the second is not asked"
    assert tier.contains([THREE]) == [False]
    assert parts[1].asked == [ONE, TWO]
    assert tier.contains([]) == []


def test_every_head_comes_from_its_part(tier: ReshardedTier, parts: list[Storage]) -> None:
    for number, part in enumerate(parts):
        part.hold(TWO, filled_with=1 + number)
    buffer = make_buffer(OURS.paged.layout.slot_bytes)
    assert tier.get([Transfer(TWO, buffer)]) == [Outcome.HIT]
    payload = buffer[: OURS.paged.layout.payload_bytes(CHUNK_BLOCKS)]
    heads = payload.reshape(-1, 4, OURS.paged.layout.page_bytes[0] // (4 * OURS.pages.rows[0]))
    assert [np.unique(heads[:, head]).tolist() for head in range(4)] == [[1], [1], [2], [2]]
    assert (tier.counters.hits, tier.counters.bytes_read) == (1, len(payload))


def test_what_one_part_lacks_is_a_miss(tier: ReshardedTier, parts: list[Storage]) -> None:
    parts[0].hold(ONE)
    parts[1].hold(TWO)
    assert get(tier, ONE, TWO) == [Outcome.MISS, Outcome.MISS]
    assert parts[1].read == [ONE]


def test_a_part_that_fails_fails_the_call(tier: ReshardedTier, parts: list[Storage]) -> None:
    def fail() -> None:
        raise TierError("gone")

    parts[0].hold(ONE)
    parts[1].before_get = fail
    with pytest.raises(TierError, match="gone"):
        get(tier, ONE)
    parts[1].before_get = lambda: None
    parts[1].hold(ONE)
    for _ in range(10):  # its buffers are free again
        assert get(tier, ONE) == [Outcome.HIT]


def test_nothing_is_stored_or_removed(tier: ReshardedTier, parts: list[Storage]) -> None:
    for part in parts:
        part.hold(ONE)
    assert tier.put([Transfer(TWO, make_buffer(OURS.paged.layout.slot_bytes))]) == [Outcome.FAILED]
    tier.remove([ONE])
    tier.clear()
    tier.reset(OURS.namespace.at_epoch("1"))
    assert tier.contains([ONE, TWO]) == [True, False]
    assert not any(part.namespaces for part in parts)


def test_its_parts_are_closed_with_it(tier: ReshardedTier, parts: list[Storage]) -> None:
    tier.close()
    assert all(part.is_closed for part in parts)
    with pytest.raises(ClosedError):
        tier.contains([ONE])
