"""``CacheEngine.open``: the short way to an engine, which finds what the long way stored, and says what it refuses."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
from support.rig import BLOCK, CHUNK, FILE_BYTES, NAMESPACE, SLOT_BYTES, Rig, tokens_of

from kvstore import CacheEngine, ConfigError, LayoutError, Namespace, RemoteOptions
from kvstore.config import StoreConfig
from kvstore.options import EngineOptions

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = tokens_of(1, 40)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def open_over(rig: Rig, **options: object) -> CacheEngine:
    given = {
        "model": "rig",
        "num_blocks": rig.num_blocks,
        "block_tokens": BLOCK,
        "chunk_tokens": CHUNK,
        "cpu_bytes": 8 * SLOT_BYTES,
    }
    return CacheEngine.open(rig.caches, **{**given, **options})  # type: ignore[arg-type]


def test_what_is_stored_comes_back(rig: Rig) -> None:
    with open_over(rig) as engine:
        assert engine.layout == rig.layout
        assert engine.stats().slots == 8
        assert rig.store(engine, TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 40


@pytest.mark.parametrize("num_folders", [1, 2])
def test_both_ways_lead_to_the_same_chunks(rig: Rig, tmp_path: Path, num_folders: int) -> None:
    folders = tuple(tmp_path / str(number) for number in range(num_folders))
    disk = folders[0] if num_folders == 1 else list(folders)
    with open_over(rig, disk=disk, disk_bytes=32 * FILE_BYTES) as engine:
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush()
    options = EngineOptions(8 * SLOT_BYTES, local_disk=folders, max_local_disk_bytes=32 * FILE_BYTES)
    with CacheEngine(rig.paged, NAMESPACE, options) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
    with open_over(rig, disk=disk, disk_bytes=32 * FILE_BYTES, model=NAMESPACE.fields) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
    with open_over(rig, disk=disk, disk_bytes=32 * FILE_BYTES, model={"model": "rig", "revision": 2}) as engine:
        assert engine.lookup(TOKENS) == 0
        assert engine._namespace == Namespace({"model": "rig", "revision": 2})


def test_defaults_are_those_of_the_configuration() -> None:
    defaults = {name: given.default for name, given in inspect.signature(CacheEngine.open).parameters.items()}
    config = StoreConfig()
    assert (defaults["cpu_bytes"], defaults["chunk_tokens"]) == (config.max_local_cpu_bytes, config.chunk_size)
    assert (defaults["disk"], defaults["disk_bytes"], defaults["remote"]) == ((), 0, None)


def test_what_cannot_be_opened_is_refused(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not hold one chunk"):
        open_over(rig, cpu_bytes=0)
    with pytest.raises(ConfigError, match="single chunk"):
        open_over(rig, disk=str(tmp_path))
    with pytest.raises(LayoutError, match="cannot find 7 blocks"):
        open_over(rig, num_blocks=7)
    with pytest.raises(ConfigError, match="nowhere"):
        open_over(rig, remote=RemoteOptions("nowhere://here"))
    with open_over(rig, disk=str(tmp_path), disk_bytes=32 * FILE_BYTES) as engine:
        assert rig.store(engine, TOKENS) == 40
