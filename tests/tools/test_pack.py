"""Packs: written, interrupted, shipped, refused, damaged."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support.diskwork import CHUNK_BYTES, EVEN, MINE, OTHER, bytes_on_disk, get, make_ref, make_transfer, path_of
from support.redis_server import RedisServer, running
from support.rig import Rig, tokens_of

from kvstore.engine.options import RemoteOptions
from kvstore.engine.requests import hash_tokens
from kvstore.format.pack import END_MAGIC, PARTIAL_SUFFIX, Shard, open_pack
from kvstore.format.trailrecords import TrailNote
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, FolderOwnedError
from kvstore.model.keys import NO_EXTRAS, Namespace, PrefixHasher
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.pack import PackTier
from kvstore.tools.pack import Source, Target, export, import_pack

Fill = Callable[..., Path]
REFS = [make_ref(number, 8 if number % 4 else 3) for number in range(20)]
LAYOUT = replace(EVEN, element="bf16")


@pytest.fixture
def packed(fill: Fill, tmp_path: Path) -> Path:
    folder = fill(REFS, layout=LAYOUT)
    report = export(Source(folder), tmp_path / "a.kvpack")
    assert (report.chunks, report.is_complete) == (20, True)
    return tmp_path / "a.kvpack"


def held(folder: Path, namespace: Namespace = MINE, codec: str = "none") -> int:
    """Count the chunks that an engine finds in a folder, all with the right bytes."""
    tier = DiskTier(folder, namespace, LAYOUT, 1 << 30, codec=codec)
    tier.scan()
    outcomes = [get(tier, ref, LAYOUT) for ref in REFS]
    tier.close()
    assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}
    return outcomes.count(Outcome.HIT)


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("into", ["none", "split"])
def test_there_and_back(fill: Fill, tmp_path: Path, codec: str, into: str) -> None:
    """A pack of a folder with one codec is imported into an empty one with another; a second import does nothing."""
    folder = fill(REFS, layout=LAYOUT, codec=codec)
    report = export(Source(folder), tmp_path / "a.kvpack")
    assert report.size_bytes == bytes_on_disk(folder)
    target = Target((tmp_path / "target",), codec=into)
    assert import_pack(tmp_path / "a.kvpack", target).chunks == 20
    assert held(tmp_path / "target", codec=into) == 20
    again = import_pack(tmp_path / "a.kvpack", target)
    assert (again.chunks, again.present, again.is_complete) == (0, 20, True)


def test_bytes_are_those_of_the_format(packed: Path) -> None:
    """The pack is read as docs/FORMAT.md says, without the code that wrote it."""
    raw = packed.read_bytes()
    magic, json_bytes = struct.unpack_from("<8sQ", raw)
    front_bytes = -(-(16 + json_bytes) // 4096) * 4096
    end_magic, index_at, count, digest = struct.unpack_from("<8sQQ16s", raw, len(raw) - 40)
    assert (magic, end_magic, count) == (b"KVSPACK1", b"KVSPEND1", 20)
    assert raw[16 + json_bytes : front_bytes].strip(b" ") == b""
    assert index_at + 40 * count + 40 == len(raw)
    index = raw[index_at : index_at + 40 * count]
    assert digest == xxhash.xxh3_128(raw[:front_bytes] + index).digest()
    front = json.loads(raw[16 : 16 + json_bytes])
    assert (front["format"], front["version"]) == ("kvstore-pack", 1)
    (shard,) = front["shards"]
    assert shard["namespace"] == dict(MINE.fields)
    assert shard["folders"] == [""]
    assert shard["layout"]["page_bytes"] == [4096] * 4
    position = front_bytes
    seen = set()
    for number, blocks, key, offset, length in struct.iter_unpack("<II16sQQ", index):
        assert (number, offset) == (0, position)
        assert json.loads(raw[offset + 8 : offset + 4096])["__metadata__"]["prefix_key"] == key.hex()
        seen.add((key, blocks))
        position += length
    assert position == index_at
    assert seen == set(REFS)


def test_only_what_is_wanted(fill: Fill, tmp_path: Path) -> None:
    folder = fill(REFS, layout=LAYOUT)
    report = export(Source(folder), tmp_path / "a.kvpack", refs=[REFS[3], make_ref(999), REFS[3], REFS[1]])
    assert (report.chunks, report.missing, report.is_complete) == (2, 1, False)
    import_pack(tmp_path / "a.kvpack", Target((tmp_path / "target",)))
    assert held(tmp_path / "target") == 2


def test_an_interrupted_export_goes_on(fill: Fill, tmp_path: Path) -> None:
    """It may be interrupted anywhere; written chunks are not written again, and nothing is called a pack before."""
    folder, path = fill(REFS, layout=LAYOUT), tmp_path / "a.kvpack"

    class Killed(BaseException):
        pass

    def kill_at(number: int) -> Callable[[int, int], None]:
        calls = iter(range(100))

        def tick(_total: int, _size: int) -> None:
            if next(calls) == number:
                raise Killed

        return tick

    with pytest.raises(Killed):
        export(Source(folder), path, tick=kill_at(7))
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    assert not path.exists()
    for cut_bytes in (1, 5000, 0):  # in the middle of a chunk, or with garbage behind
        os.truncate(partial, partial.stat().st_size - cut_bytes)
        with partial.open("ab") as file:
            file.write(b"garbage" * (cut_bytes == 0))
        with pytest.raises(Killed):
            export(Source(folder), path, tick=kill_at(9))
    report = export(Source(folder), path)
    assert (report.chunks, report.present) == (10, 10)
    assert not partial.exists()
    with open_pack(path) as pack:
        assert all(pack.check(0, ref) is None for ref in REFS)
    assert path.stat().st_size < bytes_on_disk(folder) + 8192


def test_the_begin_of_another_pack_is_not_gone_on_with(fill: Fill, tmp_path: Path) -> None:
    partial = tmp_path / f"a.kvpack{PARTIAL_SUFFIX}"
    folder = fill(REFS[:2], layout=LAYOUT)
    for content in (b"something else", b"x" * 5000):
        partial.write_bytes(content)
        with pytest.raises(ConfigError, match="beginning of another pack"):
            export(Source(folder), tmp_path / "a.kvpack")
        assert partial.read_bytes() == content
    partial.write_bytes(b"KVSPACK1")  # killed within the first write
    assert export(Source(folder), tmp_path / "a.kvpack").chunks == 2


def interrupted(folder: Path, path: Path, after: int) -> Path:
    """Return what an export left that was killed after so many chunks."""

    def kill(_total: int, _size: int, calls: Iterator[int]) -> None:
        if next(calls) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(Source(folder), path, tick=partial(kill, calls=itertools.count()))
    return path.with_name(path.name + PARTIAL_SUFFIX)


def test_what_was_damaged_since_an_interruption_is_written_anew(fill: Fill, tmp_path: Path) -> None:
    folder, path = fill(REFS, layout=LAYOUT), tmp_path / "a.kvpack"
    left = interrupted(folder, path, 7)
    with left.open("r+b") as file:
        file.seek(left.stat().st_size - 3 * CHUNK_BYTES // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    report = export(Source(folder), path)
    assert (report.chunks + report.present, report.present < 7) == (20, True)
    with open_pack(path) as pack:
        assert all(pack.check(0, ref) is None for ref in REFS)


def test_the_begin_of_another_models_pack_is_left_alone(fill: Fill, tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    left = interrupted(fill(REFS, layout=LAYOUT), path, 3)
    content = left.read_bytes()
    other = fill(REFS[:1], namespace=OTHER, layout=LAYOUT, name="other")
    with pytest.raises(ConfigError, match="beginning of another pack"):
        export(Source(other), path)
    assert left.read_bytes() == content


@pytest.mark.parametrize("folder", ["/etc", "../etc", "rank-0/../../etc"])
def test_a_packs_folders_lie_below_the_engines(folder: str) -> None:
    tree = Shard(MINE, LAYOUT, ("rank-0",)).to_tree()
    assert Shard.from_tree(tree).folders == ("rank-0",)
    with pytest.raises(TypeError, match="below the engine's"):
        Shard.from_tree({**tree, "folders": ["", folder]})


def test_an_index_that_names_what_is_no_chunk(packed: Path) -> None:
    """Its checksum is right, because it was written so."""
    raw = bytearray(packed.read_bytes())
    index_at, count = struct.unpack_from("<8sQQ", raw, len(raw) - 40)[1:]
    front_bytes = -(-(16 + struct.unpack_from("<8sQ", raw)[1]) // 4096) * 4096
    struct.pack_into("<Q", raw, index_at + 24, index_at - 4096)  # the first chunk reaches into the index
    digest = xxhash.xxh3_128(raw[:front_bytes] + raw[index_at : index_at + 40 * count]).digest()
    raw[-16:] = digest
    packed.write_bytes(raw)
    with pytest.raises(ConfigError, match="is inconsistent"):
        open_pack(packed)


def test_never_in_memory(fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read or write is longer than one chunk."""
    folder = fill(REFS, layout=LAYOUT)
    most: list[int] = []
    monkeypatch.setattr(os, "pwritev", _measuring(os.pwritev, most))
    export(Source(folder), tmp_path / "a.kvpack")
    assert max(most) == max(path_of(folder, ref).stat().st_size for ref in REFS)


