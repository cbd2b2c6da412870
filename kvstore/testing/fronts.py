"""Tests of reads of a chunk's leading blocks, which a tier with ``reads_fronts`` serves, and others refuse."""

from __future__ import annotations

import pytest

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import InvalidCallError
from kvstore.model.layout import ALIGNMENT_BYTES, round_up
from kvstore.testing.harness import (
    EVEN,
    LAYOUTS,
    TierHarness,
    is_untouched,
    make_buffer,
    make_payload,
    make_ref,
    make_transfer,
)
from kvstore.tiers.base import Transfer

A, GONE = make_ref(1), make_ref(2)
A_OF = {name: make_ref(1, layout.blocks_per_chunk) for name, layout in LAYOUTS.items()}


class FrontTests(TierHarness):
    """Tests of ``front_blocks`` of a ``Transfer``."""

    def _get_front(self, ref: ChunkRef, front_blocks: int, buffer: ByteArray) -> Outcome:
        (outcome,) = self.tier.get([Transfer(ref, buffer, front_blocks=front_blocks)])
        return outcome

    @pytest.mark.parametrize("shift_bytes", [0, 1])
    @pytest.mark.parametrize("geometry", LAYOUTS)
    def test_leading_blocks_are_as_a_chunk_of_their_own(self, geometry: str, shift_bytes: int) -> None:
        """Leading blocks arrive in the layout of a shorter chunk, and no byte behind them is written."""
        layout = LAYOUTS[geometry]
        tier = self.start(layout)
        self.put(A_OF[geometry])
        if not tier.reads_fronts:
            pytest.skip("this tier reads whole chunks only")
        ref = A_OF[geometry]
        pages = _pages(geometry, ref)
        for front_blocks in range(1, ref.num_blocks):
            expected = b"".join(b"".join(run[:front_blocks]) for run in pages)
            buffer = make_buffer(round_up(len(expected), ALIGNMENT_BYTES), shift_bytes=shift_bytes)
            assert self._get_front(ref, front_blocks, buffer) is Outcome.HIT
            assert buffer[: len(expected)].tobytes() == expected
            assert is_untouched(buffer[len(expected) :])

    def test_of_a_chunk_that_is_not_there(self) -> None:
        """Leading blocks of missing and of held chunks and whole chunks mix in a batch, and each counts once."""
        tier = self.start()
        self.put(A)
        if not tier.reads_fronts:
            pytest.skip("this tier reads whole chunks only")
        before = tier.counters.hits, tier.counters.misses
        buffers = [make_buffer(EVEN.slot_bytes) for _ in range(3)]
        wanted = [(GONE, 1), (A, 1), (A, 0)]
        transfers = [
            Transfer(ref, buffer, b"", b"", front) for (ref, front), buffer in zip(wanted, buffers, strict=True)
        ]
        assert tier.get(transfers) == [Outcome.MISS, Outcome.HIT, Outcome.HIT]
        assert buffers[2][: len(make_payload(EVEN, A))].tobytes() == make_payload(EVEN, A)
        assert (tier.counters.hits, tier.counters.misses) == (before[0] + 2, before[1] + 1)

    @pytest.mark.parametrize("front_blocks", [-1, EVEN.blocks_per_chunk, EVEN.blocks_per_chunk + 1, 1 << 40])
    def test_impossible_ones_are_refused(self, front_blocks: int) -> None:
        """Impossible fronts, such as the whole chunk, are refused, and nothing is moved."""
        tier = self.start()
        self.put(A)
        transfer = Transfer(A, make_buffer(EVEN.slot_bytes), front_blocks=front_blocks)
        with pytest.raises(InvalidCallError, match="leading blocks"):
            tier.get([transfer])
        assert is_untouched(transfer.buffer)

    def test_a_tier_that_does_not_read_them_says_so(self) -> None:
        """A tier that cannot read fronts refuses them and never writes the whole chunk, and no tier stores a part."""
        tier = self.start()
        self.put(A)
        if not tier.reads_fronts:
            with pytest.raises(InvalidCallError, match="leading blocks"):
                tier.get([Transfer(A, make_buffer(EVEN.slot_bytes), front_blocks=1)])
        with pytest.raises(InvalidCallError, match="leading blocks"):
            tier.put([make_transfer(EVEN, GONE)._replace(front_blocks=1)])
        assert tier.contains([GONE]) == [False]


def _pages(geometry: str, ref: ChunkRef) -> list[list[bytes]]:
    """Return the pages of a chunk's blocks, for each plane of each layer."""
    layout, payload, pages, begin = LAYOUTS[geometry], make_payload(LAYOUTS[geometry], ref), [], 0
    for page_bytes in layout.page_bytes:
        for _ in range(layout.planes):
            ends = range(begin + page_bytes, begin + page_bytes * (ref.num_blocks + 1), page_bytes)
            pages.append([payload[end - page_bytes : end] for end in ends])
            begin += page_bytes * ref.num_blocks
    return pages
