"""The protocol of the cache server: its bytes, its limits, and the place of a part of a chunk."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ProtocolError
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.outcomes import number_of, outcome_of
from kvstore.protocol.payload import MAX_CHUNK_PARTS, PAGE_BYTES, Geometry, checksum, extents
from kvstore.server.pool import FreePages

REF = ChunkRef(bytes.fromhex("d0549f4f41c632608cec3efe897712b0"), 2)
LAYOUT = KVLayout(page_bytes=(4, 8), planes=1, block_tokens=2, chunk_tokens=4)


def test_golden_bytes() -> None:
    """The example is that of docs/FORMAT.md. If it changes, so must the version of the protocol."""
    data = bytes.fromhex("93 02 05 c4 14 d0 54 9f 4f 41 c6 32 60 8c ec 3e fe 89 77 12 b0 02 00 00 00")
    assert messages.encode(messages.Lookup(5, messages.pack_refs([REF]))) == data
    assert messages.decode_request(data) == messages.Lookup(5, messages.pack_refs([REF]))
    sending = messages.Sending(7, "me", 9, [(8, 32)])
    assert messages.encode(sending).hex() == "971507a26d6509919208209000"
    assert messages.decode_request(bytes.fromhex("951507a26d650991920820")) == sending, "an older sender's"
    assert messages.decode_request(messages.encode(sending)) == sending
    hello = messages.Hello(1, messages.OLDEST_VERSION, {"m": "x"}, Geometry.of(LAYOUT), 0, b"")
    assert messages.encode(hello).hex() == "97010101" "81a16da178" "97" "920408" "01" "02" "04" "a66f7061717565" "a66f7061717565" "c0" "00" "c400"  # fmt: skip # noqa: E501
    assert [number_of(outcome) for outcome in Outcome] == list(range(6))
    assert checksum([b"ab", b"c"]).hex() == "78af5f94892f3950"


def test_the_numbers_of_refusals_are_those_of_older_servers() -> None:
    names = "NO_SESSION VERSION TOKEN LIMIT CLOSING UNKNOWN MALFORMED FOREIGN DISK NO_RIGHT"
    assert {reason.name: reason for reason in messages.Refusal} == dict(zip(names.split(), range(1, 11), strict=True))


def test_a_geometry_is_a_layout() -> None:
    layout = KVLayout((4, 8), 2, 2, 4, "order", "bf16", (1, 2, 3))
    assert Geometry.of(layout).layout() == layout


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        messages.encode(messages.Ping(1)) + b"\0",
        messages.encode(messages.Welcome(1, 2, messages.NO_USAGE)),  # an answer
        bytes([0x92, 99, 1]),
        messages.encode(messages.Lookup(1, bytes(20 * (messages.MAX_REFS + 1)))),
        messages.encode(messages.Commit(1, list(range(65)), True)),
        messages.encode(messages.Fetch(1, 1, 0, messages.PIECE_BYTES + 1)),
        messages.encode(messages.Piece(1, 1, 0, b"short")),
        messages.encode(messages.Scan(1, -1)),
        bytes(messages.MAX_MESSAGE_BYTES + 1),
    ],
)
def test_what_is_no_request(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode_request(data)


def test_a_geometry_that_cannot_be() -> None:
    geometry = Geometry((4,), 1, 3, 4, "opaque", "opaque", None)
    with pytest.raises(ProtocolError, match="multiple"):
        geometry.layout()
    with pytest.raises(ProtocolError):
        messages.unpack_refs(bytes(19))
    with pytest.raises(ProtocolError):
        outcome_of(6)


@pytest.mark.parametrize(("more", "may"), [(0, True), (1, False)])
def test_a_chunk_of_too_many_parts_cannot_be(more: int, *, may: bool) -> None:
    """A server keeps something for each."""
    geometry = Geometry((4, 4), 1, 1, MAX_CHUNK_PARTS // 2 + more, "opaque", "opaque", None)
    with nullcontext() if may else pytest.raises(ProtocolError):
        geometry.layout()


def test_parts_of_what_lies_in_runs() -> None:
    runs = [(3, 1), (10, 2)]
    assert extents(runs, 0, 5) == [(3 * PAGE_BYTES, 5)]
    assert extents(runs, PAGE_BYTES - 1, 2) == [(4 * PAGE_BYTES - 1, 1), (10 * PAGE_BYTES, 1)]
    assert extents(runs, 0, 3 * PAGE_BYTES) == [(3 * PAGE_BYTES, PAGE_BYTES), (10 * PAGE_BYTES, 2 * PAGE_BYTES)]
    with pytest.raises(ProtocolError):
        extents(runs, 1, 3 * PAGE_BYTES)


@given(st.lists(st.integers(1, 40), max_size=60), st.randoms())
def test_pages_are_given_once(sizes: list[int], dice: object) -> None:
    """They are returned whole: runs never overlap, and at the end one run is free."""
    free = FreePages(200)
    held: list[tuple[tuple[int, int], ...]] = []
    for size in sizes:
        runs = free.take(size)
        if runs is None:
            assert held
            free.give(held.pop(dice.randrange(len(held))))  # type: ignore[attr-defined]
            continue
        assert sum(pages for _, pages in runs) == size
        held.append(runs)
        taken = [page for runs in held for first, pages in runs for page in range(first, first + pages)]
        assert len(taken) == len(set(taken)) == 200 - free.num_free
    for runs in held:
        free.give(runs)
    assert free.take(200) == ((0, 200),)
