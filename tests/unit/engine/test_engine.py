"""The engine as its users see it: stored KV is loaded into other blocks, from memory and from disk."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.checks import check_idle
from support.rig import CHUNK, FILE_BYTES, Rig, tokens_of

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.model.keys import KeyExtras, Namespace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def rig() -> Rig:
    return Rig()


# Store, lookup, retrieve


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 15, 16, 17, 20, 32, 35, 63])
def test_round_trip_in_memory(rig: Rig, num_tokens: int) -> None:
    tokens, whole = tokens_of(1, num_tokens), num_tokens - num_tokens % 4
    with rig.open() as engine:
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == 0
        assert rig.store(engine, tokens) == whole
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == whole
        assert rig.store(engine, tokens) == 0  # known
        check_idle(engine)


@pytest.mark.parametrize("direct", [None, False])
def test_restart_from_disk(rig: Rig, tmp_path: Path, direct: bool | None) -> None:
    tokens = tokens_of(1, 59)
    with rig.open(local_disk=tmp_path, use_odirect=direct) as engine:
        assert rig.store(engine, tokens) == 56
        check_idle(engine)
        assert engine.stats().disk_used_bytes == 4 * FILE_BYTES
    with rig.open(local_disk=tmp_path, use_odirect=direct) as engine:
        assert engine.stats().slots_in_use == 0
        assert engine.lookup(tokens) == 56
        assert rig.retrieve(engine, tokens) == 56
        assert engine.stats().mover.chunks_loaded_from_disk == 4
        assert rig.retrieve(engine, tokens) == 56  # promoted
        assert engine.stats().mover.chunks_loaded_from_disk == 4
        check_idle(engine)


def test_a_pool_smaller_than_the_prompt_is_no_obstacle_to_the_disk(rig: Rig, tmp_path: Path) -> None:
    tokens = tokens_of(1, 100)
    with rig.open(slots=8, local_disk=tmp_path, max_write_queue=8) as engine:
        assert rig.store(engine, tokens) == 100
    with rig.open(slots=3, local_disk=tmp_path) as engine:
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == 48  # a slot for each chunk of a load
        check_idle(engine)


def test_a_pool_smaller_than_a_request_stores_its_front(rig: Rig) -> None:
    tokens = tokens_of(1, 120)
    with rig.open(slots=3) as engine:
        assert rig.store(engine, tokens) == 48
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == 48
        assert rig.store(engine, tokens_of(2, 32)) == 32
        assert rig.retrieve(engine, tokens_of(2, 32)) == 32
        assert rig.retrieve(engine, tokens) == 16  # the end was evicted first
        check_idle(engine)


def test_prefixes_are_shared(rig: Rig) -> None:
    one, other = tokens_of(1, 48), [*tokens_of(1, 48)[:38], *tokens_of(2, 30)]
    with rig.open() as engine:
        rig.store(engine, one)
        assert engine.lookup(other) == rig.retrieve(engine, other) == 36, "to the end of a block"
        assert rig.store(engine, other) == 36
        assert rig.retrieve(engine, other) == 68
        assert rig.retrieve(engine, one) == 48
        check_idle(engine)


def test_extras_keep_requests_apart(rig: Rig) -> None:
    tokens = tokens_of(1, 32)
    with rig.open() as engine:
        rig.store(engine, tokens, extras=KeyExtras(cache_salt="mine"))
        assert engine.lookup(tokens) == engine.lookup(tokens, extras=KeyExtras(cache_salt="yours")) == 0
        assert rig.retrieve(engine, tokens, extras=KeyExtras(lora=("a", "1"))) == 0
        assert rig.retrieve(engine, tokens, extras=KeyExtras(cache_salt="mine")) == 32


def test_another_namespace_sees_nothing(rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvstore")
    tokens = tokens_of(1, 32)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens)
    assert "namespace differs" not in caplog.text
    options = EngineOptions(8 * 4096, local_disk=tmp_path, max_local_disk_bytes=64 * FILE_BYTES)
    with CacheEngine(rig.paged, Namespace({"model": "other", "shard": 1}), options) as engine:
        assert "chunks that cannot be used here: their namespace differs in model, shard" in caplog.text
        assert engine.lookup(tokens) == rig.retrieve(engine, tokens) == 0
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, tokens) == 32


def test_tails_are_optional(rig: Rig) -> None:
    tokens = tokens_of(1, 30)
    with rig.open(save_unfull_chunk=False) as engine:
        assert rig.store(engine, tokens) == 16
        assert rig.retrieve(engine, tokens) == 16


def test_a_tail_gives_way_to_its_chunk(rig: Rig, tmp_path: Path) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        for end in (24, 28, 32):
            rig.store(engine, tokens_of(1, end))
        assert rig.retrieve(engine, tokens_of(1, 32)) == 32
        assert engine.flush()  # the tails stay until their chunk is on disk
        assert engine.stats().index.superseded_tails == 2
        check_idle(engine)
        assert engine.stats().disk_used_bytes == 2 * FILE_BYTES
    assert len(list(tmp_path.glob("*/*/*.safetensors"))) == 2


@pytest.mark.parametrize("skip", [0, 4, 12, 16, 20, 36, 40, 44, 48])
@pytest.mark.parametrize("from_disk", [False, True])
def test_masked_retrieve(rig: Rig, tmp_path: Path, skip: int, from_disk: bool) -> None:
    """Chunks are scattered from their middle; blocks before the mask are unchanged."""
    tokens = tokens_of(1, 48)
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens[:40])
        if not from_disk:
            assert rig.retrieve(engine, tokens, skip) == max(0, 40 - skip)
            check_idle(engine)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, tokens, skip) == max(0, 40 - skip)
        check_idle(engine)


@pytest.mark.parametrize(
    ("skip", "stored"), [(0, 44), (4, 28), (16, 28), (20, 12), (32, 12), (36, 0), (44, 0), (47, 0)]
)
def test_masked_store(rig: Rig, skip: int, stored: int) -> None:
    tokens = tokens_of(1, 47)
    mask = torch.tensor([position >= skip for position in range(47)])
    with rig.open() as engine:
        assert rig.store(engine, tokens, mask=mask) == stored
        assert rig.store(engine, tokens) == 44 - stored
        assert rig.retrieve(engine, tokens) == 44
        check_idle(engine)


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
def test_kinds_of_arguments(rig: Rig, kind: str) -> None:
    convert: Any = {"list": list, "numpy": np.array, "torch": torch.tensor}[kind]
    tokens = tokens_of(1, 20)
    mapping = rig.compute(tokens, rig.blocks(20))
    with rig.open() as engine:
        assert engine.store(convert(tokens), slot_mapping=convert(mapping)) == 20
        assert engine.lookup(convert(tokens)) == 20
        loaded = engine.retrieve(convert(tokens), convert([True] * 20), slot_mapping=convert(mapping))
        assert loaded.tolist() == [True] * 20


# Removal and bounds


@pytest.mark.parametrize("local_cpu", [True, False])
def test_clear_of_a_sequence(rig: Rig, tmp_path: Path, local_cpu: bool) -> None:
    with rig.open(local_disk=tmp_path, local_cpu=local_cpu) as engine:
        rig.store(engine, tokens_of(1, 40))
        rig.store(engine, tokens_of(2, 40))
        assert engine.clear(tokens_of(1, 46)) == 3
        assert engine.clear(tokens_of(1, 46)) == 0
        assert rig.retrieve(engine, tokens_of(1, 40)) == 0
        assert rig.retrieve(engine, tokens_of(2, 40)) == 40
        check_idle(engine)
        assert engine.stats().disk_used_bytes == 3 * FILE_BYTES
        assert rig.store(engine, tokens_of(1, 40)) == 40
        check_idle(engine)
    with rig.open(local_disk=tmp_path) as engine:
        assert [rig.retrieve(engine, tokens_of(seed, 40)) for seed in (1, 2)] == [40, 40]


def test_clear_of_whole_chunks_leaves_those_of_others(rig: Rig) -> None:
    with rig.open() as engine:
        rig.store(engine, tokens_of(1, 16))
        assert engine.clear(tokens_of(2, 16)) == 0
        assert engine.lookup(tokens_of(1, 16)) == 16


@pytest.mark.parametrize("local_cpu", [True, False])
def test_after_changed_weights_nothing_old_is_found(rig: Rig, tmp_path: Path, local_cpu: bool) -> None:
    with rig.open(local_disk=tmp_path, local_cpu=local_cpu) as engine:
        rig.store(engine, tokens_of(1, 40))
        engine.reset_cache()
        assert rig.retrieve(engine, tokens_of(1, 40)) == 0
        check_idle(engine)
        assert engine.stats().disk_used_bytes == 0
        assert rig.store(engine, tokens_of(1, 40)) == 40
        assert engine.flush()
        assert rig.retrieve(engine, tokens_of(1, 40)) == 40
        assert engine.stats().disk_used_bytes == 3 * FILE_BYTES
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, tokens_of(1, 40)) == 0
        assert engine.stats().disk_used_bytes == 0


def test_clear_of_everything(rig: Rig, tmp_path: Path) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, tokens_of(1, 40))
        assert engine.clear() == 3
        assert rig.retrieve(engine, tokens_of(1, 40)) == 0
        check_idle(engine)
        assert engine.stats().disk_used_bytes == 0
        assert rig.store(engine, tokens_of(1, 40)) == 40
        assert rig.retrieve(engine, tokens_of(1, 40)) == 40
        check_idle(engine)
    with rig.open(local_disk=tmp_path) as engine:
        assert rig.retrieve(engine, tokens_of(1, 40)) == 40


def test_without_local_cpu_the_pool_is_a_passage(rig: Rig, tmp_path: Path) -> None:
    tokens = tokens_of(1, 40)
    with rig.open(local_disk=tmp_path, local_cpu=False) as engine:
        assert rig.store(engine, tokens) == 40
        check_idle(engine)
        assert engine.stats().slots_in_use == 0
        for _ in range(2):
            assert rig.retrieve(engine, tokens) == 40
            assert engine.stats().slots_in_use == 0
        assert engine.stats().mover.chunks_loaded_from_disk == 6
        check_idle(engine)


def test_the_disk_stays_within_its_bound(rig: Rig, tmp_path: Path) -> None:
    with rig.open(slots=4, local_disk=tmp_path, max_local_disk_bytes=5 * FILE_BYTES) as engine:
        for seed in range(12):
            assert rig.store(engine, tokens_of(seed, 40)) == 40
            check_idle(engine)
            sizes = [path.stat().st_size for path in tmp_path.glob("*/*/*.safetensors")]
            assert sum(sizes) == engine.stats().disk_used_bytes <= 5 * FILE_BYTES
        assert engine.stats().index.evicted_disk > 0
        assert rig.retrieve(engine, tokens_of(11, 40)) == 40
    with rig.open(local_disk=tmp_path, max_local_disk_bytes=5 * FILE_BYTES) as engine:
        found = [engine.lookup(tokens_of(seed, 40)) for seed in range(12)]
        assert [rig.retrieve(engine, tokens_of(seed, 40)) for seed in range(12)] == found
        check_idle(engine)


# Threads


def test_several_threads(rig: Rig, tmp_path: Path) -> None:
    """Every thread has its own blocks; chunks are shared, evicted, promoted and removed all the time."""
    rig = Rig(num_blocks=64)
    errors: list[BaseException] = []
    loaded_tokens = [0] * 4
    options = {"local_disk": tmp_path, "max_local_disk_bytes": 10 * FILE_BYTES}

    def work(engine: CacheEngine, number: int) -> None:
        try:
            random = np.random.default_rng(number)
            mine = list(range(number * 16, number * 16 + 16))
            for _ in range(60):
                tokens = tokens_of(int(random.integers(4)), int(random.integers(4, 64)))
                block_ids = rig.blocks(len(tokens), int(random.integers(100)), among=mine)
                mapping = rig.slot_mapping(block_ids, len(tokens))
                action = random.integers(10)
                if action < 4:
                    engine.store(tokens, slot_mapping=rig.compute(tokens, block_ids))
                elif action < 8:
                    loaded = int(engine.retrieve(tokens, slot_mapping=mapping).sum())
                    rig.check(tokens, block_ids, 0, loaded)
                    loaded_tokens[number] += loaded
                elif action < 9:
                    assert engine.lookup(tokens) % 4 == 0
                else:
                    engine.clear(tokens[: int(random.integers(len(tokens) + 1))])
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    with rig.open(slots=6, **options) as engine:
        threads = [threading.Thread(target=work, args=(engine, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not errors, errors
        assert all(loaded_tokens)
        check_idle(engine)
        assert engine.stats().mover.mislabelled_slots == 0


# Teeth


def test_the_checks_here_have_teeth(rig: Rig) -> None:
    """Bytes changed in memory, where no checksum covers them, are loaded changed, and the rig notices."""
    tokens = tokens_of(1, 16)
    with rig.open() as engine:
        rig.store(engine, tokens)
        (chunk,) = engine._planner.index._chunks.values()
        slot = engine._tiers.cpu.read(chunk.slot, chunk.ref)
        assert slot is not None
        slot[130] ^= 1
        with pytest.raises(AssertionError, match="is wrong"):
            rig.retrieve(engine, tokens)


def test_a_slot_that_holds_something_else_is_a_miss(rig: Rig) -> None:
    """Index and pool might disagree."""
    tokens = tokens_of(1, 32)
    with rig.open() as engine:
        rig.store(engine, tokens)
        first, second = engine._planner.index._chunks.values()
        engine._tiers.cpu.claim(second.slot)
        engine._tiers.cpu.publish(second.slot, first.ref)
        assert rig.retrieve(engine, tokens) == CHUNK
        assert engine.stats().mover.mislabelled_slots == 1
        assert engine.lookup(tokens) == CHUNK
        check_idle(engine)
