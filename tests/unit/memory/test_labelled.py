"""Labels of the CPU pool: a slot is read as the chunk that it holds, and as nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.late_device import LateDevice, LateStreams

from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ChunkRef

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE, OTHER = ChunkRef(b"1" * 16, 1), ChunkRef(b"2" * 16, 1)


@pytest.fixture
def pool() -> Iterator[LabelledPool]:
    pool = LabelledPool(SlabPool(2, 4096))
    yield pool
    pool.close()


def test_a_slot_is_read_only_as_what_it_was_published_as(pool: LabelledPool) -> None:
    assert pool.num_slots == 2
    assert pool.read(0, ONE) is None
    slot = pool.claim(0)
    assert pool.read(0, ONE) is None
    pool.publish(0, ONE)
    assert pool.read(0, ONE) is slot
    assert pool.read(0, OTHER) is pool.read(1, ONE) is pool.read(0, ChunkRef(ONE.prefix_key, 2)) is None
    pool.claim(0)
    assert pool.read(0, ONE) is None
    pool.publish(0, OTHER)
    assert pool.read(0, OTHER) is slot
    pool.clear()
    assert pool.read(0, OTHER) is None


def test_a_chunk_may_be_in_two_slots(pool: LabelledPool) -> None:
    """The index gave one slot away silently, and has the chunk read from disk again."""
    for slot in (1, 0):
        pool.claim(slot)[:] = slot + 1
        pool.publish(slot, ONE)
    pool.claim(1)
    held = pool.read(0, ONE)
    assert held is not None
    assert (held == 1).all()
    assert pool.read(1, ONE) is None


def test_each_content_of_a_slot_has_a_name_of_its_own(pool: LabelledPool) -> None:
    names = []
    for ref in (ONE, ONE, OTHER):
        pool.claim(0)
        assert pool.filling(0, ref) is None, "not before it is there"
        pool.publish(0, ref)
        names.append(pool.filling(0, ref))
    pool.clear()
    assert pool.filling(0, OTHER) is None
    pool.claim(0)
    pool.publish(0, OTHER)
    names.append(pool.filling(0, OTHER))
    assert None not in names
    assert len(set(names)) == 4


def test_a_slot_is_in_use_until_all_copies_have_ended() -> None:
    """Copies on every stream count, as the last one that was launched may be the first to end."""
    device = LateDevice(0, eagerness=0.0)
    streams = LateStreams(device)
    pool = LabelledPool(SlabPool(1, 4096), streams)
    slow, quick = device.make_stream(), device.make_stream()
    slow.launch(lambda: None)
    for stream in (slow, quick):
        with device.on(stream):
            pool.note_use(0, streams.now())
    assert not pool.is_settled
    pool.settle(0)
    assert slow.done == slow.launched
    pool.close()
