"""``CacheEngine.open``: the short way to an engine, which finds chunks of the long way, and explains refusals."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
from support.rig import BLOCK, CHUNK, FILE_BYTES, NAMESPACE, SLOT_BYTES, Rig, tokens_of

from kvstore import CacheEngine, ConfigError, LayoutError, Namespace, RemoteOptions, bind_paged_kv
from kvstore.config import StoreConfig
from kvstore.engine.options import EngineOptions

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
        namespace = engine._namespace
        assert namespace.fields == {"model": "rig", "chunk_tokens": CHUNK, "layout": rig.layout.fingerprint}
        assert rig.store(engine, TOKENS) == 40
        assert engine.flush()
    options = EngineOptions(8 * SLOT_BYTES, local_disk=folders, max_local_disk_bytes=32 * FILE_BYTES)
    with CacheEngine(rig.paged, namespace, options) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
    with open_over(rig, disk=disk, disk_bytes=32 * FILE_BYTES, model={"model": "rig"}) as engine:
        assert rig.retrieve(engine, TOKENS) == 40
    with open_over(rig, disk=disk, disk_bytes=32 * FILE_BYTES, model={"model": "rig", "revision": 2}) as engine:
        assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize("namespace", [None, NAMESPACE], ids=["open", "a namespace of one's own"])
def test_chunks_of_another_size_are_not_found(rig: Rig, tmp_path: Path, namespace: Namespace | None) -> None:
    """The key of a prefix does not tell the length of its last chunk."""

    def opened(chunk_tokens: int) -> CacheEngine:
        if namespace is None:
            return open_over(rig, chunk_tokens=chunk_tokens, disk=tmp_path, disk_bytes=1 << 20)
        paged = bind_paged_kv(rig.caches, num_blocks=rig.num_blocks, block_tokens=BLOCK, chunk_tokens=chunk_tokens)
        return CacheEngine(paged, namespace, EngineOptions(1 << 20, local_disk=tmp_path, max_local_disk_bytes=1 << 20))

    tokens = tokens_of(1, 4 * CHUNK)
    with opened(CHUNK) as engine:
        assert rig.store(engine, tokens) == 4 * CHUNK
        assert engine.flush()
    with opened(2 * CHUNK) as engine:
        assert rig.retrieve(engine, tokens) == engine.lookup(tokens)


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
    with open_over(rig, disk="", disk_bytes=32 * FILE_BYTES) as engine:
        assert engine.stats().disk is None
