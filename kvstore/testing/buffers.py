"""Tests of buffers: a tier reads and writes exactly the bytes that it was given, and keeps none of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import InvalidCallError
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.testing.harness import (
    EVEN,
    ODD,
    TierHarness,
    is_untouched,
    make_buffer,
    make_payload,
    make_ref,
    make_transfer,
)
from kvstore.tiers.base import Transfer

TAIL = make_ref(7, 1)
FULL = make_ref(8, 4)
both_layouts = pytest.mark.parametrize("layout", [EVEN, ODD], ids=["even", "odd"])
BAD_REFS = {
    "no blocks": ChunkRef(b"k" * 16, 0),
    "negative blocks": ChunkRef(b"k" * 16, -1),
    "longer than a chunk": ChunkRef(b"k" * 16, 5),
    "short key": ChunkRef(b"k" * 15, 4),
    "long key": ChunkRef(b"k" * 17, 4),
    "no key": ChunkRef(b"", 4),
}
BAD_BUFFERS: dict[str, Any] = {
    "empty": make_buffer(0),
    "a page too short": make_buffer(EVEN.slot_bytes - ALIGNMENT_BYTES),
    "a byte too short": make_buffer(EVEN.slot_bytes - 1),
    "every second byte": make_buffer(2 * EVEN.slot_bytes)[::2],
    "two dimensions": make_buffer(EVEN.slot_bytes).reshape(2, -1),
    "other type": make_buffer(8 * EVEN.slot_bytes).view(np.int64),
}


def touched_bytes(layout: KVLayout, ref: ChunkRef) -> int:
    """Return the bytes of the payload and its padding, which are all that a tier may write to."""
    return round_up(layout.payload_bytes(ref.num_blocks), ALIGNMENT_BYTES)


class BufferTests(TierHarness):
    """Tests of slots, tails in slots, buffers at odd addresses, and buffers that break the contract."""

    @both_layouts
    def test_put_leaves_the_payload_as_it_is(self, layout: KVLayout) -> None:
        """A put changes neither the payload nor the bytes behind the padding."""
        tier = self.start(layout)
        ref, buffer, *_ = make_transfer(layout, TAIL)
        tier.put([Transfer(ref, buffer)])
        payload = make_payload(layout, TAIL)
        assert buffer[: len(payload)].tobytes() == payload
        assert is_untouched(buffer[touched_bytes(layout, TAIL) :])

    @both_layouts
    def test_put_may_only_zero_the_padding(self, layout: KVLayout) -> None:
        """After a put the padding holds zeros or its old bytes."""
        tier = self.start(layout)
        ref, buffer, *_ = make_transfer(layout, TAIL)
        tier.put([Transfer(ref, buffer)])
        padding = buffer[layout.payload_bytes(1) : touched_bytes(layout, TAIL)]
        assert is_untouched(padding) or not padding.any()

    @both_layouts
    def test_get_writes_nothing_behind_the_padding(self, layout: KVLayout) -> None:
        """A tail in a slot leaves the rest of the slot alone."""
        tier = self.start(layout)
        self.put(TAIL)
        buffer = make_buffer(layout.slot_bytes)
        assert tier.get([Transfer(TAIL, buffer)]) == [Outcome.HIT]
        assert is_untouched(buffer[touched_bytes(layout, TAIL) :])

    def test_a_buffer_just_large_enough(self) -> None:
        """A tail can be read into a buffer that is smaller than a slot."""
        tier = self.start(ODD)
        self.put(TAIL)
        buffer = make_buffer(touched_bytes(ODD, TAIL))
        assert tier.get([Transfer(TAIL, buffer)]) == [Outcome.HIT]
        tier.remove([TAIL])
        assert tier.put([Transfer(TAIL, buffer)]) == [Outcome.STORED]
        assert self.get(TAIL) == [Outcome.HIT]

    def test_get_touches_no_other_memory(self) -> None:
        """Of three adjacent slots, a read into the middle one leaves the others unchanged."""
        tier = self.start()
        self.put(FULL)
        size = EVEN.slot_bytes
        row = make_buffer(3 * size)
        assert tier.get([Transfer(FULL, row[size : 2 * size])]) == [Outcome.HIT]
        assert row[size : 2 * size].tobytes() == make_payload(EVEN, FULL)
        assert is_untouched(row[:size])
        assert is_untouched(row[2 * size :])

    def test_each_chunk_goes_to_its_own_buffer(self) -> None:
        """One batch fills adjacent slots, each with its chunk."""
        tier = self.start()
        refs = [make_ref(number) for number in range(6)]
        self.put(*refs)
        size = EVEN.slot_bytes
        row = make_buffer(6 * size)
        tier.get([Transfer(ref, row[n * size : (n + 1) * size]) for n, ref in enumerate(refs)])
        assert row.tobytes() == b"".join(make_payload(EVEN, ref) for ref in refs)

    @pytest.mark.parametrize("shift_bytes", [1, 8, 512, 4095])
    def test_unaligned_buffers(self, shift_bytes: int) -> None:
        """Unaligned buffers may be slower but get the right bytes."""
        tier = self.start(ODD)
        assert tier.put([make_transfer(ODD, FULL, shift_bytes=shift_bytes)]) == [Outcome.STORED]
        assert self.get(FULL) == [Outcome.HIT]
        buffer = make_buffer(ODD.slot_bytes, shift_bytes=shift_bytes)
        assert tier.get([Transfer(FULL, buffer)]) == [Outcome.HIT]
        assert buffer[: ODD.payload_bytes(4)].tobytes() == make_payload(ODD, FULL)

    def test_put_keeps_no_hold_of_the_buffer(self) -> None:
        """The slot may be reused for another chunk as soon as ``put`` has returned."""
        tier = self.start()
        transfer = make_transfer(EVEN, FULL)
        tier.put([transfer])
        transfer.buffer[:] = 0
        assert self.get(FULL) == [Outcome.HIT]

    def test_get_gives_no_hold_of_the_storage(self) -> None:
        """A write to the buffer after ``get`` does not reach the tier."""
        tier = self.start()
        self.put(FULL)
        buffer = make_buffer(EVEN.slot_bytes)
        tier.get([Transfer(FULL, buffer)])
        buffer[:] = 0
        assert self.get(FULL) == [Outcome.HIT]

    def test_the_padding_is_not_part_of_the_chunk(self) -> None:
        """Equal payloads are equal chunks, with any bytes behind them."""
        if not self.equal_bytes:
            pytest.skip("no two writes are stored as the same bytes")
        tier = self.start(ODD)
        ref, buffer, *_ = make_transfer(ODD, TAIL)
        tier.put([Transfer(ref, buffer)])
        first = self.raw_read(TAIL)
        buffer[ODD.payload_bytes(1) :] = 0x3C
        tier.put([Transfer(ref, buffer)])
        assert self.raw_read(TAIL) == first

    @pytest.mark.parametrize("kind", BAD_REFS)
    def test_impossible_chunks_are_refused(self, kind: str) -> None:
        """A key or a length that no chunk has is the caller's mistake, and moves nothing of the batch."""
        tier = self.start()
        batch = [make_transfer(EVEN, FULL), Transfer(BAD_REFS[kind], make_buffer(EVEN.slot_bytes))]
        with pytest.raises(InvalidCallError):
            tier.put(batch)
        with pytest.raises(InvalidCallError):
            tier.get(batch)
        assert tier.contains([FULL]) == [False]
        assert self.held() == set()

    @pytest.mark.parametrize("kind", BAD_BUFFERS)
    def test_impossible_buffers_are_refused(self, kind: str) -> None:
        """A buffer that does not hold the payload is the caller's mistake, and moves nothing of the batch."""
        tier = self.start()
        bad: ByteArray = BAD_BUFFERS[kind]
        batch = [make_transfer(EVEN, FULL), Transfer(make_ref(9), bad)]
        with pytest.raises(InvalidCallError):
            tier.put(batch)
        assert tier.contains([FULL]) == [False]
        assert self.held() == set()
        with pytest.raises(InvalidCallError):
            tier.get(batch)
