"""Bytes of a chunk that have arrived."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from support.schedules import schedules

from kvstore.server.sessions import _MAX_PARTS, Lease
from kvstore.server.spaces import Chunk

SIZE = 24


def make_lease(num_bytes: int = SIZE) -> Lease:
    chunk = Chunk.__new__(Chunk)
    chunk.num_bytes = num_bytes
    return Lease(1, chunk, 0.0, is_write=True)


@schedules(200)
@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 8)), max_size=12))
def test_a_chunk_is_covered_once_every_byte_has_arrived_once(pieces: list[tuple[int, int]]) -> None:
    lease, arrived = make_lease(), set[int]()
    for begin, length in pieces:
        new = set(range(begin, min(SIZE, begin + length)))
        assert lease.note_arrived(begin, min(SIZE, begin + length)) == (not new & arrived)
        if new & arrived:
            return
        arrived |= new
        assert lease.is_covered == (len(arrived) == SIZE)
        assert {number for part in lease.arrived for number in range(*part)} == arrived


def test_pieces_in_any_order() -> None:
    pieces = [(begin, begin + 4096) for begin in range(0, 40 * 4096, 4096)]
    Random(1).shuffle(pieces)
    lease = make_lease(40 * 4096)
    assert [lease.note_arrived(*piece) for piece in pieces] == [True] * 40
    assert lease.is_covered


def test_gaps_without_end() -> None:
    lease = make_lease(10_000)
    noted = [lease.note_arrived(begin, begin + 1) for begin in range(0, 1000, 2)]
    assert noted[:_MAX_PARTS] == [True] * _MAX_PARTS
    assert not any(noted[_MAX_PARTS:])
    assert len(lease.arrived) == _MAX_PARTS
