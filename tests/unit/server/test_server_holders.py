"""A prompt's tail that a longer chunk holds, as an operator sees it: found, pinned and removed with that chunk."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from support.shop import ONE, THREE, Desk, Shop

from kvstore.model.chunks import ChunkRef, chunk_of
from kvstore.protocol import messages
from kvstore.server.operators import holder_of
from kvstore.server.spaces import Chunk
from kvstore.testing.harness import make_ref


def key(number: int) -> bytes:
    return make_ref(number, 1).prefix_key


def ends_of(trail: bytes) -> list[ChunkRef]:
    """Return the tails that end with each block."""
    return [chunk_of(trail[:end]) for end in range(16, len(trail) + 1, 16)]


LONGER = key(50) + key(51) + key(52) + ONE.prefix_key
OTHER = key(50) + key(60) + key(61) + THREE.prefix_key
TAIL = ChunkRef(key(51), 2)
LATER = 1000


def stocked(chunks: int = 6) -> Shop:
    shop = Shop(chunks=chunks, disk_chunks=0)
    for trail in (LONGER, OTHER):
        store(shop, trail)
    return shop


def store(shop: Shop, trail: bytes) -> Chunk:
    chunk = shop.reserve(chunk_of(trail))
    assert chunk is not None
    chunk.describe(trail)
    shop.stock.complete(chunk, is_whole=True)
    return chunk


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (ends_of(key(50) + key(51)), (ONE, 2)),
        (ends_of(key(50) + key(51) + key(99)), (ONE, 2)),
        (ends_of(key(50) + key(60)), (THREE, 2)),
        (ends_of(key(99) + key(51)), None),
        ([], None),
        ([ONE, THREE], None),
        ([ChunkRef(key(50), 1), ChunkRef(key(51), 3)], None),
    ],
)
def test_the_chunk_that_holds_most_of_the_asked_block_ends(
    asked: Sequence[ChunkRef], expected: tuple[ChunkRef, int] | None
) -> None:
    shop = stocked()
    assert holder_of(shop.space, asked) == expected


def test_an_operator_is_told(desk: Desk) -> None:
    space = next(iter(desk.stock.spaces.values()))
    lease = desk.lease(messages.Reserve, ONE)
    desk.ask(messages.Describe(5, lease, LONGER))
    desk.send(lease, bytes(space.layout.payload_bytes(4)))
    desk.settle(1)
    desk.commit(lease)

    def explain(refs: Sequence[ChunkRef]) -> dict[str, object]:
        tree: dict[str, object] = json.loads(desk.ask(messages.Explain(9, space.id, messages.pack_refs(refs))).body)
        return tree

    told = explain(ends_of(key(50) + key(51)))
    assert told == {"chunks": ["never_stored"] * 2, "nearest": [ONE.prefix_key.hex(), 4, 2, "memory"]}
    assert explain([ONE, THREE]) == {"chunks": ["memory", "never_stored"]}


class TestPins:
    def test_that_of_a_tail_goes_over_to_the_chunk_that_replaced_it(self) -> None:
        shop = stocked()
        tail = store(shop, key(50) + key(51))
        shop.stock.pins.pin(shop.space, [TAIL], LATER)
        assert shop.stock.remove(shop.space, [TAIL]) == 1
        assert not tail.is_pinned
        assert [(chunk.ref, chunk.pin_end_s) for chunk in shop.stock.pins] == [(ONE, LATER)]
        assert shop.stock.pins.used_bytes == shop.space.chunks[ONE].size_bytes

    @pytest.mark.parametrize(("end_s", "kept_s"), [(LATER - 1, LATER), (LATER + 1, LATER + 1)])
    def test_the_later_of_two_counts(self, end_s: int, kept_s: int) -> None:
        shop = stocked()
        store(shop, key(50) + key(51))
        shop.stock.pins.pin(shop.space, [TAIL], LATER)
        shop.stock.pins.pin(shop.space, [ONE], end_s)
        shop.stock.remove(shop.space, [TAIL])
        assert [(chunk.ref, chunk.pin_end_s) for chunk in shop.stock.pins] == [(ONE, kept_s)]

    def test_it_ends_with_the_last_chunk_that_holds_the_blocks(self) -> None:
        """The clear of a prefix removes its holders as well."""
        shop = stocked()
        store(shop, key(50) + key(51))
        shop.stock.pins.pin(shop.space, [TAIL], LATER)
        shop.stock.remove(shop.space, [TAIL, ONE])
        assert list(shop.stock.pins) == []
        assert shop.stock.pins.used_bytes == 0

    def test_it_keeps_to_the_bound(self) -> None:
        """The bound is half of the memory, and the longer chunk is larger."""
        shop = Shop(chunks=3, disk_chunks=0)
        store(shop, LONGER)
        store(shop, key(50) + key(51))
        shop.stock.pins._max_bytes = shop.space.chunks[TAIL].size_bytes
        shop.stock.pins.pin(shop.space, [TAIL], LATER)
        shop.stock.remove(shop.space, [TAIL])
        assert list(shop.stock.pins) == []
