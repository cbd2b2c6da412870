"""Tools on encrypted chunks: they are checked and moved without keys, and imported with them."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.diskwork import EVEN, MINE, get, make_ref, make_transfer
from support.key_files import write_keys

from kvstore.format import chunkfile
from kvstore.format.pack import Pack
from kvstore.format.sealing.keyring import KeyRing
from kvstore.model.chunks import Outcome
from kvstore.model.keys import KeyExtras
from kvstore.model.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.pack import Source, Target, export, import_pack

Run = Callable[..., Any]
REFS = [make_ref(number) for number in range(6)]
ACME = KeyExtras(cache_salt="acme").tenant()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys", "all", acme="acme")


@pytest.fixture
def folder(tmp_path: Path, keys: Path) -> Path:
    """Return a disk folder with encrypted chunks, every other one of a tenant."""
    tier = DiskTier(tmp_path / "kv", MINE, EVEN, 1 << 30, keys=KeyRing(keys))
    for number, ref in enumerate(REFS):
        transfer = make_transfer(ref)._replace(tenant=ACME if number % 2 else b"")
        assert tier.put([transfer]) == [Outcome.STORED]
    tier.close()
    return tmp_path / "kv"


def sealed_by(folder: Path) -> Counter[str]:
    files = folder.rglob("*-*.safetensors")
    return Counter(chunkfile.seal_of(file.read_bytes()[:4096]).partition(" ")[0] for file in files)


def held(folder: Path, keys: Path | None) -> int:
    """Count the chunks that an engine with these keys finds, all with the right bytes."""
    tier = DiskTier(folder, MINE, EVEN, 1 << 30, keys=None if keys is None else KeyRing(keys))
    outcomes = [get(tier, ref) for ref in REFS]
    tier.close()
    assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}
    return outcomes.count(Outcome.HIT)


def test_a_pack_keeps_the_tenants_of_its_chunks(folder: Path, keys: Path, tmp_path: Path) -> None:
    """It is exported without a key, as it stays encrypted. A newer key of the tenant seals what is imported."""
    assert export(Source(folder), tmp_path / "a.kvpack").is_complete
    later = write_keys(tmp_path / "later", "all", acme="acme", acme_2="acme")
    report = import_pack(tmp_path / "a.kvpack", Target((tmp_path / "target",), encryption_keys=str(later)))
    assert (report.chunks, report.is_complete) == (6, True)
    assert sealed_by(tmp_path / "target") == {"all": 3, "acme_2": 3}
    assert held(tmp_path / "target", later) == 6


def test_a_pack_that_cannot_be_read_ends_the_import(
    folder: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report says so, whichever read of a chunk fails."""
    assert export(Source(folder), tmp_path / "a.kvpack").is_complete
    left = iter(range(5))
    real = Pack.read_into

    def read_into(pack: Pack, *arguments: Any) -> bool:
        if next(left, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        return real(pack, *arguments)

    monkeypatch.setattr(Pack, "read_into", read_into)
    report = import_pack(tmp_path / "a.kvpack", Target((tmp_path / "target",), encryption_keys=str(keys)))
    assert not report.is_complete


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_pack_needs_its_keys(folder: Path, tmp_path: Path, *, has_keys: bool) -> None:
    assert export(Source(folder), tmp_path / "a.kvpack").is_complete
    other = str(write_keys(tmp_path / "other", "all", secrets={"all": "another"})) if has_keys else None
    report = import_pack(tmp_path / "a.kvpack", Target((tmp_path / "target",), encryption_keys=other))
    assert (report.chunks, len(report.faults)) == (0, 6)
    assert "encrypted with a key that is missing" in report.faults[0].damage


def test_an_engine_reads_an_encrypted_pack(folder: Path, keys: Path, tmp_path: Path) -> None:
    assert export(Source(folder), tmp_path / "a.kvpack").is_complete
    for options, expected in (({"encryption_keys": str(keys)}, Outcome.HIT), ({}, Outcome.MISS)):
        setup = TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": f"pack://{tmp_path}/a.kvpack", **options})
        tier = open_tier("pack", setup)
        assert {get(tier, ref) for ref in REFS} == {expected}
        assert tier.counters.corrupt == 0
        tier.close()


def test_an_import_encrypts_a_pack_that_is_not(keys: Path, tmp_path: Path, run_json: Run) -> None:
    tier = DiskTier(tmp_path / "plain", MINE, EVEN, 1 << 30)
    assert tier.put([make_transfer(ref) for ref in REFS]) == [Outcome.STORED] * 6
    tier.close()
    assert export(Source(tmp_path / "plain"), tmp_path / "a.kvpack").is_complete
    for where in (["--folder", tmp_path / "target"], ["--url", f"file://{tmp_path}/shared"]):
        code, said = run_json("pack", "import", tmp_path / "a.kvpack", *where, "--encryption-keys", keys)
        assert (code, said["chunks"]) == (0, 6)
    assert sealed_by(tmp_path / "target") == sealed_by(tmp_path / "shared") == {"all": 6}
    assert held(tmp_path / "target", keys) == 6


def test_chunks_are_shown_and_checked_without_a_key(folder: Path, run_json: Run) -> None:
    code, said = run_json("verify", folder)
    assert (code, said["chunks"], said["faults"]) == (0, 6, [])
    file = next(folder.rglob("*-*.safetensors"))
    code, said = run_json("inspect", file)
    assert (code, said["codec"], said["sound"]) == (0, "aes-gcm", True)
    assert said["key_id"] in {"all", "acme"}
    raw = bytearray(file.read_bytes())
    raw[5000] ^= 1
    file.write_bytes(raw)
    code, said = run_json("verify", folder)
    assert (code, len(said["faults"])) == (1, 1)
    assert "checksum" in json.dumps(said["faults"])


def test_a_chunk_of_many_layers_is_checked_whole(keys: Path, tmp_path: Path, run_json: Run) -> None:
    """Its tags take more than a page."""
    layout = KVLayout((64,) * 600, 1, 16, 16)
    tier = DiskTier(tmp_path / "many", MINE, layout, 1 << 30, keys=KeyRing(keys))
    assert tier.put([make_transfer(make_ref(1, 1), layout)]) == [Outcome.STORED]
    tier.close()
    assert run_json("verify", tmp_path / "many")[1]["faults"] == []
    assert export(Source(tmp_path / "many"), tmp_path / "a.kvpack").is_complete
    report = import_pack(tmp_path / "a.kvpack", Target((tmp_path / "target",), encryption_keys=str(keys)))
    assert report.is_complete


def test_the_doctor_reads_the_key_file(keys: Path, tmp_path: Path, run_json: Run) -> None:
    config = tmp_path / "kv.yaml"
    for path, state in ((keys, "ok"), (tmp_path / "missing", "error")):
        config.write_text(f"local_disk: {tmp_path}/kv\nmax_local_disk_size: 1\nencryption_keys: {path}\n")
        _, said = run_json("doctor", "--config", config)
        assert [found["state"] for found in said["findings"] if found["topic"] == "encryption_keys"] == [state]
