"""Spare files of other sizes are used again, and every byte stays accounted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvstore.tiers import _space
from kvstore.tiers._space import Space

SIZE = 64 * 4096


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(4 * SIZE, tmp_path, threading.Condition())


def make_spare(space: Space, size_bytes: int) -> Path:
    """A file that was written and is not needed any more."""
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
    )  # what is longer is cut before its bytes are given back


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
    assert space.claim(SIZE) is None  # the spare went, and what it left is not enough
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


def test_bytes_that_cannot_be_deleted_stay_counted(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = make_spare(space, SIZE)

    def refuse(path: object) -> None:
        raise PermissionError

    monkeypatch.setattr(_space, "delete", refuse)
    space.empty()
    assert spare.exists()
    assert space.used_bytes == SIZE