def _measuring(call: Callable[..., int], most: list[int]) -> Callable[..., int]:
    def measured(fd: int, views: Any, offset: int) -> int:
        most.append(sum(len(view) for view in views))
        return call(fd, views, offset)

    return measured


def test_several_workers(fill: Fill, tmp_path: Path) -> None:
    """The shards of two ranks go into one pack, and back to the folders of two ranks."""
    shards = [Namespace({"model": "mine", "shard": f"tp {rank}/2"}) for rank in range(2)]
    for rank, namespace in enumerate(shards):
        fill(REFS, namespace=namespace, layout=LAYOUT, name=f"cache/rank-{rank}-of-2")
    report = export(Source(tmp_path / "cache"), tmp_path / "a.kvpack")
    assert report.chunks == 40
    import_pack(tmp_path / "a.kvpack", Target((tmp_path / "target",)))
    for rank, namespace in enumerate(shards):
        assert held(tmp_path / "target" / f"rank-{rank}-of-2", namespace) == 20


def test_several_models(fill: Fill, tmp_path: Path) -> None:
    """One of them must be chosen, by the beginning of its id."""
    fill(REFS[:3], layout=LAYOUT)
    folder = fill(REFS[3:5], namespace=OTHER, layout=LAYOUT)
    with pytest.raises(ConfigError, match=OTHER.id.hex()):
        Source(folder)
    assert export(Source(folder, OTHER.id.hex()[:6]), tmp_path / "a.kvpack").chunks == 2
    with pytest.raises(ConfigError, match="no such namespace"):
        Source(folder, "ff" * 8)
    (folder / MINE.id.hex() / "layout.json").unlink()
    with pytest.raises(ConfigError, match="does not say whose"):
        Source(folder, MINE.id.hex())


