"""Chunks kept on the device: faster the third time, never wrong, and not required. The device is the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.checks import check_idle
from support.diskwork import flip_header
from support.rig import SLOT_BYTES, Rig, tokens_of

from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.model.keys import NO_EXTRAS
from kvstore.paged.binding import bind_groups, bind_paged_kv
from kvstore.transfer.hot import HotChunks
from kvstore.transfer.layerwise import LayerLoad
from kvstore.transfer.mover import LoadJob, Mover, StoreJob, as_block_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.engine.engine import CacheEngine

TOKENS = tokens_of(1, 40)  # two chunks and a tail


@pytest.fixture
def rig() -> Rig:
    return Rig()


def from_gpu(engine: CacheEngine) -> int:
    """Return the chunks loaded from the device so far, and check that no slot of it is lost."""
    hot = engine._tiers.hot
    assert hot is not None
    slots = [*hot._free, *(held.slot for held in hot._copies.values())]
    assert sorted(slots) == list(range(len(slots)))
    return engine.stats().mover.chunks_loaded_from_gpu


def test_the_third_load_comes_from_the_device(rig: Rig) -> None:
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for expected in (0, 0, 3, 6):
            assert rig.retrieve(engine, TOKENS) == 40
            assert from_gpu(engine) == expected
        assert rig.retrieve(engine, TOKENS, skip=24) == 16, "from the middle of a chunk"
        assert from_gpu(engine) == 8
        check_idle(engine)


def test_a_part_of_a_chunk_is_not_kept_as_the_whole(rig: Rig) -> None:
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for _ in range(4):
            assert rig.retrieve(engine, TOKENS, skip=24) == 16
        assert from_gpu(engine) == 2, "the tail, which was loaded whole"
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 3
        check_idle(engine)


def test_what_was_used_last_stays(rig: Rig) -> None:
    with rig.open(max_local_gpu_bytes=3 * SLOT_BYTES) as engine:
        for seed in (1, 2):
            rig.store(engine, tokens_of(seed, 40))
            for _ in range(3):
                assert rig.retrieve(engine, tokens_of(seed, 40)) == 40
        assert from_gpu(engine) == 6
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 6, "displaced by the second sequence"
        check_idle(engine)


@pytest.mark.parametrize("forget", ["clear", "reset_cache"])
def test_what_is_forgotten_is_forgotten_there_too(rig: Rig, forget: str) -> None:
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for _ in range(3):
            rig.retrieve(engine, TOKENS)
        getattr(engine, forget)()
        assert rig.retrieve(engine, TOKENS) == 0
        rig.store(engine, TOKENS)
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 3
        check_idle(engine)


def test_what_comes_from_the_disk_again_is_copied_again(rig: Rig, tmp_path: Path) -> None:
    with rig.open(slots=3, local_disk=tmp_path, max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        for _ in range(3):
            rig.retrieve(engine, TOKENS)
        assert engine.flush(30.0), "only what is on disk gives its slot up"
        assert rig.store(engine, tokens_of(2, 48)) == 48
        assert engine.flush(30.0)
        for expected in (3, 3, 6):
            assert rig.retrieve(engine, TOKENS) == 40
            assert from_gpu(engine) == expected
        check_idle(engine)


def load_until_hot(rig: Rig, engine: CacheEngine) -> None:
    for _ in range(3):
        assert rig.retrieve(engine, TOKENS) == 40
    assert from_gpu(engine) == 3


def test_a_copy_does_not_outlive_its_chunk(rig: Rig) -> None:
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        load_until_hot(rig, engine)
        assert engine.clear(TOKENS) == 3
        rig.version = 1
        rig.store(engine, TOKENS)
        for expected in (3, 3, 6):
            assert rig.retrieve(engine, TOKENS) == 40
            assert from_gpu(engine) == expected
        check_idle(engine)


def test_a_copy_does_not_outlive_a_chunk_that_was_damaged(rig: Rig, tmp_path: Path) -> None:
    with rig.open(slots=3, local_disk=tmp_path, max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        load_until_hot(rig, engine)
        assert engine.flush(30.0), "only what is on disk gives its slot up"
        assert rig.store(engine, tokens_of(2, 48)) == 48
        assert engine.flush(30.0)
        for path in tmp_path.glob("*/*/*.safetensors"):
            flip_header(path)
        assert rig.retrieve(engine, TOKENS) == 0
        assert engine.stats().index.lost_chunks == 3
        engine.clear(TOKENS)
        rig.version = 1
        rig.store(engine, TOKENS)
        for _ in range(3):
            assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)


@pytest.mark.parametrize("advances", range(1, 8))
def test_no_copy_is_taken_of_what_a_load_given_up_left(advances: int) -> None:
    """Its blocks hold some layers of the chunk, or what others have written there since."""
    rig = Rig(num_layers=6)
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        block_ids = rig.blocks(40)
        for _ in range(3):
            loading = engine.retrieve_layer(TOKENS, slot_mapping=rig.slot_mapping(block_ids, 40))
            for _ in range(advances):
                next(loading)
            loading.close()
            rig.poison()
        assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)


def test_no_copy_is_taken_before_every_layer_was_asked_for() -> None:
    """vLLM does this if a forward pass ends early."""
    rig = Rig(num_layers=6)
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        mapping = rig.slot_mapping(rig.blocks(40), 40)
        for _ in range(3):
            jobs = engine._planner.plan_load(engine._load_request(TOKENS, None, mapping, NO_EXTRAS))
            load = LayerLoad(engine._mover, jobs)
            load.move(0)
            assert engine._planner.complete_load(jobs, load.finish).failed == set()
            rig.poison()
        assert rig.retrieve(engine, TOKENS) == 40
        check_idle(engine)


def test_a_copy_of_what_is_replaced_meanwhile_does_not_count(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under vLLM other threads fill slots while the model's thread takes its copies."""
    gather = HotChunks._gather
    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        cpu = engine._tiers.cpu

        def overtaken(hot: HotChunks, ref: ChunkRef, *arguments: Any) -> None:
            gather(hot, ref, *arguments)
            for slot in range(cpu.num_slots):
                if cpu.read(slot, ref) is not None:
                    cpu.claim(slot)
                    cpu.publish(slot, ref)

        rig.store(engine, TOKENS)
        rig.retrieve(engine, TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(HotChunks, "_gather", overtaken)
            rig.retrieve(engine, TOKENS)
        assert rig.retrieve(engine, TOKENS) == 40
        assert from_gpu(engine) == 0


@pytest.mark.parametrize("call", ["gather", "scatter"])
def test_a_device_that_fails_is_left_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    with rig.open(max_local_gpu_bytes=4 * SLOT_BYTES) as engine:
        rig.store(engine, TOKENS)
        monkeypatch.setattr(type(rig.paged), f"{call}_on_device", broken)
        for _ in range(5):
            assert rig.retrieve(engine, TOKENS) == 40
        assert engine.stats().mover.chunks_loaded_from_gpu == 0
        assert caplog.text.count(f"left out from now on: cannot {call} a chunk on cpu: broken on purpose") == 1


def test_a_pool_without_room_for_a_chunk_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="max_local_gpu_size"):
        rig.open(max_local_gpu_bytes=SLOT_BYTES - 1)
    with rig.open():
        pass


