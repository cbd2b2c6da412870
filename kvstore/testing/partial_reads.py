"""Tests of reads of a part of a chunk, which only some tiers serve: single layers, or leading blocks."""

from __future__ import annotations

import pytest

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import InvalidCallError
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.testing.harness import (
    DEEP,
    EVEN,
    LAYOUTS,
    ODD,
    TierHarness,
    is_untouched,
    make_buffer,
    make_payload,
    make_ref,
    make_transfer,
)
from kvstore.tiers.base import Transfer

A, B = make_ref(1), make_ref(2)
FULL = {name: make_ref(1, layout.blocks_per_chunk) for name, layout in LAYOUTS.items()}


def layer_bytes(layout: KVLayout, ref: ChunkRef, layers: range) -> slice:
    """Return the slice of a payload that holds some adjacent layers."""
    return slice(layout.layer_range(layers.start, ref.num_blocks)[0], layout.layer_range(layers[-1], ref.num_blocks)[1])


class LayerTests(TierHarness):
    """Tests of ``get_layers``."""

    def _get_layers(self, ref: ChunkRef, layers: range, buffer: ByteArray) -> Outcome:
        """Read layers of a chunk; a hit must have the right bytes."""
        (outcome,) = self.tier.get_layers([Transfer(ref, buffer)], layers)
        if outcome is Outcome.HIT:
            part = layer_bytes(self.layout, ref, layers)
            assert buffer[part].tobytes() == make_payload(self.layout, ref)[part]
        return outcome

    @pytest.mark.parametrize("shift_bytes", [0, 1])
    @pytest.mark.parametrize("geometry", LAYOUTS)
    def test_layers_one_by_one_make_a_chunk(self, geometry: str, shift_bytes: int) -> None:
        """Layers read in any order make a chunk, for every length, also in buffers that direct I/O cannot use."""
        layout = LAYOUTS[geometry]
        tier = self.start(layout)
        refs = [make_ref(blocks, blocks) for blocks in {1, layout.blocks_per_chunk}]
        assert self.put(*refs) == [Outcome.STORED] * len(refs)
        for ref in refs:
            buffer = make_buffer(layout.slot_bytes, shift_bytes=shift_bytes)
            for layer in sorted(range(layout.num_layers), key=lambda layer: layer * 7 % 5):
                assert self._get_layers(ref, range(layer, layer + 1), buffer) is Outcome.HIT
            payload = make_payload(layout, ref)
            assert buffer[: len(payload)].tobytes() == payload
        assert tier.counters.hits >= len(refs)
        if tier.reads_layers:
            assert tier.counters.hits == len(refs)

    @pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2, 3), range(2), range(1, 3), range(3)], ids=str)
    @pytest.mark.parametrize("blocks", [1, 3, 4])
    def test_other_bytes_are_left_alone(self, layers: range, blocks: int) -> None:
        """A read of some layers, which begin and end inside of pages, writes no other bytes."""
        tier, ref = self.start(ODD), make_ref(blocks, blocks)
        self.put(ref)
        buffer = make_buffer(ODD.slot_bytes)
        assert self._get_layers(ref, layers, buffer) is Outcome.HIT
        if tier.reads_layers:
            part = layer_bytes(ODD, ref, layers)
            assert is_untouched(buffer[: part.start])
            assert is_untouched(buffer[part.stop :])

    def test_layers_of_many(self) -> None:
        """A few layers out of hundreds can be read."""
        self.start(DEEP)
        self.put(make_ref(1, 2))
        for layers in (range(3), range(100, 259), range(259, 260), range(260)):
            assert self._get_layers(make_ref(1, 2), layers, make_buffer(DEEP.slot_bytes)) is Outcome.HIT

    def test_a_batch_with_a_miss(self) -> None:
        """Answers come in the order of the batch."""
        tier = self.start()
        self.put(A)
        transfers = [Transfer(ref, make_buffer(EVEN.slot_bytes)) for ref in (B, A)]
        assert tier.get_layers(transfers, range(1)) == [Outcome.MISS, Outcome.HIT]
        assert tier.get_layers([], range(1)) == []

    def test_a_removed_chunk(self) -> None:
        """A chunk that is removed after its first layers were read is a miss."""
        tier, buffer = self.start(), make_buffer(EVEN.slot_bytes)
        self.put(A)
        assert self._get_layers(A, range(1), buffer) is Outcome.HIT
        tier.remove([A])
        assert self._get_layers(A, range(1, 2), buffer) is Outcome.MISS

    def test_damage_in_the_layers_asked_for(self) -> None:
        """Damage in the requested layers is found and counted, and the chunk is removed."""
        self.only_if_bytes_are_checked()
        if not self.exact_sizes:
            pytest.skip("the storage does not hold the payload as it is")
        tier = self.start(ODD)
        self.put(A)
        value = self.raw_read(A)
        assert value is not None
        begin = value.index(make_payload(ODD, A)[layer_bytes(ODD, A, range(1, 2))])
        self.raw_write(A, value[:begin] + bytes([value[begin] ^ 1]) + value[begin + 1 :])
        if tier.reads_layers:
            assert self._get_layers(A, range(1), make_buffer(ODD.slot_bytes)) is Outcome.HIT
            assert self._get_layers(A, range(2, 3), make_buffer(ODD.slot_bytes)) is Outcome.HIT
        assert self._get_layers(A, range(1, 3), make_buffer(ODD.slot_bytes)) is Outcome.CORRUPT
        assert self._get_layers(A, range(1), make_buffer(ODD.slot_bytes)) is Outcome.MISS
        assert tier.counters.corrupt == 1
        self.check_bytes()

    def test_another_chunk_in_its_place(self) -> None:
        """Key and length are compared for all layers."""
        self.only_if_bytes_are_checked()
        self.start()
        self.put(A, B)
        value = self.raw_read(B)
        assert value is not None
        self.raw_write(A, value)
        assert self._get_layers(A, range(1, 2), make_buffer(EVEN.slot_bytes)) is Outcome.CORRUPT

    @pytest.mark.parametrize("layers", [range(0), range(1, 3), range(-1, 1), range(0, 2, 2), range(1, -1, -1)], ids=str)
    def test_impossible_layers_are_refused(self, layers: range) -> None:
        """Impossible layers are refused by tiers that read layers; the others read whole chunks."""
        tier = self.start()
        self.put(A)
        if tier.reads_layers:
            transfer = make_transfer(EVEN, A)
            before = transfer.buffer.copy()
            with pytest.raises(InvalidCallError, match="layers"):
                tier.get_layers([transfer], layers)
            assert (transfer.buffer == before).all()