def test_refused_with_the_differing_fields_named(fill: Fill, packed: Path) -> None:
    """It is refused next to chunks of another model, by the tier of an engine with another, and by another layout."""
    folder = fill(REFS[:1], namespace=Namespace({"model": "other", "dtype": "bf16"}), layout=LAYOUT, name="other")
    with pytest.raises(ConfigError, match="differs in dtype, model"):
        import_pack(packed, Target((folder,)))
    assert import_pack(packed, Target((folder,)), anyway=True).chunks == 20
    options = {"url": f"pack://{packed}"}
    for namespace, layout, fields in (
        (OTHER, LAYOUT, "model"),
        (Namespace({"model": "mine", "dtype": "fp8"}), LAYOUT, "dtype"),
        (MINE, replace(LAYOUT, physical="HND"), "layout"),
    ):
        with pytest.raises(ConfigError, match=f"differs in {fields};"):
            open_tier("pack", TierSetup(namespace, layout, UNBOUNDED_BYTES, options))


def test_an_engine_in_the_folder(packed: Path, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "target", MINE, LAYOUT, 1 << 30)
    with pytest.raises(FolderOwnedError):
        import_pack(packed, Target((tmp_path / "target",)))
    tier.close()


def test_without_room(packed: Path, tmp_path: Path) -> None:
    """Chunks that do not fit are counted, and the rest is imported."""
    room = 10 * path_size(LAYOUT)
    report = import_pack(packed, Target((tmp_path / "target",), max_bytes=room))
    assert 0 < report.refused == 20 - report.chunks
    assert held(tmp_path / "target") == report.chunks


def path_size(layout: Any) -> int:
    from kvstore.format import chunkfile

    return chunkfile.file_bytes(layout, 8)


