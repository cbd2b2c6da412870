"""Tests of what Mooncake's process makes of codes; a byte behind an object tells that it has grown."""

from __future__ import annotations

import mmap
import socket

import pytest

from kvstore.tiers.mooncake.child import Server

GOOD, SMALL, FAILED = [4, 8, -600], -600, -800


class Ranges:
    """A store that answers each read of ranges with the same lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.asked: list[object] = []

    def get_into_ranges(self, _places: list[int], _keys: list[list[str]], *sides: object) -> list[list[list[int]]]:
        self.asked = [*sides]
        return [[[*self.lengths]]]


@pytest.mark.parametrize(
    ("lengths", "code"),
    [
        (GOOD, 12),
        ([4, 8, 1], SMALL),  # it has grown
        ([4, -600, -600], SMALL),  # it has shrunk
        ([-704, -704, -704], -704),
        ([4, 8, FAILED], FAILED),  # the byte's own transfer may run
        ([4, FAILED, 1], FAILED),
        ([4, 7, -600], FAILED),
        ([4, 8, 0], FAILED),
    ],
)
def test_all_of_an_object_is_read(lengths: list[int], code: int) -> None:
    store = Ranges(lengths)
    near, far = socket.socketpair()
    with near, far:
        server = Server(near, mmap.mmap(-1, 4096), store, "tcp")
        assert server._read(["key"], [0], [[[0, 4]], [[0, 4]], [[4, 8]]], is_all=True) == [code]
    assert store.asked == [[[[0, 4, 0]]], [[[0, 4, 12]]], [[[4, 8, 1]]]]
