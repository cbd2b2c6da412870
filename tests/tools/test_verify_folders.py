"""Kinds of folders, which tools tell by their contents; ``verify --fix`` touches only damaged chunks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import diskwork
from support.cache_server import serving_ipc
from support.diskwork import CHUNK_BYTES, EVEN, MINE, OTHER, make_ref, make_transfer, path_of
from support.redis_server import RedisServer, running, wait_for

from kvstore.format.chunkfile import Damage
from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, FolderOwnedError
from kvstore.model.keys import Namespace
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.spaces import Space
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk.inventory import Inventory, inventories
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tools.pack import Source, Target, export, import_pack
from kvstore.tools.verify import NOT_A_NAME, QUARANTINE, verify

Fill = Callable[..., Path]
REFS = [make_ref(number) for number in range(15)]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, without files that are only locks and spare files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Return the disk folder of a server that has ended: 15 chunks of one namespace, and 2 of another."""
    folder = tmp_path / "server"
    with serving_ipc(disk=DiskOptions(folder, 64 * CHUNK_BYTES)) as server:
        for namespace, refs in ((MINE, REFS), (OTHER, REFS[:2])):
            tier = open_tier("server", TierSetup(namespace, EVEN, UNBOUNDED_BYTES, {"url": server.url}))
            assert tier.put([make_transfer(ref) for ref in refs]) == [Outcome.STORED] * len(refs)
            tier.close()
    assert len(list(folder.rglob("*.safetensors"))) == 17
    return folder


def chunk_in(server_folder: Path, number: int, namespace: Namespace = MINE) -> Path:
    return path_of(server_folder / Space(namespace, EVEN).id.hex(), make_ref(number), namespace)


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("below", [False, True], ids=["the whole", "one namespace"])
def test_a_servers_folder_is_sound_and_stays(served: Path, remove: bool, below: bool) -> None:
    before = files_of(served)
    target = served / Space(MINE, EVEN).id.hex() if below else served
    report = verify(str(target), fix=True, remove=remove)
    assert (report.chunks, report.faults) == (15 if below else 17, [])
    assert files_of(served) == before


@pytest.mark.parametrize("remove", [False, True])
def test_a_damaged_chunk_of_a_server(served: Path, remove: bool) -> None:
    """That chunk is removed and its path reported; a server that starts again has all others."""
    bad = chunk_in(served, 4)
    diskwork.flip_payload(bad)
    before = files_of(served)
    report = verify(str(served), fix=True, remove=remove)
    assert [(fault.place, fault.damage, fault.fixed) for fault in report.faults] == [(str(bad), Damage.CHECKSUM, True)]
    after = files_of(served)
    gone = {name: content for name, content in before.items() if name not in after}
    assert list(gone) == [str(bad.relative_to(served))]
    aside = {name: content for name, content in after.items() if name not in before}
    assert list(aside.values()) == ([] if remove else list(gone.values()))
    with serving_ipc(disk=DiskOptions(served, 64 * CHUNK_BYTES)) as server:
        assert server.hub.stock.num_on_disk == 16


def test_a_servers_folder_is_counted(served: Path, run_json: Any) -> None:
    code, tree = run_json("inspect", served)
    assert (code, tree["kind"]) == (0, "server folder")
    assert {inventory["namespace"]: inventory["chunks"] for inventory in tree["namespaces"]} == {
        MINE.id.hex(): 15,
        OTHER.id.hex(): 2,
    }
    assert {inventory["tokens"] for inventory in tree["namespaces"]} == {15 * 256, 2 * 256}
    code, tree = run_json("inspect", make_ref(3).prefix_key.hex(), "--folder", served)
    assert (code, tree["sound"]) == (0, True)


