"""Chunks stored by engines of one tensor-parallel size and read by engines of another, from any tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import serving_ipc
from support.divided import BLOCK, CHUNK, HEADS, Worker, folder_of, slots_of, store_all, store_part
from support.redis_server import RedisServer, running

from kvstore.engine.options import RemoteOptions
from kvstore.engine.other_engines import OtherEngines
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.tiers.guards import GuardOptions

TOKENS = list(range(CHUNK + 2 * BLOCK))  # a chunk, and a tail of two blocks
BLOCKS = [7, 0, 11, 3, 8, 5]
PLACES = ("disk", "server", "redis")


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yield a place that engines share, as ``Worker.open`` takes it."""
    with ExitStack() as opened:
        if request.param == "disk":
            yield {"folder": tmp_path / "disk"}
        elif request.param == "server":
            yield {"url": opened.enter_context(serving_ipc()).url}
        else:
            server = RedisServer(tmp_path / "redis")
            opened.enter_context(running(server))
            yield {"url": f"redis://127.0.0.1:{server.port}"}


@pytest.mark.parametrize(
    ("stored_by", "read_by"),
    [(2, 1), (1, 2), (2, 8), *(pytest.param(*two, marks=pytest.mark.slow) for two in ((4, 2), (2, 4), (8, 2), (8, 1)))],
)
def test_another_size_reads_its_heads(where: dict[str, Any], stored_by: int, read_by: int) -> None:
    store_all(TOKENS, BLOCKS, stored_by, **where)
    for shard in range(read_by):
        worker = Worker(shard, read_by)
        with worker.open(stored_by, **where) as engine:
            assert engine.lookup(TOKENS) == len(TOKENS)
            loaded = engine.retrieve(TOKENS, slot_mapping=slots_of(BLOCKS))
            assert bool(loaded.all())
            worker.check(1, BLOCKS)


def test_nothing_is_asked_of_sizes_that_are_not_named(where: dict[str, Any]) -> None:
    store_all(TOKENS, BLOCKS, 2, **where)
    for sizes in ((), (4,)):
        with Worker(0, 1).open(*sizes, **where) as engine:
            assert engine.lookup(TOKENS) == 0


def test_a_chunk_without_all_its_heads_is_a_miss(where: dict[str, Any]) -> None:
    """One of two workers has stored it, and later has another chunk than the other one."""
    part = Worker(0, 2)
    part.fill(1)
    with part.open(**where) as engine:
        engine.store(TOKENS, slot_mapping=slots_of(BLOCKS))
        assert engine.flush()
    reader = Worker(0, 1)
    with reader.open(2, **where) as engine:
        assert engine.lookup(TOKENS) == 0
        assert not engine.retrieve(TOKENS, slot_mapping=slots_of(BLOCKS)).any()
        reader.check(1, [])


def test_of_a_prompt_that_parts_later_the_blocks_in_common_are_read(where: dict[str, Any]) -> None:
    store_all(TOKENS, BLOCKS, 2, **where)
    other = [*TOKENS[: CHUNK + BLOCK], *range(900, 900 + BLOCK)]
    reader = Worker(0, 1)
    with reader.open(2, **where) as engine:
        assert engine.lookup(other) == CHUNK + BLOCK
        engine.retrieve(other, slot_mapping=slots_of(BLOCKS))
        reader.check(1, BLOCKS[:5])


def test_what_was_read_is_kept(where: dict[str, Any]) -> None:
    store_all(TOKENS, BLOCKS, 2, **where)
    reader = Worker(0, 1)
    with reader.open(2, **where) as engine:
        engine.retrieve(TOKENS, slot_mapping=slots_of(BLOCKS))
        reader.clear()
        engine.retrieve(TOKENS, slot_mapping=slots_of(BLOCKS))
        reader.check(1, BLOCKS)
        assert engine.stats().mover.chunks_loaded_from_remote == 2


def test_after_new_weights_nothing_of_the_old_is_read(where: dict[str, Any]) -> None:
    store_all(TOKENS, BLOCKS, 2, **where)
    reader = Worker(0, 1)
    with reader.open(2, **where) as engine:
        assert engine.lookup(TOKENS) == len(TOKENS)
        engine.reset_cache()
        assert engine.lookup(TOKENS) == 0
        assert not engine.retrieve(TOKENS, slot_mapping=slots_of(BLOCKS)).any()


def test_a_damaged_half_is_no_hit(tmp_path: Path) -> None:
    store_all(TOKENS, BLOCKS, 2, folder=tmp_path)
    for path in folder_of(tmp_path, 1, 2).rglob("*.safetensors"):
        damaged = bytearray(path.read_bytes())
        damaged[5000] ^= 1
        path.write_bytes(damaged)
    reader = Worker(0, 1)
    with reader.open(2, folder=tmp_path) as engine:
        assert engine.lookup(TOKENS) == len(TOKENS)
        assert not engine.retrieve(TOKENS, slot_mapping=slots_of(BLOCKS)).any()
    assert list(folder_of(tmp_path, 1, 2).rglob("*.safetensors")), "what others have is left as it is"


def test_another_models_chunks_are_never_asked_for(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    store_all(TOKENS, BLOCKS, 2, **where)
    reader = Worker(0, 1)
    reader.namespace = type(reader.namespace)({**reader.namespace.fields, "model": "another"})
    with reader.open(2, **where) as engine:
        assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize(("sent_by", "read_by"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_engines_own_servers_take_what_others_hand_over(sent_by: int, read_by: int) -> None:
    """Parts that several of our workers need are sent to the first of them, and the others read them there."""
    with ExitStack() as opened:
        readers = [Worker(shard, read_by) for shard in range(read_by)]
        servers = []
        for reader in readers:
            parts = tuple(part for part in reader.division(sent_by).parts if part.sends_to == reader.shard)
            options = EmbeddedOptions(4 << 20, "127.0.0.1", 0, hold_s=60.0, parts=parts)
            servers.append(EmbeddedServer(reader.namespace, reader.paged.layout, options))
            opened.callback(servers[-1].close)
        addresses = [f"kvs://127.0.0.1:{server.port}" for server in servers]
        for shard in range(sent_by):
            store_part(TOKENS, BLOCKS, shard, sent_by, url=addresses[shard * read_by // sent_by])
        for reader, server in zip(readers, servers, strict=True):
            with reader.open(sent_by, url=server.url, servers=addresses) as engine:
                assert engine.lookup(TOKENS) == len(TOKENS)
                engine.retrieve(TOKENS, slot_mapping=slots_of(BLOCKS))
                reader.check(1, BLOCKS)


def test_where_other_sizes_are_looked_for() -> None:
    worker = Worker(0, 2)
    options = RemoteOptions("redis://nowhere", divisions=(worker.division(4),))
    shared = replace(options, peers=("kvs://peer:1",))
    pack = replace(options, url="pack:///nowhere")
    own = replace(options, is_own=True)
    found = [OtherEngines(given, worker.paged.layout, GuardOptions()).places for given in (options, shared, pack, own)]
    assert found == [("shared tp4",), ("kvs://peer:1", "shared tp4", "kvs://peer:1 tp4"), (), ("sent tp4",)]


def test_heads_are_those_of_the_model() -> None:
    """Otherwise the tests above would show nothing."""
    assert HEADS > len(Worker(1, 2).heads) > 1
