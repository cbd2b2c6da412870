"""Block ends in packs: which trails a pack knows, where it keeps them, and the cost of damage."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.diskwork import make_slot
from support.parting import PROMPTS, shared_tokens
from support.rig import BLOCK, BLOCKS_PER_CHUNK, CHUNK, FILE_BYTES, NAMESPACE, Rig, tokens_of
from support.schedules import schedules

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import RemoteOptions
from kvstore.engine.requests import hash_tokens
from kvstore.format.pack import PARTIAL_SUFFIX, TRAILS_MAGIC, PackWriter, Shard, open_pack
from kvstore.format.trailrecords import TRAILS_FILE
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef, Outcome, chunk_of
from kvstore.model.keys import NO_EXTRAS, PREFIX_KEY_BYTES, Namespace
from kvstore.tiers.base import MAX_NEAREST, Transfer
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.pack import PackTier
from kvstore.tools.pack import Source, Target, export, import_pack

RIG = Rig()
RECORD_BYTES = 8 + BLOCKS_PER_CHUNK * PREFIX_KEY_BYTES
ONE = tokens_of(1, 2 * CHUNK + 2 * BLOCK)
OTHERS = [[*ONE[: CHUNK + shared], *tokens_of(9 + shared, CHUNK)] for shared in (4, 7, 12)]
NUM_TRAILS = 7  # of these; one chunk of the eight has one block only


def trail_of(tokens: Sequence[int], chunk: int = 0) -> bytes:
    return b"".join(hash_tokens(RIG.layout, tokens, NO_EXTRAS).block_keys(chunk))


def refs_of(tokens: Sequence[int]) -> list[ChunkRef]:
    return chunk_refs(hash_tokens(RIG.layout, tokens, NO_EXTRAS), with_tail=True)


def stored(folder: Path, prompts: Iterable[Sequence[int]], rig: Rig = RIG) -> Path:
    """Return a folder in which an engine has stored prompts."""
    with rig.open(slots=64, local_disk=folder) as engine:
        for prompt in prompts:
            rig.store(engine, prompt)
        assert engine.flush()
    return folder


def packed(tmp_path: Path, prompts: Iterable[Sequence[int]]) -> Path:
    report = export(Source(stored(tmp_path / "disk", prompts)), tmp_path / "a.kvpack")
    assert report.is_complete
    return tmp_path / "a.kvpack"


def behind(path: Path, rig: Rig = RIG, slots: int = 64) -> CacheEngine:
    """Open an engine that has a pack behind its memory."""
    return rig.open(slots=slots, remote=RemoteOptions(f"pack://{path}", max_queue=0))


@contextmanager
def tier_of(path: Path) -> Iterator[PackTier]:
    with closing(PackTier(open_pack(path), NAMESPACE, RIG.layout)) as tier:
        yield tier


@schedules(40)
@given(prompts=st.lists(PROMPTS, max_size=8), asked=st.lists(PROMPTS, max_size=8), slots=st.sampled_from([6, 64]))
def test_the_longest_common_prefix_is_found(prompts: list[list[int]], asked: list[list[int]], slots: int) -> None:
    """Memory keeps what it loads, or has no room for it; stored prompts are looked up as well."""
    rig = Rig()
    with TemporaryDirectory() as folder:
        export(Source(stored(Path(folder, "disk"), [tokens_of(99, CHUNK), *prompts], rig)), Path(folder, "a.kvpack"))
        with behind(Path(folder, "a.kvpack"), rig, slots) as engine:
            for prompt in [*asked, *prompts]:
                expected = shared_tokens(prompt, prompts)
                assert engine.lookup(prompt) == rig.retrieve(engine, prompt) == expected


@schedules(20)
@given(prompts=st.lists(PROMPTS, min_size=1, max_size=5), asked=st.lists(PROMPTS, max_size=5))
def test_there_and_back(prompts: list[list[int]], asked: list[list[int]]) -> None:
    """The block ends of a folder are the same after its pack was imported into another."""
    rig = Rig()
    with TemporaryDirectory() as folder:
        home = Path(folder)
        export(Source(stored(home / "disk", [tokens_of(99, CHUNK), *prompts], rig)), home / "a.kvpack")
        assert import_pack(home / "a.kvpack", Target((home / "target",))).is_complete
        export(Source(home / "target"), home / "b.kvpack")
        with open_pack(home / "a.kvpack") as one, open_pack(home / "b.kvpack") as other:
            assert one.read_trails() == other.read_trails()
        with rig.open(slots=64, local_disk=home / "target") as engine:
            for prompt in [*asked, *prompts]:
                assert engine.lookup(prompt) == rig.retrieve(engine, prompt) == shared_tokens(prompt, prompts)


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    """Trails are behind the last chunk and in front of the index, as docs/FORMAT.md says; read without our code."""
    raw = packed(tmp_path, [ONE]).read_bytes()
    _, index_at, count, _ = struct.unpack_from("<8sQQ16s", raw, len(raw) - 40)
    end = max(offset + length for *_, offset, length in struct.iter_unpack("<II16sQQ", raw[index_at:-40]))
    assert (raw[end : end + 8], count) == (b"KVSPTRL1", 3)
    assert index_at - end - 8 == 3 * RECORD_BYTES
    records = [raw[at : at + RECORD_BYTES] for at in range(end + 8, index_at, RECORD_BYTES)]
    assert all(record[:8] == xxhash.xxh3_64(record[8:]).digest() for record in records)
    assert {record[8:].rstrip(b"\0") for record in records} == {trail_of(ONE, chunk) for chunk in range(3)}


def test_a_pack_without_trails(tmp_path: Path) -> None:
    """It is as packs were before trails, byte for byte, and its chunks are found as a whole."""
    folder = stored(tmp_path / "disk", [ONE])
    next(folder.glob(f"*/{TRAILS_FILE}")).unlink()
    export(Source(folder), tmp_path / "a.kvpack")
    raw = (tmp_path / "a.kvpack").read_bytes()
    index_at = struct.unpack_from("<8sQ", raw, len(raw) - 40)[1]
    with open_pack(tmp_path / "a.kvpack") as pack:
        assert sum(max(pack.extents[0].values())) == index_at
        assert pack.read_trails() == ({}, 0)
    with behind(tmp_path / "a.kvpack") as engine:
        assert engine.lookup(ONE[: CHUNK + 2 * BLOCK]) == CHUNK
        assert RIG.retrieve(engine, ONE) == len(ONE)


def test_those_that_share_most_come_first(tmp_path: Path) -> None:
    with tier_of(packed(tmp_path, [ONE, *OTHERS])) as tier:
        asked = trail_of([*ONE[: CHUNK + 2 * BLOCK], *tokens_of(8, CHUNK)], 1)
        ((first, *more), nothing) = tier.nearest([asked, trail_of(tokens_of(7, CHUNK))])
        assert first in {trail_of(ONE, 1), trail_of(OTHERS[2], 1)}
        assert (len(more), nothing) == (MAX_NEAREST - 1, ())


def test_what_is_hidden_is_not_named(tmp_path: Path) -> None:
    """Removed, damaged and cleared chunks are hidden until the pack is opened again."""
    path = packed(tmp_path, [ONE, *OTHERS])
    with tier_of(path) as tier:
        asked = trail_of(ONE, 1)
        before = tier.nearest([asked])[0]
        tier.remove([refs_of(ONE)[1]])
        assert tier.nearest([asked])[0] == before[1:]
        broken = chunk_of(before[1])
        tier._chunks[broken] = tier._chunks[broken]._replace(offset=0)
        assert tier.get([Transfer(broken, make_slot(RIG.layout))]) == [Outcome.CORRUPT]
        assert tier.nearest([asked])[0] == before[2:]
        tier.clear()
        assert tier.nearest([asked]) == [()]
    with tier_of(path) as tier:
        assert tier.nearest([asked])[0] == before


@pytest.mark.parametrize("at", [0, 7, 8, 15, 16, 8 + RECORD_BYTES - 1, 8 + RECORD_BYTES, 8 + 2 * RECORD_BYTES + 40])
def test_damage_costs_hits_only(tmp_path: Path, caplog: pytest.LogCaptureFixture, run_json: Any, at: int) -> None:
    path = packed(tmp_path, [ONE, *OTHERS])
    assert run_json("verify", path)[0] == 0
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(TRAILS_MAGIC) + at] ^= 1
    path.write_bytes(raw)
    with open_pack(path) as pack:
        trails, lost = pack.read_trails()
        assert (lost > 0, lost + len(trails)) == (True, NUM_TRAILS)
    with behind(path) as engine:
        for prompt in (ONE, *OTHERS):
            asked = prompt[: CHUNK + 3 * BLOCK]
            assert CHUNK <= RIG.retrieve(engine, asked) <= len(asked)
            assert RIG.retrieve(engine, prompt) >= 2 * CHUNK
    assert f"{lost} trails in the pack" in caplog.text
    code, tree = run_json("verify", path)
    assert (code, [fault["damage"].split()[0] for fault in tree["faults"]]) == (1, [str(lost)])


def rewritten(path: Path, section: bytes) -> None:
    """Put other bytes in the place of the trails."""
    raw = path.read_bytes()
    begin, (_, index_at, *rest) = raw.rindex(TRAILS_MAGIC), struct.unpack_from("<8sQQ16s", raw, len(raw) - 40)
    end = struct.pack("<8sQQ16s", b"KVSPEND1", begin + len(section), *rest)
    path.write_bytes(raw[:begin] + section + raw[index_at:-40] + end)


def record_of(trail: bytes) -> bytes:
    body = trail.ljust(RECORD_BYTES - 8, b"\0")
    return xxhash.xxh3_64(body).digest() + body


FOREIGN = [
    trail_of(tokens_of(5, CHUNK)),  # of a missing chunk
    trail_of(tokens_of(5, CHUNK))[: 2 * PREFIX_KEY_BYTES] + trail_of(ONE, 1)[-PREFIX_KEY_BYTES:],  # of another length
    b"",
    b"\0" * (RECORD_BYTES - 8),
]


SECTIONS = {
    "nothing": b"",
    "no record": TRAILS_MAGIC,
    "a torn name": TRAILS_MAGIC[:5],
    "another name": b"KVSPTRL2" + record_of(trail_of(ONE, 1)),
    "of other chunks": TRAILS_MAGIC + b"".join(map(record_of, FOREIGN)),
    "torn": TRAILS_MAGIC + record_of(trail_of(ONE))[:-1],
    "many": TRAILS_MAGIC + record_of(trail_of(ONE)) * 50,
    "noise": random.Random(1).randbytes(50_000),
    "noise by its name": TRAILS_MAGIC + random.Random(1).randbytes(50_000),
}


@pytest.mark.parametrize("what", SECTIONS)
def test_what_is_no_trail_of_a_chunk_there(tmp_path: Path, what: str) -> None:
    """All checksums are right, as it was written so. Trails are bounded by the chunks there, and each is named once."""
    path = packed(tmp_path, [ONE])
    rewritten(path, SECTIONS[what])
    with open_pack(path) as pack:
        trails, lost = pack.read_trails()
        assert set(trails.values()) <= {trail_of(ONE)}
        assert len(trails) + lost <= len(pack.extents[0])
    with tier_of(path) as tier:
        named = tier.nearest([trail_of(ONE, chunk) for chunk in range(3)])
        assert set(named) <= {(trail_of(ONE),), ()}
        tier.remove(refs_of(ONE))
        assert tier.nearest([trail_of(ONE)]) == [()]
    with behind(path) as engine:
        assert RIG.retrieve(engine, ONE) == len(ONE)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path, [ONE])
    with open_pack(path) as pack:
        monkeypatch.setattr("kvstore.format.pack.read_front", refuse)
        assert pack.read_trails() == ({}, 3)
        assert pack.describe()["trails"] == 0


def refuse(*_arguments: object) -> bytes:
    raise OSError(5, "no")


def test_an_export_that_goes_on_keeps_the_trails(tmp_path: Path) -> None:
    """This includes trails of chunks evicted meanwhile; the trails of an earlier end are overwritten."""
    folder, path = stored(tmp_path / "disk", [ONE, *OTHERS]), tmp_path / "a.kvpack"
    export(Source(folder), path)
    whole = path.read_bytes()
    path.rename(path.with_name(path.name + PARTIAL_SUFFIX))  # killed before it was renamed
    victim = refs_of(ONE)[1]
    next(folder.glob(f"*/*/{victim.prefix_key.hex()}-*")).unlink()
    assert export(Source(folder), path).chunks == 0
    assert path.read_bytes() == whole
    with open_pack(path) as pack:
        assert len(pack.read_trails()[0]) == NUM_TRAILS


def test_trails_of_other_chunks_are_not_written(tmp_path: Path) -> None:
    shard = Shard(NAMESPACE, RIG.layout)
    with PackWriter(tmp_path / "a.kvpack", [shard]) as writer:
        writer.finish([trail_of(ONE), b"", trail_of(ONE)[:PREFIX_KEY_BYTES]])
    assert TRAILS_MAGIC not in (tmp_path / "a.kvpack").read_bytes()


def test_the_chunks_of_several_workers_have_one_trail(tmp_path: Path, run_json: Any) -> None:
    """All workers' chunks are found by it, and their folders get it."""
    shards = [Namespace({"model": "rig", "shard": f"tp {rank}/2"}) for rank in range(2)]
    trail = trail_of(ONE)
    for rank, namespace in enumerate(shards):
        with closing(DiskTier(tmp_path / f"cache/rank-{rank}-of-2", namespace, RIG.layout, 9 * FILE_BYTES)) as tier:
            transfer = Transfer(refs_of(ONE)[0], make_slot(RIG.layout), trail=trail)
            assert tier.put([transfer]) == [Outcome.STORED]
    path = tmp_path / "a.kvpack"
    export(Source(tmp_path / "cache"), path)
    assert path.read_bytes().count(record_of(trail)) == 1
    assert run_json("inspect", path)[1]["trails"] == 1
    assert import_pack(path, Target((tmp_path / "target",))).chunks == 2
    for rank, namespace in enumerate(shards):
        with closing(PackTier(open_pack(path), namespace, RIG.layout)) as packs:
            assert packs.nearest([trail]) == [(trail,)]
        with closing(DiskTier(tmp_path / f"target/rank-{rank}-of-2", namespace, RIG.layout, 9 * FILE_BYTES)) as tier:
            assert tier.trails() == {trail[-PREFIX_KEY_BYTES:]: trail}


def test_few_chunks_of_many_keep_their_trails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The age of their notes does not matter."""
    monkeypatch.setattr("kvstore.format.notes._SLACK", 0)
    folder = stored(tmp_path / "disk", [ONE, *OTHERS])
    export(Source(folder), tmp_path / "a.kvpack", refs=refs_of(ONE)[:1])
    with open_pack(tmp_path / "a.kvpack") as pack:
        assert list(pack.read_trails()[0].values()) == [trail_of(ONE)]