def test_rows_of_which_some_are_null_are_not_kept_as_the_whole() -> None:
    """With several groups of layers, a part of a chunk has as many rows as the whole."""
    layers = [
        {f"{group}.{n}": torch.zeros((20, width), dtype=torch.uint8) for n in range(2)}
        for group, width in enumerate((24, 40))
    ]
    groups = [
        bind_paged_kv(caches, num_blocks=20, block_tokens=16, chunk_tokens=64, reserved_blocks=1) for caches in layers
    ]
    for number, cache in enumerate(layers[0].values()):
        cache.add_(torch.arange(20, dtype=torch.uint8)[:, None] + 100 * number)
    paged = bind_groups(groups, [0], block_tokens=16, chunk_tokens=64)
    hot = HotChunks(paged, 4 * paged.layout.slot_bytes)
    mover, ref = Mover(paged, LabelledPool(SlabPool(4, paged.layout.slot_bytes)), {}, hot), ChunkRef(b"k" * 16, 4)
    assert not mover.store([StoreJob(StoreStep(ref, 0, ()), as_block_ids([1, 2, 3, 4]))])
    for ids in ([0, 0, 13, 14], [0, 0, 13, 14], [5, 6, 7, 8]):
        assert not mover.load([LoadJob(LoadStep(ref, 0, Place.MEMORY), as_block_ids(ids), 0)]).failed
    assert all(torch.equal(cache[[5, 6, 7, 8]], cache[[1, 2, 3, 4]]) for cache in layers[0].values())
    assert mover.close(5)
