"""The CPU tier when something happens to a slot while bytes are copied from it, or to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.chunks import ByteArray, Outcome
from kvstore.memory.slabs import SlabPool
from kvstore.testing.harness import EVEN, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import Transfer
from kvstore.tiers.cpu import CpuTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE, OTHER = make_ref(1), make_ref(2)


@pytest.fixture
def tier() -> Iterator[CpuTier]:
    tier = CpuTier(SlabPool(1, EVEN.slot_bytes), EVEN)  # one slot, so that every chunk gets the same
    yield tier
    tier.close()


def before_the_next_copy(tier: CpuTier, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something when the slot was chosen, and nothing has been copied yet."""
    slot, waiting = tier._pool.slot, [action]

    def interrupted(number: int) -> ByteArray:
        if waiting:
            waiting.pop()()
        return slot(number)

    monkeypatch.setattr(tier._pool, "slot", interrupted)


def replace(tier: CpuTier) -> None:
    tier.remove([ONE])
    assert tier.put([make_transfer(EVEN, OTHER)]) == [Outcome.STORED]


def test_a_chunk_whose_slot_was_given_away_meanwhile_is_a_miss(tier: CpuTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put([make_transfer(EVEN, ONE)])
    before_the_next_copy(tier, monkeypatch, lambda: replace(tier))
    assert tier.get([Transfer(ONE, make_buffer(EVEN.slot_bytes))]) == [Outcome.MISS]
    assert tier.contains([ONE, OTHER]) == [False, True]


def test_a_chunk_that_was_replaced_meanwhile_is_read_anew(tier: CpuTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put([make_transfer(EVEN, ONE)])
    before_the_next_copy(tier, monkeypatch, lambda: tier.put([make_transfer(EVEN, ONE, 1)]))
    buffer = make_buffer(EVEN.slot_bytes)
    assert tier.get([Transfer(ONE, buffer)]) == [Outcome.HIT]
    payload = make_payload(EVEN, ONE, 1)
    assert buffer[: len(payload)].tobytes() == payload


def test_a_chunk_that_is_put_while_all_is_cleared_is_not_kept(tier: CpuTier, monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_next_copy(tier, monkeypatch, tier.clear)
    assert tier.put([make_transfer(EVEN, ONE)]) == [Outcome.FAILED]
    assert tier.contains([ONE]) == [False]
    assert tier.put([make_transfer(EVEN, ONE)]) == [Outcome.STORED], "its slot is free again"


def test_each_content_of_a_slot_has_a_name_of_its_own(tier: CpuTier) -> None:
    names = []
    for ref in (ONE, ONE, OTHER):
        tier.claim(0)
        assert tier.filling(0, ref) is None, "not before it is there"
        tier.publish(0, ref)
        names.append(tier.filling(0, ref))
    tier.clear()
    assert tier.filling(0, OTHER) is None
    assert None not in names
    assert len(set(names)) == 3
