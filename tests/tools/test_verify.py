"""``kvstore verify`` finds every fault, and nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import diskwork
from support.diskwork import CHUNK_BYTES, EVEN, MINE, OTHER, make_ref, make_transfer, path_of
from support.redis_server import RedisServer, running

from kvstore.format.chunkfile import encode_header
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import FolderOwnedError
from kvstore.model.keys import ChunkKey
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tools.verify import QUARANTINE, verify

Fill = Callable[..., Path]


def rewritten(path: Path, ref: ChunkRef, change: Callable[[bytes], bytes]) -> None:
    """Change a chunk's header, keeping its length."""
    raw = path.read_bytes()
    header = change(raw[:4096].rstrip()).ljust(4096)
    assert len(header) == 4096
    assert header != raw[:4096], "the fault was not planted"
    path.write_bytes(header + raw[4096:])


def as_fifo(path: Path, ref: ChunkRef) -> None:
    path.unlink()
    os.mkfifo(path)


def as_loop(path: Path, ref: ChunkRef) -> None:
    path.unlink()
    path.symlink_to(path)


def as_folder(path: Path, ref: ChunkRef) -> None:
    path.unlink()
    path.mkdir()


def of_another(path: Path, ref: ChunkRef) -> None:
    """Put a sound chunk under another chunk's name."""
    key = ChunkKey(MINE.id, make_ref(65_000).prefix_key)
    slot = make_transfer(ref).buffer
    path.write_bytes(encode_header(EVEN, key, 8, slot) + slot.tobytes())


def of_another_namespace(path: Path, ref: ChunkRef) -> None:
    slot = make_transfer(ref).buffer
    path.write_bytes(encode_header(EVEN, ChunkKey(OTHER.id, ref.prefix_key), 8, slot) + slot.tobytes())


FAULTS: dict[str, Callable[[Path, ChunkRef], None]] = {
    "cut": lambda path, _: diskwork.cut(path),
    "extended": lambda path, _: diskwork.extend(path),
    "bit in payload": lambda path, ref: diskwork.flip(path, 4096 + int.from_bytes(ref.prefix_key[:2], "little") * 97),
    "bit in header": lambda path, ref: diskwork.flip(path, int.from_bytes(ref.prefix_key[:2], "little") % 4096),
    "header not JSON": lambda path, ref: rewritten(path, ref, lambda h: h[:8] + b"x" + h[9:]),
    "wrong key": of_another,
    "wrong namespace": of_another_namespace,
    "wrong token count": lambda path, ref: rewritten(
        path, ref, lambda h: h.replace(b'"tokens":"256"', b'"tokens":"224"')
    ),
    "other version": lambda path, ref: rewritten(
        path, ref, lambda h: h.replace(b'"format_version":"1"', b'"format_version":"2"')
    ),
    "empty": lambda path, _: os.truncate(path, 0),
    "folder": as_folder,
    "unreadable: fifo": as_fifo,
    "unreadable: loop": as_loop,
}


NO_FILES = {"folder", "unreadable: fifo", "unreadable: loop"}


@pytest.mark.parametrize("noted", [True, False], ids=["layout noted", "layout inferred"])
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_hundred_faults_in_a_thousand_chunks(fill: Fill, noted: bool, codec: str) -> None:
    """Faults of every kind are all found where they were planted, and nothing else is; --fix sets files aside."""
    refs = [make_ref(number) for number in range(1000)]
    layout = replace(EVEN, element="bf16")
    folder = fill(refs, layout=layout, codec=codec)
    if not noted:
        (folder / MINE.id.hex() / _folder.LAYOUT_FILE).unlink()
    victims = random.Random(5).sample(refs, 100)
    planted = {}
    for number, ref in enumerate(victims):
        kind = list(FAULTS)[number % len(FAULTS)]
        path = path_of(folder, ref)
        FAULTS[kind](path, ref)
        planted[str(path)] = kind
    seen = []
    report = verify(str(folder), tick=lambda total, size: seen.append((total, size)))
    assert {fault.place for fault in report.faults} == planted.keys()
    assert len(report.faults) == 100
    assert report.chunks == 1000
    assert report.fixed == 0
    assert len(seen) == 1000
    assert {total for total, _ in seen} == {1000}
    assert all(os.path.lexists(place) for place in planted), "nothing was changed"

    report = verify(str(folder), fix=True)
    files = {place for place, kind in planted.items() if kind not in NO_FILES}
    assert {fault.place for fault in report.faults if fault.fixed} == files
    assert len(report.faults) == 100
    aside = (folder / QUARANTINE / MINE.id.hex()).iterdir()
    assert {path.name for path in aside} == {Path(place).name for place in files}
    after = verify(str(folder))
    assert after.chunks == 1000 - len(files)
    assert {fault.place for fault in after.faults} == planted.keys() - files