def test_a_server_that_runs_keeps_its_folder(tmp_path: Path) -> None:
    """This holds even if only the folder of one namespace is named, whose own lock may be free."""
    folder = tmp_path / "server"
    with serving_ipc(disk=DiskOptions(folder, 64 * CHUNK_BYTES)) as server:
        tier = open_tier("server", TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": server.url}))
        assert tier.put([make_transfer(ref) for ref in REFS]) == [Outcome.STORED] * 15
        tier.close()
        wait_for("chunks have a place on disk", lambda: server.hub.stock.num_on_disk == 15)  # after the store
        wait_for("they are there", lambda: server.hub.service.writes.num_unwritten == 0)
        assert verify(str(folder)).faults == []
        with pytest.raises(FolderOwnedError):
            verify(str(folder), fix=True)
        home = folder / Space(MINE, EVEN).id.hex()
        (home / _folder.LOCK_FILE).unlink()
        with pytest.raises(FolderOwnedError):
            verify(str(home), fix=True)


def test_a_copy_without_the_hidden_files(served: Path) -> None:
    """A copy as of ``cp -r server/*/* copy/`` is known by the namespace's name."""
    for name in (_folder.LOCK_FILE, _folder.GEOMETRY_FILE):
        (served / Space(MINE, EVEN).id.hex() / name).unlink()
    assert verify(str(served), fix=True, remove=True).faults == []
    assert len(list(served.rglob("*.safetensors"))) == 17


def test_a_servers_folder_is_no_engines(served: Path, fill: Fill, tmp_path: Path) -> None:
    """No pack is made from it or imported into it, and a server does not accept an engine's folder."""
    before = files_of(served)
    with pytest.raises(ConfigError, match="belongs to a cache server"):
        Source(served)
    cache = fill(REFS[:3])
    export(Source(cache), tmp_path / "a.kvpack")
    with pytest.raises(ConfigError, match="belongs to a cache server"):
        import_pack(tmp_path / "a.kvpack", Target((served,)), anyway=True)
    assert files_of(served) == before
    before = files_of(cache)
    with pytest.raises(ConfigError, match="holds chunks of an engine"), serving_ipc(disk=DiskOptions(cache, 1 << 30)):
        pass
    assert files_of(cache) == before


@pytest.mark.parametrize("remove", [False, True])
def test_only_damaged_chunks_are_touched(fill: Fill, remove: bool) -> None:
    """Folders, links, fifos, foreign files, and names that only look like a namespace stay."""
    folder = fill(REFS)
    shard = path_of(folder, REFS[0]).parent
    inside = path_of(folder, REFS[1])
    inside.unlink()
    inside.mkdir()
    (inside / "thesis.txt").write_text("good")
    link = path_of(folder, REFS[2])
    link.rename(folder / "elsewhere")
    link.symlink_to(folder / "elsewhere")
    fifo = path_of(folder, REFS[3])
    fifo.unlink()
    os.mkfifo(fifo)
    (shard / "README").write_text("?")
    (folder / MINE.id.hex() / "backup").mkdir()
    (folder / MINE.id.hex() / "backup" / "a").write_text("good")
    (folder / ("ab" * 8)).mkdir()
    (folder / ("ab" * 8) / "photo.jpg").write_text("good")
    cut = path_of(folder, REFS[4])
    diskwork.cut(cut)
    names = {str(path) for path in folder.rglob("*")}
    report = verify(str(folder), fix=True, remove=remove)
    assert {fault.place for fault in report.faults if fault.fixed} == {str(cut)}
    assert report.fixed == 1
    left = {fault.place: fault.damage for fault in report.faults if not fault.fixed}
    assert left.pop(str(shard / "README")) == NOT_A_NAME
    assert left.keys() >= {str(inside), str(link), str(fifo), str(folder / MINE.id.hex() / "backup")}
    assert names - {str(path) for path in folder.rglob("*")} == {str(cut)}
    assert (folder / QUARANTINE).exists() is not remove


def test_a_chunk_that_is_damaged_once_only(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that a disk shows only at times is no reason to remove anything: the last of three reads is sound."""
    folder = fill(REFS[:3])
    reads = []
    real = Inventory._read

    def seldom(self: Inventory, ref: Any, path: Path) -> Any:
        if ref == REFS[1]:
            reads.append(ref)
            if len(reads) <= 2:
                return Damage.CHECKSUM
        return real(self, ref, path)

    monkeypatch.setattr(Inventory, "_read", seldom)
    report = verify(str(folder), fix=True, remove=True)
    assert [(fault.damage, fault.fixed) for fault in report.faults] == [(Damage.CHECKSUM, False)]
    assert len(reads) > 2
    assert path_of(folder, REFS[1]).exists()


def test_what_the_system_will_not_read_stays(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(REFS[:3])
    bad = path_of(folder, REFS[2])
    inode = bad.stat().st_ino
    preadv = os.preadv

    def failing(fd: int, *arguments: Any) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(5, "Input/output error")
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    report = verify(str(folder), fix=True, remove=True)
    assert [(fault.place, fault.fixed) for fault in report.faults] == [(str(bad), False)]
    assert bad.exists()


@pytest.mark.parametrize("noted", [True, False], ids=["a wrong note", "no note, uneven layers"])
def test_a_geometry_that_makes_good_chunks_look_damaged(fill: Fill, run: Any, noted: bool) -> None:
    """Nothing is removed if no sound chunk confirms the geometry of the check."""
    layout = replace(EVEN, page_bytes=(4096, 1024, 8192, 512))
    folder = fill(REFS[:5], layout=layout)
    note = folder / MINE.id.hex() / _folder.LAYOUT_FILE
    if noted:
        note.write_text(replace(EVEN, page_bytes=(1024, 4096, 8192, 512)).to_json() + "\n")
    else:
        note.unlink()
    before = files_of(folder)
    result = run("verify", folder, "--fix", "--remove")
    assert result.exit_code == 1
    assert "5 damaged, 0 removed" in result.stdout
    assert "nothing changed: no chunk is sound, so the note on their geometry may be what is wrong" in result.stdout
    assert files_of(folder) == before


def test_a_redis_with_uneven_layers(tmp_path: Path) -> None:
    """Nothing there tells the sizes of layers, so nothing there is called damaged and removed."""
    layout = replace(EVEN, page_bytes=(4096, 1024, 8192, 512))
    server = RedisServer(tmp_path / "redis")
    with running(server):
        url = f"redis://127.0.0.1:{server.port}"
        tier = RedisTier.open(TierSetup(MINE, layout, UNBOUNDED_BYTES, {"url": url}))
        assert tier.put([make_transfer(ref, layout) for ref in REFS]) == [Outcome.STORED] * 15
        report = verify(url, fix=True)
        assert (report.fixed, report.left) == (0, [MINE.id.hex()])
        assert tier.contains(REFS) == [True] * 15
        tier.close()


def test_folders_of_workers(tmp_path: Path) -> None:
    """Folders of an engine with several workers may be next to those of a server."""
    for name in ("rank-0-of-2", "rank-1-of-2"):
        tier = DiskTier(tmp_path / "replica-0" / name, MINE, EVEN, 8 * CHUNK_BYTES)
        assert tier.put([make_transfer(ref) for ref in REFS[:2]]) == [Outcome.STORED] * 2
        tier.close()
    assert [inventory.is_servers for inventory in inventories(tmp_path)] == [False, False]
    assert verify(str(tmp_path), fix=True).chunks == 4


def test_the_command_lists_what_it_removes(fill: Fill, run: Any, run_json: Any) -> None:
    """It lists all of it, even if the damage that stays is too much to show."""
    refs = [make_ref(number) for number in range(120)]
    folder = fill(refs)
    removed = [path_of(folder, ref) for ref in refs[:55]]
    for path in removed:
        diskwork.cut(path)
    strays = [path_of(folder, ref).with_name("stray") for ref in refs[60:115]]
    for path in strays:
        path.write_text("?")
    result = run("verify", folder, "--fix", "--remove")
    assert all(f"{path}: wrong size\n" in result.stdout for path in removed)
    assert f"{strays[0]}: {NOT_A_NAME}, left as it is\n" in result.stdout
    assert "... and 5 more" in result.stdout
    assert "110 damaged, 55 removed" in result.stdout
    code, report = run_json("verify", folder, "--fix", "--remove")
    assert (code, report["fixed"], {fault["fixed"] for fault in report["faults"]}) == (1, 0, {False})
