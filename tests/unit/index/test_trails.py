"""Search for chunks that share blocks with a sequence, compared with a look at all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import schedules

from kvstore.index import pages
from kvstore.index.trails import Trails, keys_of
from kvstore.model.keys import PREFIX_KEY_BYTES

BLOCKS = 4
CHUNKS = st.lists(st.integers(0, 2), min_size=1, max_size=BLOCKS).map(tuple)  # the content of each block


def trail_of(blocks: tuple[int, ...]) -> bytes:
    """Return a key for the end of each block that depends on all blocks before; it is not ordered like the contents."""
    return b"".join(
        sum((block + 1) * 977**number for number, block in enumerate(blocks[:end]))
        .__mul__(0x9E3779B97F4A7C15)
        .__mod__(1 << 127)
        .to_bytes(PREFIX_KEY_BYTES, "big")
        for end in range(1, len(blocks) + 1)
    )


def shared_of(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAGE", 2)


@schedules(200)
@given(chunks=st.sets(CHUNKS, max_size=20), gone=st.sets(st.integers(0, 19)), asked=CHUNKS)
def test_those_that_share_most_come_first(chunks: set[tuple[int, ...]], gone: set[int], asked: tuple[int, ...]) -> None:
    trails, there = Trails(), []
    trails.add_all(trail_of(chunk) for chunk in sorted(chunks) if len(chunk) > 2)
    for chunk in sorted(chunks):
        if len(chunk) <= 2:
            trails.add(trail_of(chunk))
    for number, chunk in enumerate(sorted(chunks)):
        if number in gone:
            trails.discard(trail_of(chunk))
        else:
            there.append(chunk)
    found = list(trails.nearest(trail_of(asked)))
    expected = {trail_of(chunk)[-PREFIX_KEY_BYTES:]: shared_of(asked, chunk) for chunk in there}
    assert dict(found) == {key: shared for key, shared in expected.items() if shared}
    assert [shared for _, shared in found] == sorted((shared for _, shared in found), reverse=True)
    most = [trail_of(chunk) for chunk in there if found and shared_of(asked, chunk) == found[0][1]]
    assert [key for key, _ in found[: len(most)]] == [trail[-PREFIX_KEY_BYTES:] for trail in sorted(most)]
    longer = {trail_of(chunk)[-PREFIX_KEY_BYTES:] for chunk in there if chunk[: len(asked)] == asked != chunk}
    assert set(trails.within(trail_of(asked))) == longer
    assert sorted(trails) == sorted(trail_of(chunk) for chunk in there)


def test_the_keys_of_a_trail() -> None:
    trail = trail_of((0, 1, 2))
    assert list(keys_of(trail)) == [trail_of((0, 1, 2)[:end])[-PREFIX_KEY_BYTES:] for end in (1, 2, 3)]
    assert list(keys_of(b"")) == []


@pytest.mark.parametrize("differing_byte", [0, 1, PREFIX_KEY_BYTES - 1])
@pytest.mark.parametrize("blocks", [2, 3])
def test_a_block_is_shared_only_if_all_bytes_of_its_key_are(differing_byte: int, blocks: int) -> None:
    stored = bytes(3 * PREFIX_KEY_BYTES)
    asked = bytearray(stored[: blocks * PREFIX_KEY_BYTES])
    asked[PREFIX_KEY_BYTES + differing_byte] = 1
    trails = Trails()
    trails.add(stored)
    assert list(trails.neighbours(bytes(asked))) == [(stored, 1)]
    assert list(trails.neighbours(stored[: blocks * PREFIX_KEY_BYTES])) == [(stored, blocks)]


class Disturbed(list[bytes]):
    """Group that another thread changes after each search, before what was found is read."""

    def __init__(self, trails: list[bytes], between: Callable[[list[bytes]], object]) -> None:
        super().__init__(trails)
        self.between = between

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            between, self.between = self.between, lambda _: None
            between(self)
        return super().__getitem__(place)


@pytest.mark.parametrize("there", range(1, 6))
@pytest.mark.parametrize(
    "between",
    [
        lambda group: group.pop(0),
        lambda group: group.pop(),
        lambda group: group.insert(0, group[0][:PREFIX_KEY_BYTES] + bytes(PREFIX_KEY_BYTES)),
        lambda group: group.append(group[0][:PREFIX_KEY_BYTES] + b"\xff" * PREFIX_KEY_BYTES),
        lambda group: [group.pop(0), group.pop(0)],
    ],
    ids=["first goes", "last goes", "one comes before", "one comes after", "two go"],
)
def test_a_chunk_that_stays_is_found_whatever_comes_and_goes(between: Any, there: int) -> None:
    first, *others = (bytes([number]) * PREFIX_KEY_BYTES for number in range(1, 9))
    group = [first + key for key in others]
    trails = Trails()
    for trail in group:
        trails.add(trail)
    stays = group[there]
    for asked in (stays, stays + others[0]):
        trails._groups[first] = Disturbed(group, lambda group: stays in (group[:2]) or between(group))
        assert next(trails.neighbours(asked)) == (stays, 2)
        assert stays in {trail for trail, _ in trails.neighbours(first)}