def test_damage(packed: Path, tmp_path: Path, run: Any, run_json: Any) -> None:
    """A damaged chunk is left out and named; a pack that is cut, or whose index is damaged, is refused."""
    with open_pack(packed) as pack:
        victim = REFS[7]
        extent = pack.extents[0][victim]
    raw = bytearray(packed.read_bytes())
    raw[extent.offset + 5000] ^= 1
    packed.write_bytes(raw)
    report = import_pack(packed, Target((tmp_path / "target",)))
    assert (report.chunks, len(report.faults)) == (19, 1)
    assert victim.prefix_key.hex() in report.faults[0].place
    assert held(tmp_path / "target") == 19
    assert run("verify", packed).exit_code == 1
    assert run("verify", packed, "--fix").exit_code == 2
    assert [fault["damage"] for fault in run_json("verify", packed)[1]["faults"]] == ["checksum does not match"]
    for cut_at in (len(raw) - 1, len(raw) // 2, 4096, 20, 3):
        packed.write_bytes(raw[:cut_at])
        with pytest.raises(ConfigError, match=r"is incomplete|is not a pack"):
            open_pack(packed)
    for place in (40, raw.rindex(END_MAGIC) - 3):  # in the front, in the index
        broken = bytearray(raw)
        broken[place] ^= 1
        packed.write_bytes(broken)
        with pytest.raises(ConfigError, match="index"):
            open_pack(packed)
    packed.write_bytes(raw + b"\0")
    with pytest.raises(ConfigError, match="is incomplete"):
        open_pack(packed)


def test_as_a_tier_of_an_engine(packed: Path) -> None:
    setup = TierSetup(MINE, LAYOUT, UNBOUNDED_BYTES, {"url": f"pack://{packed}"})
    tier = open_tier("pack", setup)
    assert isinstance(tier, PackTier)
    assert [get(tier, ref, LAYOUT) for ref in REFS] == [Outcome.HIT] * 20
    assert tier.put([make_transfer(make_ref(77), LAYOUT)]) == [Outcome.FULL]
    tier.close()
    for url in ("pack://relative.kvpack", "pack:///no/such.kvpack", None):
        with pytest.raises(ConfigError):
            open_tier("pack", replace(setup, options={"url": url}))


def test_into_redis(packed: Path, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    with running(server):
        url = f"redis://127.0.0.1:{server.port}"
        assert import_pack(packed, Target(url=url, codec="lz4")).chunks == 20
        assert import_pack(packed, Target(url=url, codec="lz4")).present == 20
        tier = open_tier("redis", TierSetup(MINE, LAYOUT, UNBOUNDED_BYTES, {"url": url, "codec": "lz4"}))
        assert [get(tier, ref, LAYOUT) for ref in REFS] == [Outcome.HIT] * 20
        tier.close()


def test_into_objects(packed: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    assert import_pack(packed, Target(url=url, codec="lz4")).chunks == 20
    assert import_pack(packed, Target(url=url, codec="lz4")).present == 20
    tier = open_tier("object", TierSetup(MINE, LAYOUT, UNBOUNDED_BYTES, {"url": url, "codec": "lz4"}))
    assert [get(tier, ref, LAYOUT) for ref in REFS] == [Outcome.HIT] * 20
    tier.close()


def test_commands(fill: Fill, tmp_path: Path, run: Any, run_json: Any) -> None:
    folder, pack, target = fill(REFS, layout=LAYOUT), tmp_path / "a.kvpack", tmp_path / "target"
    code, report = run_json("pack", "export", "--folder", folder, "-o", pack)
    assert (code, report["chunks"]) == (0, 20)
    code, tree = run_json("inspect", pack)
    assert (code, tree["kind"], tree["shards"][0]["chunks"]) == (0, "pack", 20)
    assert "20 chunks imported" in run("pack", "import", pack, "--folder", target).stdout
    config = tmp_path / "kvstore.yaml"
    config.write_text(f"local_disk: {target}\nmax_local_disk_size: 0.5\nmodel_id: llama\n", encoding="utf-8")
    result = run("pack", "import", pack, "--config", config)
    assert result.exit_code == 2
    assert "differs in model" in result.stderr
    assert run_json("pack", "import", pack, "--config", config, "--anyway")[1]["present"] == 20
    path_of(folder, REFS[0]).write_bytes(b"")
    assert run("pack", "export", "--config", config, "-o", tmp_path / "b.kvpack").exit_code == 0
    assert run("pack", "export", "--folder", folder, "-o", pack).exit_code == 1
    assert run("pack", "export", "--folder", tmp_path / "none", "-o", pack).exit_code == 2
    assert run("pack", "export", "--folder", folder, "--prompts", pack, "-o", pack).exit_code == 2
    assert run("pack", "import", config, "--folder", target).exit_code == 2
    with open_pack(pack) as opened:
        assert opened.describe()["shards"]


def test_behind_an_engine(tmp_path: Path) -> None:
    """An engine finds another's chunks in the pack and sends nothing there; its memory keeps what it loads."""
    rig = Rig()
    tokens = tokens_of(1, 70)
    with rig.open(local_disk=tmp_path / "disk") as engine:
        rig.store(engine, tokens)
        assert engine.flush()
    export(Source(tmp_path / "disk"), tmp_path / "a.kvpack")
    with rig.open(remote=RemoteOptions(f"pack://{tmp_path}/a.kvpack", max_queue=0)) as engine:
        assert engine.lookup(tokens) == 68
        assert engine.prefetch(tokens) == 68
        assert rig.retrieve(engine, tokens) == 68
        rig.store(engine, tokens_of(2, 40))
        assert engine.lookup(tokens_of(2, 40)) == 40
        stats = engine.stats()
        assert stats.index.sends_dropped == 0
        assert stats.remote is not None
        assert (stats.remote.hits, stats.remote.full) == (5, 0)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_the_end_of_a_prompt_that_lies_in_a_longer_chunk(tmp_path: Path, codec: str) -> None:
    """The tail has no file, but a pack of that prompt alone has its blocks, and none of those that follow."""
    rig, longer = Rig(), tokens_of(1, 64)
    short = longer[:40]
    with rig.open(local_disk=tmp_path / "disk", disk_codec=codec) as engine:
        rig.store(engine, longer)
        assert rig.store(engine, short) == 0
        assert engine.flush()
    hasher = hash_tokens(rig.layout, short, NO_EXTRAS)
    refs = chunk_refs(hasher, with_tail=True)
    pack, source = tmp_path / "a.kvpack", Source(tmp_path / "disk")
    assert export(source, tmp_path / "b.kvpack", refs=refs).missing == 1, "without its trail it cannot be found"
    report = export(source, pack, refs=refs, trails={refs[-1]: trail_of(hasher)})
    assert (report.chunks, report.is_complete) == (3, True)
    import_pack(pack, Target((tmp_path / "target",), codec=codec))
    with rig.open(local_disk=tmp_path / "target", disk_codec=codec) as engine:
        assert rig.retrieve(engine, short) == engine.lookup(longer) == 40
    with rig.open(remote=RemoteOptions(f"pack://{pack}", max_queue=0)) as engine:
        assert rig.retrieve(engine, short) == 40


def test_the_end_of_a_prompt_in_a_damaged_chunk_is_missing(tmp_path: Path) -> None:
    rig, longer = Rig(), tokens_of(1, 16)
    with rig.open(local_disk=tmp_path / "disk") as engine:
        rig.store(engine, longer)
        assert engine.flush()
    hasher = hash_tokens(rig.layout, longer[:8], NO_EXTRAS)
    (ref,) = chunk_refs(hasher, with_tail=True)
    (file,) = (tmp_path / "disk").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[4100] ^= 1  # in the blocks that are wanted
    file.write_bytes(content)
    report = export(Source(tmp_path / "disk"), tmp_path / "a.kvpack", refs=[ref], trails={ref: trail_of(hasher)})
    assert (report.chunks, report.missing) == (0, 1)


def test_a_note_that_is_wrong_about_a_chunk_leads_to_nothing(tmp_path: Path) -> None:
    """The note says that a chunk of one block holds three."""
    rig = Rig()
    with rig.open(local_disk=tmp_path / "disk") as engine:
        rig.store(engine, tokens_of(2, 4))
        assert engine.flush()
    (inventory,) = Source(tmp_path / "disk").inventories[0]
    (held,) = (place.ref for place in inventory.places() if place.ref is not None)
    hasher = hash_tokens(rig.layout, tokens_of(1, 8), NO_EXTRAS)
    (ref,) = chunk_refs(hasher, with_tail=True)
    TrailNote(rig.layout).add(inventory.home, trail_of(hasher) + held.prefix_key, 1, lambda: {held.prefix_key})
    report = export(Source(tmp_path / "disk"), tmp_path / "a.kvpack", refs=[ref], trails={ref: trail_of(hasher)})
    assert (report.chunks, report.missing) == (0, 1)


def trail_of(hasher: PrefixHasher) -> bytes:
    """Return the trail of a sequence's end."""
    return b"".join(hasher.block_keys(len(hasher.chunk_keys())))