class FrontTests(TierHarness):
    """Tests of ``front_blocks`` of a ``Transfer``."""

    def _only_if_fronts_are_read(self) -> None:
        if not self.tier.reads_fronts:
            pytest.skip("this tier reads whole chunks only")

    def _get_front(self, ref: ChunkRef, front_blocks: int, buffer: ByteArray) -> Outcome:
        (outcome,) = self.tier.get([Transfer(ref, buffer, front_blocks=front_blocks)])
        return outcome

    @pytest.mark.parametrize("shift_bytes", [0, 1])
    @pytest.mark.parametrize("geometry", LAYOUTS)
    def test_leading_blocks_are_as_a_chunk_of_their_own(self, geometry: str, shift_bytes: int) -> None:
        """Leading blocks arrive in the layout of a shorter chunk, and no byte behind them is written."""
        layout = LAYOUTS[geometry]
        self.start(layout)
        self.put(FULL[geometry])
        self._only_if_fronts_are_read()
        ref = FULL[geometry]
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
        self._only_if_fronts_are_read()
        before = tier.counters.hits, tier.counters.misses
        buffers = [make_buffer(EVEN.slot_bytes) for _ in range(3)]
        wanted = [(B, 1), (A, 1), (A, 0)]
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
            tier.put([make_transfer(EVEN, B)._replace(front_blocks=1)])
        assert tier.contains([B]) == [False]


def _pages(geometry: str, ref: ChunkRef) -> list[list[bytes]]:
    """Return the pages of a chunk's blocks, for each plane of each layer."""
    layout, payload, pages, begin = LAYOUTS[geometry], make_payload(LAYOUTS[geometry], ref), [], 0
    for page_bytes in layout.page_bytes:
        for _ in range(layout.planes):
            ends = range(begin + page_bytes, begin + page_bytes * (ref.num_blocks + 1), page_bytes)
            pages.append([payload[end - page_bytes : end] for end in ends])
            begin += page_bytes * ref.num_blocks
    return pages