@pytest.mark.parametrize("kind", FAULTS)
def test_reasons_name_what_is_wrong(fill: Fill, kind: str) -> None:
    folder = fill([make_ref(number) for number in range(3)])
    ref = make_ref(1)
    FAULTS[kind](path_of(folder, ref), ref)
    (fault,) = verify(str(folder)).faults
    expected = {
        "cut": "wrong size",
        "extended": "wrong size",
        "bit in payload": "checksum does not match",
        "header not JSON": "not a chunk file",
        "wrong key": "another key",
        "wrong namespace": "another namespace",
        "wrong token count": "another number of tokens or blocks",
        "other version": "another format version",
        "empty": "wrong size",
        "folder": "not a chunk file: it is a folder",
        "unreadable: fifo": "not a chunk file: it is a fifo",
        "unreadable: loop": "not a chunk file: it is a link",
    }
    assert fault.damage == expected.get(kind, fault.damage)


def test_a_file_that_the_system_will_not_read(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is EIO, as of a broken disk, because root may read everything else."""
    folder = fill([make_ref(number) for number in range(3)])
    bad = path_of(folder, make_ref(2))
    inode = bad.stat().st_ino
    preadv = os.preadv

    def failing(fd: int, *arguments: Any) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(5, "Input/output error")
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    report = verify(str(folder))
    assert [(fault.place, fault.damage) for fault in report.faults] == [
        (str(bad), "cannot be read: Input/output error")
    ]


def test_sound_tails_codecs_and_padding(fill: Fill) -> None:
    """Chunks of every length and codec are sound, and the padding does not matter, as it is never read."""
    layout = replace(EVEN, page_bytes=(4090,) * 4, element="bf16")
    refs = [make_ref(number, 1 + number % 8) for number in range(24)]
    for codec in ("none", "lz4", "split"):
        folder = fill(refs, layout=layout, codec=codec, name=f"cache-{codec}")
        report = verify(str(folder))
        assert (report.chunks, report.faults) == (24, [])
    padded = path_of(tail_folder := fill(refs[:1], layout=layout, name="padded"), refs[0])
    diskwork.flip(padded, padded.stat().st_size - 1)
    assert verify(str(tail_folder)).faults == []


def test_layers_of_different_sizes(fill: Fill) -> None:
    """The recorded layout tells them apart; a flipped bit in any of them is found."""
    layout = replace(EVEN, page_bytes=(4096, 1024, 8192, 512))
    refs = [make_ref(number) for number in range(5)]
    folder = fill(refs, layout=layout)
    assert verify(str(folder)).faults == []
    diskwork.flip(path_of(folder, refs[3]), 4096 + 8 * 5120 + 7)
    assert [fault.damage for fault in verify(str(folder)).faults] == ["checksum does not match"]


def test_names_that_are_no_chunks(fill: Fill) -> None:
    """A file that an engine would sweep is a fault; one that it leaves alone is none."""
    folder = fill([make_ref(1)])
    stray = path_of(folder, make_ref(1)).with_name("README")
    stray.write_text("?")
    (folder / "note.txt").write_text("not in a namespace")
    (fault,) = verify(str(folder)).faults
    assert (fault.place, fault.damage) == (str(stray), "not a chunk's name")


def test_what_was_set_aside_stays(fill: Fill) -> None:
    """A chunk may be damaged, stored anew and damaged again."""
    folder = fill([make_ref(1), make_ref(2)])  # the second is sound, which shows that the geometry is right
    for number in range(3):
        fill([make_ref(1)])
        diskwork.flip(path_of(folder, make_ref(1)), 5000 + number)
        assert verify(str(folder), fix=True).fixed == 1
    assert len(list((folder / QUARANTINE / MINE.id.hex()).iterdir())) == 3


def test_beside_a_running_engine(tmp_path: Path) -> None:
    """Verifying is allowed while chunks are stored and removed; fixing is not."""
    tier = DiskTier(tmp_path, MINE, EVEN, 64 * CHUNK_BYTES)
    refs = [make_ref(number) for number in range(32)]
    assert tier.put([make_transfer(ref) for ref in refs]) == [Outcome.STORED] * 32
    turn = iter(range(10_000))

    def churn(_total: int, _size: int) -> None:
        number = next(turn)
        tier.remove([refs[number % 32]])
        tier.put([make_transfer(make_ref(1000 + number))])

    report = verify(str(tmp_path), tick=churn)
    assert report.faults == []
    with pytest.raises(FolderOwnedError):
        verify(str(tmp_path), fix=True)
    tier.close()


def test_command(fill: Fill, run: Any, run_json: Any, tmp_path: Path) -> None:
    """Exit codes 0, 1 and 2; --remove deletes."""
    folder = fill([make_ref(number) for number in range(4)])
    assert run("verify", folder).exit_code == 0
    diskwork.cut(path_of(folder, make_ref(2)))
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "wrong size" in result.stdout
    code, report = run_json("verify", folder, "--fix", "--remove")
    assert code == 1
    assert (report["chunks"], report["fixed"], len(report["faults"])) == (4, 1, 1)
    assert not (folder / QUARANTINE).exists()
    assert run("verify", folder).exit_code == 0
    assert run("verify", tmp_path / "nowhere").exit_code == 2
    assert run("verify", "ftp://x").exit_code == 2


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_redis(tmp_path: Path, codec: str) -> None:
    """Chunks of two namespaces: changed, cut, missing and mistyped values are found, and --fix removes those."""
    layout = replace(EVEN, element="bf16")
    server = RedisServer(tmp_path / "redis")
    with running(server):
        url = f"redis://127.0.0.1:{server.port}"
        admin = server.admin()
        for namespace in (MINE, OTHER):
            target = {"url": url, **({"codec": codec} if codec != "none" else {})}
            tier = RedisTier.open(TierSetup(namespace, layout, UNBOUNDED_BYTES, target))
            assert tier.put([make_transfer(make_ref(n), layout) for n in range(40)]) == [Outcome.STORED] * 40
            tier.close()
        assert (verify(url).chunks, verify(url).faults) == (80, [])
        commits = sorted(admin.scan_iter("kvs:*}:c", 1000))
        parts = [key[:-1] + b"0" for key in commits]
        value = admin.get(parts[0])
        admin.set(parts[0], value[:20] + bytes([value[20] ^ 1]) + value[21:])
        admin.set(parts[1], admin.get(parts[1])[:-1])
        admin.delete(parts[2])
        admin.set(commits[3], b"no commit")
        admin.delete(commits[4])
        admin.rpush(commits[4], "a list")
        commit = admin.get(commits[5])
        admin.set(commits[5], commit.replace(b'"format_version":"1"', b'"format_version":"3"'))
        admin.set(commits[6], admin.get(commits[7]))
        report = verify(url, fix=True)
        assert len(report.faults) == report.fixed == 7
        assert len({fault.place for fault in report.faults}) == 7
        after = verify(url)
        assert (after.chunks, after.faults) == (73, [])
        assert not any(admin.exists(key) for key in parts[:7])
