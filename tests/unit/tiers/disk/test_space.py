"""Spare files of other sizes are reused, and every byte stays accounted."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.disk.space import Space

SIZE = 64 * 4096
HANG_GUARD_S = 30.0


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(4 * SIZE, tmp_path, threading.Condition())


def make_spare(space: Space, size_bytes: int) -> Path:
    """Make a file that was written and is not needed any more."""
    path = space.claim(size_bytes)
    assert path is not None
    path.write_bytes(bytes(size_bytes))
    space.add_spare(path, size_bytes)
    return path


@pytest.mark.parametrize("pages", [-4, -1, 0, 1, 4])
def test_a_spare_of_about_the_size_is_taken(space: Space, pages: int) -> None:
    spare = make_spare(space, SIZE + 4096 * pages)
    assert space.claim(SIZE) == spare
    assert space.used_bytes == SIZE
    assert spare.stat().st_size == min(
        SIZE, SIZE + 4096 * pages
    )  # a longer file is cut before its bytes are given back


@pytest.mark.parametrize("size_bytes", [SIZE // 2, SIZE - 4096 * 5, SIZE + 4096 * 5, 2 * SIZE])
def test_others_are_left_alone(space: Space, size_bytes: int) -> None:
    spare = make_spare(space, size_bytes)
    assert space.claim(SIZE) not in {None, spare}
    assert space.used_bytes == SIZE + size_bytes
    assert spare.stat().st_size == size_bytes


def test_the_nearest_is_taken(space: Space) -> None:
    make_spare(space, SIZE + 4096 * 3)
    nearest = make_spare(space, SIZE - 4096)
    assert space.claim(SIZE) == nearest


def test_one_that_cannot_grow_gives_way(space: Space) -> None:
    spare = make_spare(space, SIZE - 4096)
    assert space.claim(3 * SIZE + 4096) is not None
    assert space.used_bytes == 4 * SIZE
    assert space.claim(SIZE) is None  # the spare was deleted, and its bytes are not enough
    assert not spare.exists()
    assert space.used_bytes == 3 * SIZE + 4096


def test_one_that_cannot_be_cut_goes(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = make_spare(space, SIZE + 4096)

    def refuse(path: object, size: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "truncate", refuse)
    assert space.claim(SIZE) not in {None, spare}
    assert not spare.exists()
    assert space.used_bytes == SIZE


def test_one_that_is_gone_is_no_loss(space: Space) -> None:
    make_spare(space, SIZE + 4096).unlink()
    assert space.claim(SIZE) is not None
    assert space.used_bytes == SIZE


def test_what_cannot_be_deleted_is_tried_again(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes stay counted as long as it exists, and no longer."""
    spares = [make_spare(space, SIZE + 4096 * pages) for pages in (20, 40)]

    def refuse(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.disk.space.delete", refuse)
        assert space.claim(3 * SIZE) is None
        space.give_up_spares(4 * SIZE)
        space.shrink()
        space.trim()
        assert space.used_bytes == sum(path.stat().st_size for path in spares)
        patch.setattr(os, "truncate", refuse)
        with pytest.raises(PermissionError):
            space.claim(SIZE + 4096 * 19)
    assert space.claim(4 * SIZE) is not None
    assert not any(path.exists() for path in spares)
    assert space.used_bytes == 4 * SIZE


def work_of(call: Callable[[], object]) -> int:
    """Count the Python instructions of a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("sizes", [1, 200], ids=["one size", "many sizes"])
def test_a_claim_costs_the_same_however_many_spares(tmp_path: Path, sizes: int) -> None:
    """It is made under the lock of the tier. After a clear there are as many spare files as there were chunks."""

    def work(spares: int) -> int:
        space = Space(1 << 60, tmp_path, threading.Condition())
        for number in range(spares):
            size_bytes = SIZE + 4096 * (number % sizes)
            space.used_bytes += size_bytes
            space.add_spare(space.new_path(), size_bytes)
        claims = work_of(lambda: [space.claim(SIZE) for _ in range(3)])
        victims = work_of(lambda: [space._take_victim() for _ in range(3)])
        return claims + victims

    assert work(20_000) <= work(400) + 50


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(40, 90), max_size=20),
    st.lists(st.integers(40, 90), max_size=10),
    st.integers(0, 40),
)
def test_the_nearest_that_fits_is_taken(spares: list[int], wanted: list[int], room: int) -> None:
    """The result is that of a search of all spares."""
    space = Space(sum(spares) + room, Path("/nowhere"), threading.Condition())
    left: list[int] = []
    for size in spares:
        space.used_bytes += size
        space.add_spare(space.new_path(), size)
        left.append(size)
    for size in wanted:
        room_now = sum(spares) + room - space.used_bytes
        fits = [spare for spare in left if 16 * abs(spare - size) <= size and size - spare <= room_now]
        found = space._take_spare(size)
        assert (found is None) == (not fits)
        if found is None:
            continue
        assert abs(found[1] - size) == min(abs(spare - size) for spare in fits)
        left.remove(found[1])
        assert space.spare_bytes == sum(left)


def test_trimming_what_needs_none_takes_no_lock(space: Space) -> None:
    make_spare(space, SIZE)
    with space.changed:
        trimming = threading.Thread(target=space.trim, daemon=True)
        trimming.start()
        trimming.join(HANG_GUARD_S)
        assert not trimming.is_alive()
    assert space.used_bytes == SIZE
