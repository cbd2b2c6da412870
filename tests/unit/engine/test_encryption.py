"""Engines with keys: every chunk on disk is sealed with the key of its salt, and other keys only cost hits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.checks import check_idle
from support.key_files import write_keys
from support.rig import CHUNK, Rig, tokens_of

from kvstore.engine.options import RemoteOptions
from kvstore.format import chunkfile
from kvstore.model.keys import KeyExtras

SALTS = {"acme": KeyExtras(cache_salt="acme"), "bolt": KeyExtras(cache_salt="bolt"), None: KeyExtras()}


def sealed_by(folder: Path) -> Counter[str]:
    """Count the chunks in a folder by the ids of their keys; empty for chunks that are not encrypted."""
    files = folder.rglob("*-*.safetensors")
    return Counter(chunkfile.seal_of(file.read_bytes()[:4096]).partition(" ")[0] for file in files)


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_each_chunk_is_sealed_with_the_key_of_its_salt(tmp_path: Path, kind: str) -> None:
    rig, tokens = Rig(), tokens_of(1, 40)
    keys = write_keys(tmp_path / "keys", "all", acme="acme")
    swapped = write_keys(tmp_path / "swapped", "all", secrets={"all": "acme", "acme": "all"}, acme="acme")
    folder = tmp_path / "kv"

    def options(path: Path) -> dict[str, Any]:
        if kind == "disk":
            return {"local_disk": folder, "encryption_keys": path}
        settings = {"encryption_keys": str(path)}
        return {"remote": RemoteOptions(f"file://{folder}", settings, max_queue=64)}

    with rig.open(slots=32, **options(keys)) as engine:
        for extras in SALTS.values():
            assert rig.store(engine, tokens, extras=extras) == 40
            assert rig.store(engine, tokens_of(2, 16), extras=extras) == 16
        check_idle(engine)
    assert sealed_by(folder) == {"acme": 4, "all": 8}
    with rig.open(**options(keys)) as engine:
        assert [rig.retrieve(engine, tokens, extras=extras) for extras in SALTS.values()] == [40] * 3
        check_idle(engine)
    with rig.open(**options(swapped)) as engine:
        assert [rig.retrieve(engine, tokens, extras=extras) for extras in SALTS.values()] == [0] * 3
        assert engine.stats().mover.chunks_loaded == 0
        check_idle(engine)


def test_a_write_that_is_made_later_has_the_tenant_of_its_request(tmp_path: Path) -> None:
    """A chunk that found the queue full is written when it is offered again."""
    rig, tokens = Rig(), tokens_of(1, 3 * CHUNK)
    keys = write_keys(tmp_path / "keys", "all", acme="acme")
    folder = tmp_path / "kv"
    with rig.open(local_disk=folder, encryption_keys=keys, max_write_queue=1) as engine:
        for number in range(1, 4):
            rig.store(engine, tokens, extras=SALTS["acme"])
            check_idle(engine)
            assert sealed_by(folder) == {"acme": number}
        assert engine.stats().index.writes_retried == 2


def test_a_restart_without_keys_serves_nothing_that_was_encrypted(tmp_path: Path) -> None:
    rig, tokens = Rig(), tokens_of(1, 40)
    keys = write_keys(tmp_path / "keys", "all")
    with rig.open(local_disk=tmp_path / "kv", encryption_keys=keys) as engine:
        rig.store(engine, tokens)
        check_idle(engine)
    with rig.open(local_disk=tmp_path / "kv") as engine:
        assert rig.retrieve(engine, tokens) == 0
        rig.store(engine, tokens)
        check_idle(engine)
    with rig.open(local_disk=tmp_path / "kv", encryption_keys=keys) as engine:
        assert rig.retrieve(engine, tokens) == 0
        check_idle(engine)
