"""Placement of chunks on members: the same everywhere and forever, even, and with no needless move."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from kvstore.model.chunks import ChunkRef
from kvstore.tiers.members.placement import owners, seed_of

NAMES = [f"kvs-{number}.kvs.default.svc.cluster.local:5566" for number in range(10)]
REFS = [ChunkRef(hashlib.sha256(str(number).encode()).digest()[:16], 4) for number in range(20_000)]

GOLDEN = [0, 4, 2, 3, 1, 3, 2, 3, 4, 1, 3, 4, 2, 3, 2, 3, 3, 1, 3, 1, 2, 1, 0, 4]


def place(names: list[str], refs: list[ChunkRef] = REFS) -> list[str]:
    """Return the name of each chunk's owner."""
    return [names[owner] for owner in owners(refs, [seed_of(name) for name in names])]


def test_engines_of_all_versions_agree() -> None:
    """Golden values: with others, all chunks would move when engines are updated one by one."""
    assert seed_of("10.0.0.5:5566") == 5_648_144_410_839_766_603
    assert owners(REFS[:24], [seed_of(name) for name in NAMES[:5]]) == GOLDEN


def test_the_order_of_names_does_not_matter() -> None:
    assert place(NAMES) == place(NAMES[::-1])


def test_the_length_of_a_chunk_does_not_matter() -> None:
    assert place(NAMES) == place(NAMES, [ref._replace(num_blocks=1) for ref in REFS])


@pytest.mark.parametrize("num_members", [2, 3, 7, 10])
def test_shares_are_even(num_members: int) -> None:
    shares = Counter(place(NAMES[:num_members]))
    even = len(REFS) / num_members
    assert len(shares) == num_members
    assert all(0.9 * even < share < 1.1 * even for share in shares.values())


@pytest.mark.parametrize("gone", [0, 4, 9])
def test_a_member_that_leaves_moves_only_its_own_chunks(gone: int) -> None:
    before = place(NAMES)
    after = place([name for name in NAMES if name != NAMES[gone]])
    assert {then for then, now in zip(before, after, strict=True) if then != now} == {NAMES[gone]}
    moved = Counter(now for then, now in zip(before, after, strict=True) if then != now)
    assert len(moved) == 9, "all others share them"


def test_keys_that_differ_little_are_spread_too() -> None:
    shares = Counter(place(NAMES[:4], [ChunkRef(number.to_bytes(16, "little"), 1) for number in range(4000)]))
    assert all(800 < share < 1200 for share in shares.values())
