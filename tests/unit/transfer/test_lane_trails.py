"""A chunk that others have stored is written once more if its blocks cannot be found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gate import HANG_GUARD_S
from support.lane_bench import Bench, ref_of
from support.rig import BLOCKS_PER_CHUNK, FakeTier

REF = ref_of(1)
TRAIL = b"".join(bytes([number]) * 16 for number in range(2, BLOCKS_PER_CHUNK + 1)) + REF.prefix_key


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Yield a bench in which another engine has stored the chunk, with its trail or without."""
    bench = Bench(asks=True)
    yield bench
    bench.lane.close()


def puts_of(bench: Bench, trail: bytes) -> int:
    """Count the calls of the tier's ``put`` for one write."""
    puts: list[None] = []
    bench.tier.before_put = lambda: puts.append(None)
    bench.fill(1)
    bench.lane.write(REF, 1, trail=trail)
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.written == [(REF, True)]
    return len(puts)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_older_engines_chunk_gets_its_trail(bench: Bench, is_told: bool) -> None:
    bench.tier.chunks[REF] = b""
    bench.tier.told_trails.update({REF: TRAIL} if is_told else {})
    assert puts_of(bench, TRAIL) == (not is_told)
    assert bench.tier.nearest([TRAIL]) == [(TRAIL,)]


def test_a_chunk_whose_trail_nobody_knows_is_not_written_again(bench: Bench) -> None:
    bench.tier.chunks[REF] = b""
    assert puts_of(bench, b"") == 0


def test_a_tier_without_trails_is_asked_for_keys_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTier, "keeps_trails", False)
    monkeypatch.setattr(FakeTier, "nearest", None)
    bench.tier.chunks[REF] = b""
    assert puts_of(bench, TRAIL) == 0


def test_what_nobody_has_is_written_without_more_questions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTier, "nearest", None)
    assert puts_of(bench, TRAIL) == 1
