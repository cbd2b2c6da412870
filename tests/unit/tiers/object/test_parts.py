"""Tests of the parts of the object tier: manifests, the catalog, names, URLs, and what engines tell each other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.diskwork import EVEN, MINE, get, make_ref, make_transfer, put

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ConfigError
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.object import catalog as cataloguing
from kvstore.tiers.object import log
from kvstore.tiers.object.catalog import Catalog
from kvstore.tiers.object.manifest import ENDLESS, NAME_TYPE, Ends, Manifest, Names, decode, name_of, ref_of
from kvstore.tiers.object.names import Home, Place, Stamps, parse_home, parse_place, parse_stamp
from kvstore.tiers.object.tier import ObjectTier
from kvstore.tiers.object.url import Kind, parse_target

REFS = [make_ref(number) for number in range(12)]
ODD = [
    ChunkRef(bytes(16), 1),
    ChunkRef(bytes(15) + b"\1", 256),
    ChunkRef(b"\xff" * 16, 65535),
    ChunkRef(b"a" * 16, 512),
]


def stamps_of(number: int) -> list[str]:
    stamps = Stamps()
    return [stamps.next() for _ in range(number)]


TRAILS = tuple(bytes([number]) * PREFIX_KEY_BYTES * (number + 1) for number in range(3))
STAMPS = frozenset(stamps_of(3))
Open = Callable[[], ObjectTier]


def names_of(refs: Iterable[ChunkRef]) -> Names:
    return np.array([name_of(ref) for ref in refs], NAME_TYPE)


def a_manifest() -> Manifest:
    used_s = np.arange(len(ODD), dtype=np.uint32)
    return Manifest(names_of(ODD), used_s, names_of(REFS[:2]), names_of(REFS[5:]), STAMPS, TRAILS)


def test_a_manifest_there_and_back() -> None:
    """Keys and lengths that end in zeros survive numpy."""
    found = decode(a_manifest().encode())
    assert found is not None
    assert [ref_of(name) for name in found.stored.tolist()] == ODD
    assert found.used_s.tolist() == [0, 1, 2, 3]
    assert [ref_of(name) for name in found.touched.tolist()] == REFS[:2]
    assert [ref_of(name) for name in found.removed.tolist()] == REFS[5:]
    assert (found.merged, found.trails) == (STAMPS, TRAILS)
    assert decode(Manifest().encode()) is not None


def test_damaged_manifests_are_none() -> None:
    whole = a_manifest().encode()
    for at in range(len(whole)):
        assert decode(whole[:at]) is None
        assert decode(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]) is None
    assert decode(whole + b"\0") is None


@given(st.binary(max_size=300))
def test_any_bytes_with_a_right_checksum(body: bytes) -> None:
    """Counts that a stranger chose neither raise nor allocate."""
    import xxhash

    for data in (body, b"KVSLOG1\0" + body, b"KVSLOG1\0" + b"\xff" * 20 + body):
        decode(data + xxhash.xxh3_64_digest(data))


@pytest.mark.parametrize("most", [0, 3, 1000])
def test_the_catalog_is_a_dictionary(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random changes, merged at different times, are compared with a dictionary."""
    monkeypatch.setattr(cataloguing, "_MAX_CHANGES", most)
    dice = random.Random(most)
    known: dict[ChunkRef, tuple[int, Ends]] = {}
    found, every = Catalog(), [*REFS, *ODD]

    def some_ends() -> Ends:
        written_s = dice.randrange(400)
        return dice.choice([ENDLESS, ENDLESS, Ends(written_s, written_s), Ends(written_s + 20, written_s)])

    for now_s in range(1, 400):
        some = dice.sample(every, dice.randrange(1, 6))
        match dice.randrange(5):
            case 0:
                known[some[0]] = now_s, some_ends()
                found.add(some[0], now_s, b"", known[some[0]][1])
            case 1:
                found.discard(some[0])
                known.pop(some[0], None)
            case 2:
                gone = some[3:]
                used_s = np.full(len(some[:3]), now_s, np.uint32)
                told = dice.choice([[], [some_ends() for _ in some[:3]]])
                ends = np.array(told, np.uint32).reshape(-1, 2)
                found.apply(Manifest(names_of(some[:3]), used_s, removed=names_of(gone), ends=ends))
                for ref, end in zip(some[:3], told or [ENDLESS] * 3, strict=False):
                    known[ref] = now_s, known.get(ref, (0, ENDLESS))[1].joined(end)
                known = {ref: fact for ref, fact in known.items() if ref not in gone}
            case 3:
                found.touch(some, now_s)
                known |= {ref: (now_s, known[ref][1]) for ref in some if ref in known}
            case _:
                names, used, ends_by_name = found.snapshot()
                refs = list(map(ref_of, names.tolist()))
                assert dict(zip(refs, used.tolist(), strict=True)) == {ref: used for ref, (used, _) in known.items()}
                ends_of = {ref: ends for ref, (_, ends) in known.items() if ends != ENDLESS}
                assert {ref_of(name): ends for name, ends in ends_by_name.items()} == ends_of
        assert found.holds(every) == [ref in known for ref in every]
        assert [found.used_s(ref) for ref in every] == [known.get(ref, (None, ENDLESS))[0] for ref in every]
        until_s = [known[ref][1].end_s if ref in known else 1 for ref in every]
        assert found.presence(every, now_s) == [end_s > now_s and end_s if end_s else True for end_s in until_s]


def test_an_engine_without_others_merges_its_own_chunks(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is applied then, as its own manifests are not read."""
    monkeypatch.setattr(cataloguing, "_MAX_CHANGES", 3)
    tier = open_tier()
    put(tier, *REFS)
    catalog = tier._log.view().catalog
    wait_until(lambda: len(catalog._names) >= len(REFS) - 3)
    assert len(catalog._changes) <= 3
    assert all(tier.contains(REFS))


def test_a_catalog_takes_22_bytes_a_chunk() -> None:
    """At most 40 were asked for."""
    number = 300_000
    names = np.sort(np.random.default_rng(0).integers(1, 256, (number, 18), np.uint8).reshape(-1).view(NAME_TYPE))
    found = Catalog()
    found.apply(Manifest(names, np.ones(number, np.uint32)))
    *arrays, ends = found.snapshot()
    assert sum(array.nbytes for array in arrays) == 22 * number
    assert not ends
    assert found.holds([ref_of(name) for name in names[::1000].tolist()]) == [True] * 300


def test_names() -> None:
    home = Home(MINE.id, "0123456789abcdef")
    for ref in (*REFS, *ODD):
        assert parse_place(Place(home, ref).name) == Place(home, ref)
    stamps = Stamps()
    made = [stamps.next() for _ in range(1000)]
    assert made == sorted(set(made))
    stamp = parse_stamp(home.log + made[0])
    assert stamp is not None
    assert stamp[1] == stamps.writer
    assert abs(stamp[0] - time.time()) < 60
    assert parse_home(home.log + made[0]) == home
    for name in ("", "x", "epoch", home.log, f"{MINE.id.hex()}/epoch", home.log + "x", "../../etc/passwd", "a/b/c/d"):
        assert parse_place(name) is None
        assert parse_stamp(name) is None


def test_urls() -> None:
    target = parse_target(
        "s3://bucket/a/b?endpoint=http://h:1&region=eu", {"connections": 3, "timeout_s": 1.5, "profile": None}
    )
    assert (target.kind, target.bucket, target.prefix) == (Kind.S3, "bucket", "a/b")
    assert (target.endpoint, target.region, target.connections, target.timeout_s) == ("http://h:1", "eu", 3, 1.5)
    assert str(target) == "s3://bucket/a/b"
    assert parse_target("file:///mnt/kv/", {}).bucket == "/mnt/kv"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://", "names no bucket"),
        ("s3://key:secret@bucket/x", "credentials do not belong"),
        ("s3://bucket/a//b", "empty parts"),
        ("s3://bucket/../b", "empty parts"),
        ("s3://bucket?reigon=x", "no option 'reigon'"),
        ("s3://bucket?connections=0", "whole number"),
        ("file://host/x", "whole path"),
        ("file:///", "root"),
        ("file:///x?endpoint=y", "no option 'endpoint'"),
        ("ftp://x", "it must be s3://"),
        (None, "option 'url'"),
    ],
)
def test_urls_that_cannot_be_used(url: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_target(url, {})
    assert "secret" not in str(caught.value)


@pytest.fixture
def open_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(log, "EVERY_S", 0.02)
    monkeypatch.setattr(log.Log, "_others", lambda _: [])  # as if each were in a process of its own
    opened: list[ObjectTier] = []

    def open_one() -> ObjectTier:
        setup = TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": f"file://{tmp_path}/kv", "timeout_s": 2.0})
        opened.append(ObjectTier.open(setup))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def knows(tier: ObjectTier, expected: list[bool]) -> bool:
    return tier.contains(REFS[: len(expected)]) == expected


def test_engines_tell_each_other(open_tier: Open) -> None:
    """Each learns what the other stores, removes and clears; two that open at once are in one epoch."""
    one, other = open_tier(), open_tier()
    put(one, *REFS[:3])
    wait_until(partial(knows, other, [True] * 3))
    assert [get(other, ref) for ref in REFS[:3]] == [Outcome.HIT] * 3
    other.remove([REFS[1]])
    assert get(one, REFS[1]) is Outcome.MISS
    wait_until(partial(knows, one, [True, False, True]))
    trail = b"".join(bytes([number]) * PREFIX_KEY_BYTES for number in range(8))
    one.put([make_transfer(ChunkRef(trail[-PREFIX_KEY_BYTES:], 8))._replace(trail=trail)])
    wait_until(lambda: other.nearest([trail[:32]]) == [(trail,)])
    other.clear()
    assert other.contains(REFS[:3]) == [False] * 3
    wait_until(partial(knows, one, [False] * 3))
    assert one.nearest([trail[:32]]) == [()]
    put(one, REFS[0])
    wait_until(partial(knows, other, [True, False, False]))


def test_a_put_that_a_clear_of_another_engine_overtakes(open_tier: Open, tmp_path: Path) -> None:
    """It is stored in the epoch that has ended, where nobody finds it, and the tier goes on in the new one."""
    one, other = open_tier(), open_tier()
    put(one, REFS[0])
    wait_until(partial(knows, other, [True]))
    other.clear()
    put(one, REFS[1])
    wait_until(partial(knows, one, [False]))
    if one.contains([REFS[1]]) == [False]:  # else it heard of the new epoch before, on a busy machine
        assert put(one, REFS[1]) == [Outcome.STORED]
    wait_until(partial(knows, other, [False, True]))
    assert get(other, REFS[1]) is Outcome.HIT


def test_a_chunk_that_is_gone_is_told(open_tier: Open, tmp_path: Path) -> None:
    """One engine's miss keeps the others from asking."""
    one, other = open_tier(), open_tier()
    put(one, *REFS[:2])
    wait_until(partial(knows, other, [True] * 2))
    for path in (tmp_path / "kv").rglob(f"*{REFS[0].prefix_key.hex()}*"):
        path.unlink()
    assert get(other, REFS[0]) is Outcome.MISS
    wait_until(partial(knows, one, [False, True]))
